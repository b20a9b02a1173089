//! What the families of RWKV have in common: each layer has a mixer of tokens and one of channels, which both see the token before.
//! A family says what its mixers are.

use std::any::Any;
use std::fmt::Debug;
use std::ops::DerefMut;

use ridge_files::checkpoint::Part;
use ridge_graph::{Builder, DType, Result as GraphResult, Type, Var};

use super::blocks::{NormKind, ResidualHalf};
use super::decoder::{DecoderFamily, DecoderLayer, LayerInputs};
use super::layer_states::LayerStates;
use super::recurrent::previous;
use super::tensors::{LLAMA_TENSORS, TensorName, TensorTable};
use crate::config::DecoderConfig;
use crate::model::BuildOptions;

/// The scopes of both mixers, published under other names, and of states within them.
pub(super) const TOKENS: &str = "time_mixer";
pub(super) const CHANNELS: &str = "channel_mixer";
pub(super) const SHIFT: &str = "shift";

/// Names that a family publishes its tensors under.
pub(super) struct RwkvNames {
    /// Of the layers.
    pub(super) layers: &'static str,
    /// Of the mixers of tokens and of channels, within a layer.
    pub(super) mixers: [&'static str; 2],
    /// Of the norms ahead of them.
    pub(super) norms: [&'static str; 2],
    /// Of the norm behind the embedding, within the first layer.
    pub(super) first_norm: &'static str,
}

/// The names of the flash-linear-attention library.
pub(super) const FLA_NAMES: RwkvNames = RwkvNames {
    layers: "model.layers",
    mixers: ["attn", "ffn"],
    norms: ["attn_norm", "ffn_norm"],
    first_norm: "pre_norm",
};

/// The tensors of that library's models.
pub(super) const FLA_TENSORS: TensorTable = TensorTable {
    embedding: TensorName::whole("model.embeddings", "token_embd"),
    attention: TOKENS,
    norm: TensorName::whole("model.norm", "output_norm"),
    layer: &[],
    ..LLAMA_TENSORS
};

/// The configuration of one of these families.
pub(super) trait Rwkv: DerefMut<Target = DecoderConfig> + Any + Clone + Debug + PartialEq + Send + Sync {
    /// Its names.
    fn names(&self) -> &'static RwkvNames {
        &FLA_NAMES
    }

    /// Is there a norm behind the embedding, and have norms outside the mixers biases?
    fn norms(&self) -> [bool; 2];

    /// As [`DecoderFamily::kind`].
    fn layer_kind(&self, _index: usize) -> &'static str {
        ""
    }

    /// What layer `index` keeps besides the tokens before of its mixers.
    fn mixer_states(&self, options: &BuildOptions) -> LayerStates;

    /// The mixer of tokens.
    fn mix_tokens(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var>;

    /// The mixer of channels.
    fn mix_channels(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var>;

    /// Tensors of the mixers of tokens and of channels.
    fn mixer_tensors(&self) -> [&'static [&'static str]; 2];

    /// Sets the values that are of layer `index` alone.
    fn set_values(&self, _g: &mut Builder, _index: usize, _inputs: &mut LayerInputs) -> GraphResult<()> {
        Ok(())
    }

    /// What a layer gives, of its residual stream.
    fn leave_layer(&self, _g: &mut Builder, x: Var, _at: &DecoderLayer<'_>) -> GraphResult<Var> {
        Ok(x)
    }
}

impl<T: Rwkv> DecoderFamily for T {
    fn kind(&self, index: usize) -> &'static str {
        self.layer_kind(index)
    }

    fn states(&self, _index: usize, options: &BuildOptions) -> LayerStates {
        let shift = |scope: &str| format!("{scope}.{SHIFT}");
        let states = LayerStates::none().with_conv(&shift(TOKENS), self.hidden_size, 2, options);
        let states = states.and(self.mixer_states(options));
        states.with_conv(&shift(CHANNELS), self.hidden_size, 2, options)
    }

    fn before_layer(&self, g: &mut Builder, index: usize, inputs: &mut LayerInputs) -> GraphResult<()> {
        self.set_values(g, index, inputs)
    }

    fn embed(&self, g: &mut Builder, x: Var, _inputs: &mut LayerInputs) -> GraphResult<Var> {
        let [first, _] = self.norms();
        let names = self.names();
        if first { self.norm().apply(g, &format!("{}.0.{}", names.layers, names.first_norm), x) } else { Ok(x) }
    }

    fn norm(&self) -> NormKind {
        let [_, biased] = self.norms();
        if biased { NormKind::Layer(self.norm_eps) } else { NormKind::LayerUnbiased(self.norm_eps) }
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let [of_tokens, of_channels] = self.names().norms;
        let half = |before| ResidualHalf::before(self.norm(), before);
        let x = half(of_tokens).add(g, x, TOKENS, |g, x| self.mix_tokens(g, x, at))?;
        let x = half(of_channels).add(g, x, CHANNELS, |g, x| self.mix_channels(g, x, at))?;
        self.leave_layer(g, x, at)
    }

    fn parts(&self) -> Vec<Part> {
        // Whole mixers: their states are under other names than those of attention.
        let RwkvNames { layers, mixers, .. } = self.names();
        let of_mixer = |(published, (scope, names)): (&&str, (&str, &'static [&'static str]))| {
            let part = |name: &&str| Part {
                of: format!("{layers}.*.{published}.{name}"),
                name: format!("{layers}.*.{scope}.{name}"),
                transposed: false,
                rows: None,
            };
            names.iter().map(part).collect::<Vec<_>>()
        };
        let tensors = [TOKENS, CHANNELS].into_iter().zip(self.mixer_tensors());
        mixers.iter().zip(tensors).flat_map(of_mixer).collect()
    }
}

/// `x` of the token before, less `x`.
pub(super) fn change(g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
    let before = previous(g, at, SHIFT, x)?;
    g.sub(before, x)
}

/// `x` with a learned share of `delta` in each channel; the weight `name` has ones for axes ahead of the channels, `axes` of
/// them in all.
pub(super) fn shifted(g: &mut Builder, name: &str, x: Var, delta: Var, axes: usize) -> GraphResult<Var> {
    let share = share(g, name, x, axes)?;
    let share = g.mul(delta, share)?;
    g.add(x, share)
}

/// The weight `name` of a share of each channel of `x`, in the dtype of `x`.
pub(super) fn share(g: &mut Builder, name: &str, x: Var, axes: usize) -> GraphResult<Var> {
    let ty = g.ty(x)?.clone();
    let mut shape = ridge_graph::Shape(vec![1.into(); axes.saturating_sub(1)]);
    shape.0.push(ty.shape.last());
    let share = g.weight(name, Type::tensor(DType::F32, shape))?;
    let share = g.reshape(share, ridge_graph::Shape(vec![ty.shape.last()]))?;
    g.cast(share, ty.dtype)
}
