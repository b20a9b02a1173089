//! What Ridge's own training keeps of a layer: what its gradient takes from the forward to the backward pass.

use std::collections::HashMap;

use ridge_graph::grad::{float_weights, gradient};
use ridge_graph::shard::{Placement, placements};
use ridge_graph::{Bindings, GraphError, Poly, passes};
use ridge_models::{Model, parallel, symbols, with_loss};

/// Bytes that a layer keeps, by the extents of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnSaved {
    /// Values that are whole on each rank of tensor parallelism.
    whole: Poly,
    /// Values that are cut.
    cut: Poly,
    /// Tokens of a block of the cache.
    block_size: usize,
}

impl OwnSaved {
    /// Bytes that one of `tp` ranks keeps of `sequences` sequences of `tokens` tokens each, the layer's input left out.
    pub fn bytes(&self, sequences: usize, tokens: usize, tp: usize) -> f64 {
        let table = tokens.div_ceil(self.block_size);
        let of = |poly: &Poly| {
            let extent = |name: &str| match name {
                symbols::SEQS => sequences,
                symbols::TABLE => table,
                symbols::BLOCKS => table * sequences,
                _ => sequences * tokens,
            };
            let bindings =
                poly.symbols().fold(Bindings::new(), |b, symbol| b.with(symbol.name(), extent(symbol.name())));
            poly.eval(&bindings).unwrap_or(0) as f64
        };
        of(&self.whole) + of(&self.cut) / tp as f64
    }
}

/// What the gradient of `model`'s loss keeps of each layer, by the name of its function.
///
/// # Errors
/// When an op has no gradient, as those that only are planned.
pub(super) fn saved_by_gradient(model: &Model) -> Result<HashMap<String, OwnSaved>, GraphError> {
    let mut loss = with_loss(&model.graph)?;
    passes::prune(&mut loss, &["loss"])?;
    let graph = gradient(&loss, "loss", &float_weights(&loss))?;
    let places = placements(&graph, &parallel::placement)?;
    let mut saved = HashMap::new();
    for function in &graph.functions {
        let Some(name) = function.name.strip_suffix("_fwd") else { continue };
        let mut of = OwnSaved { whole: Poly::zero(), cut: Poly::zero(), block_size: model.block_size };
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
