//! Walks the nodes of a function, all ranks in lockstep.

use std::rc::Rc;

use super::precision::Precision;
use super::{collective, prim};
use crate::dim::Bindings;
use crate::error::{GraphError, Result, place};
use crate::graph::{Builder, CompositeRef, Function, Graph, Node, Op};
use crate::prim::Prim;
use crate::tensor::Value;
use crate::types::Type;

/// A value on each rank.
pub(super) type Ranked = Vec<Rc<Value>>;

/// What every node of an evaluation shares.
pub(super) struct Evaluator<'a> {
    /// Axes of the mesh and their sizes.
    pub(super) mesh: &'a [(&'a str, usize)],
    /// The product of the sizes.
    pub(super) ranks: usize,
    /// The numbers of the symbols.
    pub(super) bindings: &'a Bindings,
    /// How floats are computed.
    pub(super) precision: Precision,
}

impl Evaluator<'_> {
    /// The outputs of `function`, which calls functions of `functions`.
    pub(super) fn run(&self, functions: &[Function], function: &Function, args: Vec<Ranked>) -> Result<Vec<Ranked>> {
        let mut uses = function.uses();
        let mut values: Vec<Vec<Ranked>> = Vec::with_capacity(function.nodes.len());
        for node in &function.nodes {
            let inputs: Vec<&Ranked> = node.inputs.iter().map(|v| &values[v.index()][v.out as usize]).collect();
            let types = function.types(&node.inputs);
            let outputs = match &node.op {
                Op::Arg(index) => vec![args[*index].clone()],
                Op::Prim(p) => self.prim(p, node, &types, &inputs)?,
                Op::Composite(c) => {
                    let body = decomposed(c, node, &types)?;
                    let args = inputs.into_iter().cloned().collect();
                    self.run(&body.functions, body.main(), args).map_err(|e| within(e, &node.scope))?
                }
                Op::Call(callee) => {
                    let args = inputs.into_iter().cloned().collect();
                    let callee = &functions[callee.index()];
                    self.run(functions, callee, args).map_err(|e| within(e, &node.scope))?
                }
                Op::Group(group) => {
                    let args = inputs.into_iter().cloned().collect();
                    self.run(functions, &group.body, args).map_err(|e| within(e, &node.scope))?
                }
            };
            values.push(outputs);
            // What no later node reads is let go, so that a deep model needs the memory of its live values only.
            for var in &node.inputs {
                let left = &mut uses[var.index()][var.out as usize];
                *left -= 1;
                if *left == 0 {
                    values[var.index()][var.out as usize] = Ranked::new();
                }
            }
        }
        Ok(function.outputs.iter().map(|o| values[o.var.index()][o.var.out as usize].clone()).collect())
    }

    fn prim(&self, prim: &Prim, node: &Node, types: &[Type], inputs: &[&Ranked]) -> Result<Vec<Ranked>> {
        let failed = |why| op_error(node, types, why);
        // The loops rely on the types, so a rewrite that left a wrong one is an error here.
        let inferred = prim.infer(types).map_err(failed)?;
        if inferred != node.outputs {
            return Err(failed(format!("the node says it gives {:?}, but it gives {inferred:?}", node.outputs)));
        }
        let shapes = node.outputs.iter().map(|t| t.shape.eval(self.bindings)).collect::<Result<Vec<_>, _>>()?;
        if let Prim::Collective { kind, mesh, ranks } = prim {
            let groups = self.groups(mesh, *ranks).map_err(failed)?;
            let mut results: Vec<Option<Rc<Value>>> = vec![None; self.ranks];
            for group in groups {
                let members: Vec<_> = group.iter().map(|&rank| inputs[0][rank].tensor()).collect();
                let given = collective::apply(*kind, &members, &shapes[0], self.precision).map_err(failed)?;
                for (rank, tensor) in group.into_iter().zip(given) {
                    results[rank] = Some(Rc::new(tensor.into()));
                }
            }
            return Ok(vec![results.into_iter().flatten().collect()]);
        }
        if let Prim::Fetch(_) = prim {
            return Ok(vec![inputs[0].clone()]);
        }
        if let Prim::Assemble { format, dtype, .. } = prim {
            let of_rank = |rank: usize| Value::Stored {
                format: format.clone(),
                dtype: *dtype,
                shape: shapes[0].clone(),
                components: inputs.iter().map(|component| component[rank].tensor().clone()).collect(),
            };
            return Ok(vec![(0..self.ranks).map(|rank| Rc::new(of_rank(rank))).collect()]);
        }
        let mut outputs: Vec<Ranked> = vec![Vec::with_capacity(self.ranks); shapes.len()];
        for rank in 0..self.ranks {
            let operands: Vec<&Value> = inputs.iter().map(|i| &*i[rank]).collect();
            let given = prim::apply(prim, &operands, &shapes, self.bindings, self.precision).map_err(failed)?;
            for (output, tensor) in outputs.iter_mut().zip(given) {
                output.push(Rc::new(tensor.into()));
            }
        }
        Ok(outputs)
    }

    /// The groups of ranks that differ along mesh axis `axis` alone, each in the order of that axis.
    fn groups(&self, axis: &str, wanted: usize) -> Result<Vec<Vec<usize>>, String> {
        let Some(position) = self.mesh.iter().position(|(name, _)| *name == axis) else {
            return match wanted {
                1 => Ok((0..self.ranks).map(|rank| vec![rank]).collect()),
                _ => Err(format!("the mesh {:?} has no axis `{axis}`; evaluate on a mesh that has it", self.mesh)),
            };
        };
        let size = self.mesh[position].1;
        if size != wanted {
            return Err(format!("is over {wanted} ranks of `{axis}`, but the mesh has {size}"));
        }
        let stride: usize = self.mesh[position + 1..].iter().map(|(_, size)| size).product();
        let first = |rank: &usize| (rank / stride).is_multiple_of(size);
        let members = |rank: usize| (0..size).map(|i| rank + i * stride).collect();
        Ok((0..self.ranks).filter(first).map(members).collect())
    }
}

/// The decomposition of a composite, as a graph whose arguments are the op's inputs. It is built for the types of the
/// node as they stand, symbols included, as it is when a graph is compiled.
fn decomposed(op: &CompositeRef, node: &Node, types: &[Type]) -> Result<Graph> {
    let build = || {
        let mut g = Builder::new();
        let vars: Vec<_> = types.iter().enumerate().map(|(i, ty)| g.arg(&i.to_string(), ty.clone())).collect();
        let outputs = op.decompose(&mut g, &vars)?;
        g.finish(outputs.into_iter().enumerate().map(|(i, v)| (i.to_string(), v)).collect())
    };
    let graph = build().map_err(|e| within(e, &node.scope))?;
    let main = graph.main();
    let given: Vec<Type> = main.outputs.iter().map(|o| main.ty(o.var).clone()).collect();
    if given != node.outputs {
        return Err(op_error(node, types, format!("decomposes to {given:?}, but gives {:?}", node.outputs)));
    }
    Ok(graph)
}

fn op_error(node: &Node, types: &[Type], why: String) -> GraphError {
    GraphError::Op { at: place(&node.scope), op: node.op_name().into(), inputs: types.to_vec(), why }
}

/// The error of an inner function, placed in the scope of the node that runs it.
fn within(error: GraphError, scope: &str) -> GraphError {
    let joined = |at: String| match (scope.is_empty(), at == place("")) {
        (true, _) => at,
        (false, true) => scope.into(),
        (false, false) => format!("{scope}.{at}"),
    };
    match error {
        GraphError::Op { at, op, inputs, why } => GraphError::Op { at: joined(at), op, inputs, why },
        GraphError::Use { at, why } => GraphError::Use { at: joined(at), why },
        other @ GraphError::Symbol(_) => other,
    }
}
