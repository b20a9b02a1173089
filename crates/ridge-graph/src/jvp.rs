//! Products with the Jacobian, from two reverse sweeps: the gradient of `sum(u * y)` is linear in `u`, and its own gradient for
//! `u` along a tangent is the derivative of `y` along it (Townsend 2017, "A new trick for calculating Jacobian vector
//! products"). So every op that has a gradient has this one too, without a rule of its own.

use crate::dtype::DType;
use crate::error::{GraphError, Result};
use crate::grad::{Differentiated, data_outputs, finished, named};
use crate::graph::{Arg, Builder, Graph, Role, Var};
use crate::shape::Shape;
use crate::types::Type;

/// The step input that is differentiated for in between.
const PROBE: &str = "jvp.probe";

/// Adds to `graph` an output `tangent.<output>`, f32 of the shape of the output `output`: its derivative along the step inputs
/// `tangent.<name>`, each of the type of the argument of main named in `wrt`. Other outputs and arguments stay.
///
/// # Errors
/// When `output` is no float output, a name is not that of a plain float argument, or an op on the way has no gradient.
pub fn jvp(graph: &Graph, output: &str, wrt: &[impl AsRef<str>]) -> Result<Graph> {
    let mut tangents: Vec<(String, Type)> = Vec::with_capacity(wrt.len());
    for name in wrt {
        let Arg { name, ty, .. } = named(graph.main(), name.as_ref())?;
        tangents.push((name.to_string(), ty.clone()));
    }
    let known: Vec<String> = data_outputs(graph.main()).map(|(name, _)| name).collect();

    let (mut g, mut outputs) = Builder::reopen(graph.clone());
    let y = outputs.iter().find(|(name, _)| name == output).map(|(_, var)| *var).ok_or_else(|| {
        GraphError::usage("", format!("no output `{output}` to differentiate; the graph has {}", known.join(", ")))
    })?;
    let ty = g.ty(y)?.clone();
    if !ty.dtype.is_float() || !ty.is_plain() {
        return Err(GraphError::usage(output, format!("is {ty}; only plain floats have a derivative")));
    }
    let probe = Type::tensor(DType::F32, ty.shape.clone());
    let u = g.step_input(PROBE, probe.clone())?;
    let sum = inner(&mut g, y, u)?;
    outputs.push((PROBE.to_owned(), sum));

    let names: Vec<&str> = tangents.iter().map(|(name, _)| name.as_str()).collect();
    let mut first = Differentiated::new(&g.finish(outputs)?, PROBE, &names)?;
    let g = &mut first.g;
    let mut along = g.constant(DType::F32, 0.0)?;
    for (parameter, (name, ty)) in first.parameters.iter().zip(&tangents) {
        let tangent = g.step_input(&format!("tangent.{name}"), Type::tensor(ty.dtype, ty.shape.clone()))?;
        let part = inner(g, parameter.gradient, tangent)?;
        along = g.add(along, part)?;
    }
    first.outputs.retain(|(name, _)| name != PROBE);
    let second = Differentiated::new(&first.finish(vec![(PROBE.to_owned(), along)])?, PROBE, &[PROBE])?;
    let derivative = (format!("tangent.{output}"), second.parameters[0].gradient);
    let with_probe = second.finish(vec![derivative])?;

    // Nothing depends on the probe any more, but calls may still take it.
    let zeros = |g: &mut Builder| {
        let zero = g.constant(DType::F32, 0.0)?;
        Ok(vec![(PROBE.to_owned(), g.broadcast(zero, probe.shape.clone())?)])
    };
    let asks = with_probe.args(Role::StepInput).any(|arg| &*arg.name == PROBE);
    let (g, mut outputs) = if asks { Builder::behind(with_probe, zeros)? } else { Builder::reopen(with_probe) };
    outputs.retain(|(name, _)| name != PROBE);
    finished(g, outputs)
}

/// `sum(a * b)` in f32.
fn inner(g: &mut Builder, a: Var, b: Var) -> Result<Var> {
    let (a, b) = (g.cast(a, DType::F32)?, g.cast(b, DType::F32)?);
    let product = g.mul(a, b)?;
    let rank = g.ty(product)?.shape.rank();
    let sum = (0..rank).try_fold(product, |sum, axis| g.reduce_sum(sum, axis))?;
    g.reshape(sum, Shape::default())
}
