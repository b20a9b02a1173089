//! The meaning of a graph: every primitive as a plain loop, in f64 or in the precision of the dtypes. The oracle that
//! kernels, passes, gradients and shardings are held against.
//!
//! Ranks of a device mesh run in lockstep (the same graph, different arguments), so that a collective sees all of
//! them; a graph without a mesh is the case of one rank. `eval/evaluator.rs` walks the nodes, `eval/prim.rs` dispatches
//! the primitives to one file a subject.

mod collective;
mod elements;
mod elementwise;
mod evaluator;
mod matmul;
mod order;
mod philox;
mod precision;
mod prim;
mod recurrence;
mod reduce;
mod rows;
mod views;

use std::rc::Rc;

use crate::dim::Bindings;
use crate::dtype::DType;
use crate::error::{GraphError, Result};
use crate::graph::{Arg, FuncId, Function, Graph};
use crate::prim::{Literal, Prim};
use crate::tensor::{Data, Tensor, Value};
use crate::types::Type;

use evaluator::{Evaluator, Ranked};

pub use philox::{philox4x32, uniform};
pub use precision::Precision;

/// Evaluates the main function. `args` gives the value of each argument; outputs come with their names, in order,
/// states' last versions among them.
///
/// # Errors
/// Names an argument that is missing or does not fit its type under `bindings`, a symbol that is not bound, or the op
/// that has no result, such as a slice that reaches past its extent.
pub fn evaluate(
    graph: &Graph,
    args: &dyn Fn(&Arg) -> Option<Value>,
    bindings: &Bindings,
    precision: Precision,
) -> Result<Vec<(String, Value)>> {
    let by_rank = evaluate_mesh(graph, &[], &|_, arg| args(arg), bindings, precision)?;
    Ok(by_rank.into_iter().next().unwrap_or_default())
}

/// Evaluates function `func` of `functions` with its arguments in order, and gives its outputs in order.
///
/// # Errors
/// As [`evaluate`].
pub fn evaluate_function(
    functions: &[Function],
    func: FuncId,
    args: Vec<Value>,
    bindings: &Bindings,
    precision: Precision,
) -> Result<Vec<Value>> {
    let function = functions.get(func.index()).ok_or_else(|| {
        GraphError::usage("evaluate", format!("no function {} among {}", func.index(), functions.len()))
    })?;
    if args.len() != function.args.len() {
        let why = format!("takes {} arguments, got {}", function.args.len(), args.len());
        return Err(GraphError::usage(&function.name, why));
    }
    let mut ranked: Vec<Ranked> = Vec::with_capacity(args.len());
    for (arg, value) in function.args.iter().zip(args) {
        check(arg, &value, bindings)?;
        ranked.push(vec![Rc::new(value)]);
    }
    let evaluator = Evaluator { mesh: &[], ranks: 1, bindings, precision };
    let outputs = evaluator.run(functions, function, ranked)?;
    Ok(outputs.into_iter().filter_map(|by_rank| by_rank.into_iter().next()).map(Rc::unwrap_or_clone).collect())
}

/// Evaluates the main function on every rank of a mesh in lockstep. `mesh` names its axes with their sizes, and ranks
/// are numbered row-major over them; `args` is asked for each rank's arguments, and the outputs come by rank. A
/// collective acts within each group of ranks that differ along its axis alone.
///
/// # Errors
/// As [`evaluate`]; also when a collective's axis is not in `mesh` with its number of ranks.
pub fn evaluate_mesh(
    graph: &Graph,
    mesh: &[(&str, usize)],
    args: &dyn Fn(usize, &Arg) -> Option<Value>,
    bindings: &Bindings,
    precision: Precision,
) -> Result<Vec<Vec<(String, Value)>>> {
    let ranks: usize = mesh.iter().map(|(_, size)| size).product();
    let main = graph.main();
    let mut ranked: Vec<Ranked> = Vec::with_capacity(main.args.len());
    for arg in &main.args {
        let of_rank = |rank| {
            let value = args(rank, arg)
                .ok_or_else(|| GraphError::usage(&arg.name, format!("argument is missing; give it as {}", arg.ty)))?;
            check(arg, &value, bindings)?;
            Ok(Rc::new(value))
        };
        ranked.push((0..ranks).map(of_rank).collect::<Result<_>>()?);
    }
    let evaluator = Evaluator { mesh, ranks, bindings, precision };
    let mut outputs: Vec<Vec<(String, Value)>> = (0..ranks).map(|_| Vec::new()).collect();
    for (output, by_rank) in main.outputs.iter().zip(evaluator.run(&graph.functions, main, ranked)?) {
        for (named, value) in outputs.iter_mut().zip(by_rank) {
            named.push((output.name.to_string(), Rc::unwrap_or_clone(value)));
        }
    }
    Ok(outputs)
}

/// Requires that `value` has the type of `arg` under `bindings`.
fn check(arg: &Arg, value: &Value, bindings: &Bindings) -> Result<()> {
    let wanted = arg.ty.shape.eval(bindings)?;
    let wrong = |why: String| Err(GraphError::usage(&arg.name, why));
    let got = value.ty();
    if got.dtype != arg.ty.dtype || got.format != arg.ty.format || got.shape.as_const().as_ref() != Some(&wanted) {
        return wrong(format!("argument must be {}, with extents {wanted:?} under the bindings, got {got}", arg.ty));
    }
    match value {
        Value::Plain(tensor) => check_tensor(&arg.name, tensor),
        Value::Stored { format, components, .. } => {
            let types: Vec<Type> = format.components(&got.shape).into_iter().map(|c| c.ty()).collect();
            if !components.iter().map(Tensor::ty).eq(types.iter().cloned()) {
                return wrong(format!("components must be {types:?}"));
            }
            components.iter().try_for_each(|c| check_tensor(&arg.name, c))
        }
    }
}

/// Requires that a tensor's elements are as many as its shape says and of its dtype's kind.
fn check_tensor(name: &str, tensor: &Tensor) -> Result<()> {
    let (count, float) = match &tensor.data {
        Data::Float(v) => (v.len(), true),
        Data::Int(v) => (v.len(), false),
    };
    if float != tensor.dtype.is_float() || count != tensor.len() {
        let kind = if float { "float" } else { "integer" };
        return Err(GraphError::usage(name, format!("holds {count} {kind} elements, which is no {}", tensor.ty())));
    }
    Ok(())
}

/// The value of an elementwise primitive of scalar constants, unrounded; `None` where it has none.
pub(crate) fn fold(prim: &Prim, inputs: &[&Literal], dtype: DType) -> Option<Literal> {
    let values: Vec<Value> = inputs
        .iter()
        .map(|l| {
            let tensor = if l.dtype.is_float() {
                Tensor::float(l.dtype, &[], l.values.to_vec())
            } else {
                Tensor::int(l.dtype, &[], l.values.iter().map(|v| *v as i64).collect())
            };
            Value::Plain(tensor)
        })
        .collect();
    let values: Vec<&Value> = values.iter().collect();
    let output = prim::apply(prim, &values, &[Vec::new()], &Bindings::new(), Precision::Exact).ok()?.pop()?;
    let value = match &output.data {
        Data::Float(v) => v[0],
        Data::Int(v) => v[0] as f64,
    };
    Some(Literal { dtype, values: [value].into(), vector: false })
}
