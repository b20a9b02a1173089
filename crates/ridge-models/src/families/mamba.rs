//! Mamba (Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces"): layers of one mixer each, in
//! which every channel has a small state of its own.

use ridge_graph::{Builder, DType, Result as GraphResult, Var};

use super::blocks::{NormKind, ResidualHalf, linear, weight};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::MAX_SIZE;
use super::layer_states::LayerStates;
use super::mamba2::{MAMBA_HARMLESS, MAMBA_TENSORS, RECURRENT_KEYS};
use super::recurrent::{GatedNorm, columns, decay, flat, heads_of, recurrence, short_conv, silu};
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
}

impl MambaMixer {
    fn states(&self, options: &BuildOptions) -> LayerStates {
        let states = LayerStates::none().with_conv("mixer", self.inner, self.kernel, options);
        states.with_recurrence("mixer", [self.inner, self.state, 1])
    }

    fn apply(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let ty = g.ty(x)?.clone();
        let hidden = ty.shape.last().as_const().unwrap_or_default();
        let all = linear(g, "in_proj", x, 2 * self.inner, self.proj_bias)?;
        let [x, gate] = columns(g, all, [self.inner; 2])?;
        let x = short_conv(g, at, "conv1d", x, self.kernel, self.conv_bias)?;
        let x = silu(g, x)?;
        let narrow = g.cast(x, ty.dtype)?;
        let parts = linear(g, "x_proj", narrow, self.rank + 2 * self.state, false)?;
        let [dt, b, c] = columns(g, parts, [self.rank, self.state, self.state])?;
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

impl MambaConfig {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.must_be("hidden_act", "silu")?;
        // What older files repeat of the sizes.
        f.harmless(&[
            "d_inner",
            "d_model",
            "fused_add_norm",
            "n_layer",
            "pad_vocab_size_multiple",
            "rms_norm",
            "ssm_cfg",
        ]);
        let decoder = DecoderConfig::read(f, &DecoderKeys { tie_word_embeddings: true, ..RECURRENT_KEYS })?;
        let inner = f.optional_size("expand", MAX_SIZE)?.unwrap_or(2) * decoder.hidden_size;
        if f.optional_size("intermediate_size", MAX_SIZE)?.is_some_and(|size| size != inner) {
            return Err(f.wrong("intermediate_size", format!("is not expand * hidden_size = {inner}"), REMEDY));
        }
        let rank = match f.is_text("time_step_rank") {
            true => {
                f.must_be("time_step_rank", "auto")?;
                decoder.hidden_size.div_ceil(16)
            }
            false => f.optional_size("time_step_rank", MAX_SIZE)?.unwrap_or(decoder.hidden_size.div_ceil(16)),
        };
        let mixer = MambaMixer {
            inner,
            state: f.size("state_size", MAX_SIZE)?,
            kernel: f.size("conv_kernel", MAX_SIZE)?,
            rank,
            conv_bias: f.optional("use_conv_bias")?.unwrap_or(true),
            proj_bias: f.optional("use_bias")?.unwrap_or(false),
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

impl DecoderFamily for MambaConfig {
    fn states(&self, _index: usize, options: &BuildOptions) -> LayerStates {
        self.mixer.states(options)
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        ResidualHalf::before(self.norm(), "norm").add(g, x, "mixer", |g, x| self.mixer.apply(g, x, at))
    }
}
