//! What training asks of a decoder's family besides its graph: what each weight is for, and weights as they are published.

use ridge_files::Checkpoint;
use ridge_graph::{Bindings, DType, Graph, Poly};

use crate::error::Result;
use crate::families::{Cut, ModelConfig};
use crate::model::symbols;

/// What a weight is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightRole {
    /// A table whose rows are looked up.
    Embedding,
    /// The output projection, where it is not the embedding.
    Head,
    /// A matrix of this layer that gives a summand of the residual stream.
    Residual {
        /// The layer, from 0.
        layer: usize,
    },
    /// Any other matrix of this layer.
    Hidden {
        /// The layer, from 0.
        layer: usize,
    },
    /// A bias.
    Bias,
    /// The weight of a norm, or another vector.
    Vector,
}

/// The extents of a step of a training graph with so many tokens, which attend to so many pairs of a token and one before it;
/// pairs within windows are taken for as many.
pub fn training_bindings(graph: &Graph, tokens: usize, pairs: usize) -> Bindings {
    let bindings = Bindings::new().with(symbols::TOKENS, tokens).with(symbols::PAIRS, pairs);
    let cost = graph.cost();
    let within: Vec<String> = [&cost.matrix_flops, &cost.vector_flops, &cost.special_flops, &cost.bytes_read]
        .into_iter()
        .flat_map(Poly::symbols)
        .map(|symbol| symbol.name().to_owned())
        .filter(|name| name != symbols::TOKENS && name != symbols::PAIRS)
        .collect();
    within.iter().fold(bindings, |all, name| all.with(name, pairs))
}

/// A tensor under its published name.
#[derive(Clone, Debug)]
pub struct PublishedTensor {
    /// Its name.
    pub name: String,
    /// Its dtype.
    pub dtype: DType,
    /// Its extents, outermost first.
    pub shape: Vec<usize>,
    /// Its elements, row-major, little-endian.
    pub bytes: Vec<u8>,
}

impl ModelConfig {
    /// What the weight `name` of `rank` axes is for.
    pub fn weight_role(&self, name: &str, rank: usize) -> WeightRole {
        if name.ends_with(".bias") || name.ends_with(".e_score_correction_bias") {
            return WeightRole::Bias;
        }
        // Norms with weights for each head have two axes.
        let is_norm = name.rsplit('.').nth(1).is_some_and(|scope| scope.ends_with("norm"));
        if rank < 2 || is_norm {
            return WeightRole::Vector;
        }
        let tensors = &self.family().tensors;
        let Some((layer, scope)) = name
            .strip_prefix(tensors.layers)
            .and_then(|rest| rest.strip_prefix('.')?.split_once('.'))
            .and_then(|(layer, scope)| Some((layer.parse().ok()?, scope)))
        else {
            let is_head = tensors.head.weight().is_some_and(|head| head == name);
            return if is_head { WeightRole::Head } else { WeightRole::Embedding };
        };
        let is_residual = self
            .residual_scopes()
            .iter()
            .any(|of| scope.strip_prefix(of).is_some_and(|rest| rest.starts_with('.') || rest.is_empty()));
        if is_residual { WeightRole::Residual { layer } } else { WeightRole::Hidden { layer } }
    }

    /// Scopes within a layer of the projections that give summands of the residual stream, such as `mlp.down_proj`.
    pub fn residual_scopes(&self) -> Vec<&'static str> {
        let sums = |cut: Option<Cut>| matches!(cut, Some(Cut::Terms | Cut::HeadTerms));
        self.layer_tensors().iter().filter(|tensor| sums(tensor.cut)).map(|tensor| tensor.scope).collect()
    }

    /// Name of the class of transformers that runs it.
    pub fn class(&self) -> Option<&'static str> {
        self.family().class
    }

    /// The tensors of the file `weights`, safetensors with the names of the graph's weights, as the family publishes them.
    ///
    /// # Errors
    /// When it is no such file.
    pub fn publish(&self, weights: Vec<u8>) -> Result<Vec<PublishedTensor>> {
        let checkpoint = Checkpoint::from_bytes("the weights", weights)?;
        let of = |tensor: &ridge_files::checkpoint::Published<'_>| -> Result<PublishedTensor> {
            let bytes = tensor.bytes(|view| Ok::<_, crate::ModelError>(view.data.to_vec()))?;
            let dtype = tensor.views[0].dtype;
            Ok(PublishedTensor { name: tensor.name.clone(), dtype, shape: tensor.shape.clone(), bytes })
        };
        self.published(&checkpoint).iter().map(of).collect()
    }

    /// What the weights of norms begin as: 1, or 0 where one is added to them.
    pub fn initial_norm(&self) -> f64 {
        if self.adds_one_to_norms() { 0.0 } else { 1.0 }
    }
}
