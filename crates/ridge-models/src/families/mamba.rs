//! Mamba (Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces"): layers of one mixer each, in
//! which every channel has a small state of its own; and Falcon Mamba (Zuo et al. 2024).

use ridge_graph::{Builder, DType, Result as GraphResult, Shape, Var};

use super::blocks::{NormKind, ResidualHalf, linear, weight};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::MAX_SIZE;
use super::layer_states::LayerStates;
use super::mamba2::{MAMBA_HARMLESS, MAMBA_TENSORS, RECURRENT_KEYS};
use super::recurrent::{ConvActivation, GatedNorm, columns, decay, flat, heads_of, recurrence, short_conv};
use crate::config::{DecoderConfig, DecoderKeys, Fields, REMEDY};
use crate::error::Result;
use crate::model::BuildOptions;

/// The sizes of a Mamba mixer (the same, section 3).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MambaMixer {
    /// Channels.
    pub inner: usize,
    /// Elements of the state of a channel.
    pub state: usize,
    /// Tokens that the convolution sees.
    pub kernel: usize,
    /// Rank of the projection to time steps.
    pub rank: usize,
    /// Has the convolution a bias?
    pub conv_bias: bool,
    /// Have the projections in and out?
    pub proj_bias: bool,
    /// How time steps and the vectors in and out of the state are normalised.
    pub norms: SelectionNorms,
}

/// Norms of a Mamba mixer's time steps, before they are projected, and of its vectors in and out of the state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SelectionNorms {
    /// None.
    None,
    /// By the root mean square, without weights (Zuo et al. 2024, "Falcon Mamba", section 3.2).
    Plain {
        /// Added to the mean square.
        eps: f64,
    },
    /// By the root mean square, with weights (Lieber et al. 2024, "Jamba", section 3.1).
    Weighted {
        /// Added to the mean square.
        eps: f64,
    },
}

impl SelectionNorms {
    fn apply(self, g: &mut Builder, name: &str, x: Var) -> GraphResult<Var> {
        match self {
            Self::None => Ok(x),
            Self::Plain { eps } => {
                let ty = g.ty(x)?.clone();
                let one = g.constant(ty.dtype, 1.0)?;
                let ones = g.broadcast(one, Shape(vec![ty.shape.last()]))?;
                g.rms_norm(x, ones, eps)
            }
            Self::Weighted { eps } => NormKind::Rms(eps).apply(g, name, x),
        }
    }
}

impl MambaMixer {
    /// What a layer with the mixer in scope `scope` keeps.
    pub(super) fn states(&self, scope: &str, options: &BuildOptions) -> LayerStates {
        let states = LayerStates::none().with_conv(scope, self.inner, self.kernel, options);
        states.with_recurrence(scope, [self.inner, self.state, 1])
    }

    /// The mixer's output of `x`, `[tokens, hidden]`, with the weights of the scope.
    pub(super) fn apply(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let ty = g.ty(x)?.clone();
        let hidden = ty.shape.last().as_const().unwrap_or_default();
        let all = linear(g, "in_proj", x, 2 * self.inner, self.proj_bias)?;
        let [x, gate] = columns(g, all, [self.inner; 2])?;
        let x = short_conv(g, at, "conv1d", x, self.kernel, self.conv_bias, ConvActivation::Silu)?;
        let narrow = g.cast(x, ty.dtype)?;
        let parts = linear(g, "x_proj", narrow, self.rank + 2 * self.state, false)?;
        let [dt, b, c] = columns(g, parts, [self.rank, self.state, self.state])?;
        let dt = self.norms.apply(g, "dt_layernorm", dt)?;
        let (b, c) = (self.norms.apply(g, "b_layernorm", b)?, self.norms.apply(g, "c_layernorm", c)?);
        let dt = linear(g, "dt_proj", dt, self.inner, true)?;
        let dt = g.cast(dt, DType::F32)?;
        let dt = g.softplus(dt)?;
        // A head for each channel, whose one value has a key for each element of its state.
        let (b, c) = (g.cast(b, DType::F32)?, g.cast(c, DType::F32)?);
        let (b, c) = (heads_of(g, b, 1)?, heads_of(g, c, 1)?);
        let v = g.mul(x, dt)?;
        let (v, steps) = (heads_of(g, v, self.inner)?, heads_of(g, dt, self.inner)?);
        let decay = decay(g, steps, [self.inner, self.state])?;
        let y = recurrence(g, at, [c, b, v, decay], None)?;
        let y = flat(g, y)?;
        let skip = weight(g, "D", [self.inner])?;
        let skip = g.cast(skip, DType::F32)?;
        let skip = g.mul(x, skip)?;
        let y = g.add(y, skip)?;
        let y = GatedNorm::None.apply(g, y, gate)?;
        let y = g.cast(y, ty.dtype)?;
        linear(g, "out_proj", y, hidden, self.proj_bias)
    }
}

/// Every size and switch of a Mamba model.
#[derive(Clone, Debug, PartialEq)]
pub struct MambaConfig {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Its mixers.
    pub mixer: MambaMixer,
}

/// The rank of the projection to time steps that the key `key` says: a number, or `"auto"` for one in 16 of `hidden`.
pub(super) fn read_rank(f: &mut Fields<'_>, key: &'static str, hidden: usize) -> Result<usize> {
    match f.is_text(key) {
        true => {
            f.must_be(key, "auto")?;
            Ok(hidden.div_ceil(16))
        }
        false => Ok(f.optional_size(key, MAX_SIZE)?.unwrap_or(hidden.div_ceil(16))),
    }
}

impl MambaConfig {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        Self::read_with(f, SelectionNorms::None)
    }

    fn read_falcon(f: &mut Fields<'_>) -> Result<Self> {
        f.harmless(&["use_falcon_mambapy"]);
        let eps = f.optional_positive("mixer_rms_eps")?.unwrap_or(1e-6);
        Self::read_with(f, SelectionNorms::Plain { eps })
    }

    fn read_with(f: &mut Fields<'_>, norms: SelectionNorms) -> Result<Self> {
        f.must_be("hidden_act", "silu")?;
        // What older files repeat of the sizes.
        f.harmless(&["d_inner", "d_model", "fused_add_norm", "n_layer", "pad_vocab_size_multiple", "ssm_cfg"]);
        f.must_be("rms_norm", true)?;
        let decoder = DecoderConfig::read(f, &DecoderKeys { tie_word_embeddings: true, ..RECURRENT_KEYS })?;
        let mut inner = f.optional_size("expand", MAX_SIZE)?.unwrap_or(2) * decoder.hidden_size;
        let given = f.optional_size("intermediate_size", MAX_SIZE)?;
        if let (SelectionNorms::Plain { .. }, Some(size)) = (norms, given) {
            // The published Falcon Mamba says 16 and means this.
            inner = size;
        }
        if given.is_some_and(|size| size != inner) {
            return Err(f.wrong("intermediate_size", format!("is not expand * hidden_size = {inner}"), REMEDY));
        }
        let rank = read_rank(f, "time_step_rank", decoder.hidden_size)?;
        let mixer = MambaMixer {
            inner,
            state: f.size("state_size", MAX_SIZE)?,
            kernel: f.size("conv_kernel", MAX_SIZE)?,
            rank,
            conv_bias: f.optional("use_conv_bias")?.unwrap_or(true),
            proj_bias: f.optional("use_bias")?.unwrap_or(false),
            norms,
        };
        if mixer.kernel < 2 {
            return Err(f.wrong("conv_kernel", "is below 2", REMEDY));
        }
        Ok(Self { decoder, mixer })
    }
}

deref_to_decoder!(MambaConfig);

/// How it is registered.
pub(super) static MAMBA: FamilyDefinition = FamilyDefinition {
    name: "mamba",
    model_type: "mamba",
    class: Some("MambaForCausalLM"),
    harmless: &[MAMBA_HARMLESS],
    read: ReadConfig::Decoder(|f| Ok(Box::new(MambaConfig::read(f)?))),
    tensors: MAMBA_TENSORS,
    gguf: None,
};

/// How Falcon Mamba is registered: it is a Mamba with norms in its mixers.
pub(super) static FALCON_MAMBA: FamilyDefinition = FamilyDefinition {
    name: "falcon_mamba",
    model_type: "falcon_mamba",
    class: Some("FalconMambaForCausalLM"),
    harmless: &[MAMBA_HARMLESS],
    read: ReadConfig::Decoder(|f| Ok(Box::new(MambaConfig::read_falcon(f)?))),
    tensors: MAMBA_TENSORS,
    gguf: None,
};

impl DecoderFamily for MambaConfig {
    fn states(&self, _index: usize, options: &BuildOptions) -> LayerStates {
        self.mixer.states("mixer", options)
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        ResidualHalf::before(self.norm(), "norm").add(g, x, "mixer", |g, x| self.mixer.apply(g, x, at))
    }
}
