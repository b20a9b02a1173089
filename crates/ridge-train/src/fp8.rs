//! Products of 8-bit floats in a step, and the largest magnitudes of earlier steps that delayed scaling goes by.
//!
//! The weights of the training graph that hold magnitudes are not trained: their "gradients" are the magnitudes of the step,
//! of which the largest over its micro-batches is kept, and an update sets them to the largest of the last steps.

use ridge_graph::passes::{self, FP8_AMAX};
use ridge_graph::{Arg, Builder, DType, Graph, Result as GraphResult, Role, Shape, Type};

use crate::settings::TrainSettings;

/// `graph` with the products that the settings ask for; `outputs` of it are kept.
///
/// # Errors
/// When no linear of a layer fits.
pub(crate) fn with_products(mut graph: Graph, outputs: &[&str], settings: &TrainSettings) -> GraphResult<Graph> {
    let Some(scaling) = settings.fp8.scaling() else { return Ok(graph) };
    passes::prune(&mut graph, outputs)?;
    // What shares an input is quantised once.
    passes::group_linears(&mut graph);
    passes::with_fp8(&graph, scaling, settings.gradient_codes())
}

/// The weights of `graph` that hold magnitudes.
pub(crate) fn magnitudes(graph: &Graph) -> impl Iterator<Item = &Arg> {
    graph.args(Role::Weight).filter(|arg| arg.name.ends_with(FP8_AMAX))
}

/// The name and type of the magnitudes of the last `steps` steps, the latest first, of the weight `arg`.
pub(crate) fn history(arg: &Arg, steps: usize) -> (String, Type) {
    let mut dims = vec![steps.into()];
    dims.extend(arg.ty.shape.0.iter().cloned());
    (format!("history.{}", arg.name), Type::tensor(DType::F32, Shape(dims)))
}

/// Puts the magnitudes in the weight `of_step` at the head of the history, and the largest of that in the weight `arg`.
pub(crate) fn update(g: &mut Builder, arg: &Arg, of_step: &str, steps: usize) -> GraphResult<()> {
    let (name, ty) = history(arg, steps);
    let now = g.weight(of_step, arg.ty.clone())?;
    let mut row = vec![1.into()];
    row.extend(arg.ty.shape.0.iter().cloned());
    let mut all = g.reshape(now, Shape(row))?;
    let history = g.state(&name, ty)?;
    if steps > 1 {
        let before = g.state_read(history)?;
        let before = g.slice(before, 0, 0, steps - 1)?;
        all = g.concat(&[all, before], 0)?;
    }
    let largest = g.reduce_max(all, 0)?;
    let largest = g.reshape(largest, arg.ty.shape.clone())?;
    g.state_write(history, all)?;
    let magnitudes = g.state(&arg.name, arg.ty.clone())?;
    g.state_write(magnitudes, largest)?;
    Ok(())
}
