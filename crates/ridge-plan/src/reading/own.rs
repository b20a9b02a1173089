//! What Ridge's own training keeps of a layer: what its gradient takes from the forward to the backward pass.

use std::collections::HashMap;

use ridge_graph::grad::{float_weights, gradient};
use ridge_graph::shard::{Placement, placements};
use ridge_graph::{Arg, Bindings, Graph, GraphError, Poly, passes};
use ridge_models::{parallel, symbols};

/// Bytes that a layer keeps, by the tokens of a micro-batch.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnSaved {
    /// Values that are whole on each rank of tensor parallelism.
    whole: Poly,
    /// Values that are cut.
    cut: Poly,
}

impl OwnSaved {
    /// Bytes that one of `tp` ranks keeps of `sequences` sequences of `tokens` tokens each, the layer's input left out.
    pub fn bytes(&self, sequences: usize, tokens: usize, tp: usize) -> f64 {
        let bindings = Bindings::new().with(symbols::TOKENS, sequences * tokens);
        let of = |poly: &Poly| poly.eval(&bindings).unwrap_or(0) as f64;
        of(&self.whole) + of(&self.cut) / tp as f64
    }
}

/// What the gradient of the loss of `training`, a training graph, keeps of each layer, by the name of its function.
///
/// # Errors
/// When an op has no gradient.
pub(super) fn saved_by_gradient(mut training: Graph) -> Result<HashMap<String, OwnSaved>, GraphError> {
    passes::prune(&mut training, &["loss"])?;
    let graph = gradient(&training, "loss", &float_weights(&training))?;
    // Only layers are read, and the loss has no rule for an output projection that is cut.
    let place = |arg: &Arg| match parallel::is_output_projection(&arg.name) {
        true => Placement::Replicate,
        false => parallel::placement(arg),
    };
    let places = placements(&graph, &place)?;
    let mut saved = HashMap::new();
    for function in &graph.functions {
        let Some(name) = function.name.strip_suffix("_fwd") else { continue };
        let mut of = OwnSaved { whole: Poly::zero(), cut: Poly::zero() };
        for output in function.outputs.iter().filter(|output| output.name.starts_with("saved.")) {
            let bytes = function.ty(output.var).bytes();
            match places.get(&output.var) {
                Some(Placement::Shard { .. }) => of.cut += &bytes,
                _ => of.whole += &bytes,
            }
        }
        saved.insert(name.to_owned(), of);
    }
    Ok(saved)
}
