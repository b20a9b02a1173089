//! In which precision each op of a graph computes: a reading of its types and of its decomposition.

use std::collections::BTreeMap;

use crate::error::Result;
use crate::graph::{Builder, CompositeRef, Graph, Node, Op};
use crate::prim::{Combine, Prim};
use crate::types::Type;

/// An op at one choice of types.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct OpPrecision {
    /// Its name.
    pub op: String,
    /// How its float operands are stored, in their order, equal ones once: dtypes, or formats with their dtypes.
    pub operands: Vec<String>,
    /// Does it add up products or elements? Backends do so in f32 at least.
    pub sums: bool,
    /// How its float results are stored.
    pub results: Vec<String>,
}

/// The ops of the functions of `graph` that compute with floats, and how often each is applied: calls count for each call.
/// Primitives that only move values are left out.
///
/// # Errors
/// Those of the decomposition of an op.
pub fn op_precisions(graph: &Graph) -> Result<Vec<(OpPrecision, usize)>> {
    let mut times = vec![0; graph.functions.len()];
    times[graph.main.index()] = 1;
    for (index, function) in graph.functions.iter().enumerate().rev() {
        for node in &function.nodes {
            if let Op::Call(callee) = node.op {
                times[callee.index()] += times[index];
            }
        }
    }
    let mut found: BTreeMap<OpPrecision, usize> = BTreeMap::new();
    for (function, times) in graph.functions.iter().zip(times).filter(|(_, times)| *times > 0) {
        for node in &function.nodes {
            let inputs = function.types(&node.inputs);
            if let Some(precision) = of_node(node, &inputs)? {
                *found.entry(precision).or_default() += times;
            }
        }
    }
    Ok(found.into_iter().collect())
}

fn of_node(node: &Node, inputs: &[Type]) -> Result<Option<OpPrecision>> {
    let sums = match &node.op {
        Op::Composite(op) => sums(op, inputs)?,
        Op::Prim(prim) if prim.is_elementwise() || is_sum(prim) => is_sum(prim),
        _ => return Ok(None),
    };
    let (operands, results) = (stored(inputs), stored(&node.outputs));
    Ok((!results.is_empty()).then(|| OpPrecision { op: node.op_name().to_owned(), operands, sums, results }))
}

fn is_sum(prim: &Prim) -> bool {
    match prim {
        Prim::MatMul { .. } | Prim::LinearRecurrence { .. } | Prim::LinearRecurrenceGradient { .. } => true,
        Prim::Reduce { op, .. } | Prim::Scan { op, .. } => *op == Combine::Sum,
        Prim::Scatter { add, .. } => *add,
        _ => false,
    }
}

/// Does `op` of `inputs` add anything up?
fn sums(op: &CompositeRef, inputs: &[Type]) -> Result<bool> {
    let mut g = Builder::new();
    g.begin("op");
    let arg = |g: &mut Builder, (i, ty): (usize, &Type)| match ty.state {
        true => g.state(&i.to_string(), ty.clone()),
        false => Ok(g.arg(&i.to_string(), ty.clone())),
    };
    let args = inputs.iter().enumerate().map(|input| arg(&mut g, input)).collect::<Result<Vec<_>>>()?;
    op.decompose(&mut g, &args)?;
    let body = g.end(Vec::new());
    for node in &body.nodes {
        let found = match &node.op {
            Op::Prim(prim) => is_sum(prim) && node.outputs[0].dtype.is_float(),
            Op::Composite(op) => sums(op, &body.types(&node.inputs))?,
            _ => false,
        };
        if found {
            return Ok(true);
        }
    }
    Ok(false)
}

/// How the floats among `types` are stored, equal neighbours once.
fn stored(types: &[Type]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for ty in types.iter().filter(|ty| ty.dtype.is_float()) {
        let name = ty.format.as_ref().map_or_else(|| ty.dtype.name().to_owned(), |format| format.name().to_owned());
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    #[test]
    fn products_of_calls_are_counted_with_what_they_sum_in() {
        let mut g = Builder::new();
        let layer = g.function("layer", |g| {
            let x = g.arg("x", Type::tensor(DType::BF16, [3usize, 8]));
            let w = g.weight("w", Type::tensor(DType::F32, [8usize, 8]))?;
            let y = g.linear(x, w)?;
            Ok(vec![g.mul(y, y)?])
        });
        let layer = layer.unwrap();
        let mut x = g.step_input("x", Type::tensor(DType::BF16, [3usize, 8])).unwrap();
        for i in 0..3 {
            x = g.scoped(&i.to_string(), |g| g.call(layer, &[x])).unwrap()[0];
        }
        let graph = g.finish(vec![("y".into(), x)]).unwrap();
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let of = |op: &str, operands: &[&str], sums| OpPrecision {
            op: op.into(),
            operands: names(operands),
            sums,
            results: names(&["bf16"]),
        };
        let wanted = [(of("linear", &["bf16", "f32"], true), 3), (of("mul", &["bf16"], false), 3)];
        assert_eq!(op_precisions(&graph).unwrap(), wanted);
    }
}
