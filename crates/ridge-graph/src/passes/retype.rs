//! Gives weights another storage: a format, or another dtype. What `ridge quantize` does to a model, and what loading
//! a quantised checkpoint does to its family's graph.

use super::respecialise::{Frame, Rewrite, respecialise};
use crate::error::{GraphError, Result};
use crate::graph::{Arg, Builder, Graph, Node, Op, Role, Var};
use crate::prim::Prim;
use crate::types::Type;
use crate::why::Why;

/// `graph` with the weights of its main function stored as `storage` says, by name and present type; `None` leaves a
/// weight as it is. Functions are specialised once for each distinct tuple of argument types, and types of values
/// follow from the new inputs. Primitives that read a weight in a format read its decoded values.
///
/// # Errors
/// When a new type has another shape, when a format cannot store it, or when a consumer of the weight does not accept
/// it, naming the weight.
pub fn retype(graph: &Graph, storage: &dyn Fn(&str, &Type) -> Option<Type>) -> Result<Graph> {
    let types = graph.main().args.iter().map(|arg| stored_type(arg, storage)).collect::<Result<Vec<_>>>()?;
    Ok(respecialise(graph, types, &Retype)?.0)
}

fn stored_type(arg: &Arg, storage: &dyn Fn(&str, &Type) -> Option<Type>) -> Result<Type> {
    let wanted = if arg.role == Role::Weight { storage(&arg.name, &arg.ty) } else { None };
    let Some(ty) = wanted else { return Ok(arg.ty.clone()) };
    let refuse = |why: Why| Err(GraphError::usage("retype", format!("weight `{}`: {why}", arg.name)));
    if ty.shape != arg.ty.shape || ty.state {
        return refuse(format!("{ty} is not another storage of {}: shapes must be equal", arg.ty));
    }
    if !ty.dtype.is_float() || !arg.ty.dtype.is_float() {
        return refuse(format!("cannot store {} as {ty}: both must be of a float dtype", arg.ty));
    }
    match ty.format.as_ref().map_or(Ok(()), |f| f.check(&ty.shape)) {
        Ok(()) => Ok(ty),
        Err(why) => refuse(why),
    }
}

struct Retype;

impl Rewrite for Retype {
    /// The type a value now has.
    type Tag = Type;

    fn arg(&self, _arg: &Arg, tag: &Type) -> Result<Type, Why> {
        Ok(tag.clone())
    }

    fn node(&self, g: &mut Builder, frame: &mut Frame<'_, Type>, node: &Node) -> Result<Vec<(Var, Type)>> {
        let mut inputs: Vec<Var> = node.inputs.iter().map(|v| frame.value(*v).0).collect();
        // Ops take weights of any storage. A primitive is given what a format stands for, and an elementwise one computes in the
        // dtype that it was written for, which the builder's `cast` left out where the weight had it.
        if let Op::Prim(prim) = &node.op {
            let keeps_dtype = prim.is_elementwise() && !matches!(prim, Prim::Cast(_));
            for (input, var) in inputs.iter_mut().zip(&node.inputs) {
                let (written, now) = (frame.function.ty(*var), &frame.value(*var).1);
                if now.state || now == written {
                    continue;
                }
                if now.format.is_some() {
                    *input = g.decoded(*input, now.dtype)?;
                }
                if keeps_dtype && now.dtype != written.dtype {
                    *input = g.cast(*input, written.dtype)?;
                }
            }
        }
        let emitted = g.emit(node.op.clone(), &inputs).map_err(|error| match changed_weight(frame, node) {
            Some(weight) => GraphError::usage(&node.scope, format!("{weight} does not suit its use: {error}")),
            None => error,
        })?;
        emitted.into_iter().map(|v| Ok((v, g.ty(v)?.clone()))).collect()
    }
}

/// The first input of `node` that is a weight of new type, as errors name it.
fn changed_weight(frame: &Frame<'_, Type>, node: &Node) -> Option<String> {
    node.inputs.iter().find_map(|var| {
        let arg = frame.arg_of(*var).filter(|a| a.role == Role::Weight)?;
        let ty = &frame.value(*var).1;
        (*ty != arg.ty).then(|| format!("weight `{}` stored as {ty} instead of {}", frame.full_name(arg), arg.ty))
    })
}
