//! HyenaDNA (Nguyen et al. 2023, "HyenaDNA: Long-Range Genomic Sequence Modeling at Single Nucleotide Resolution", section 3.1): in the
//! place of attention, a convolution over all earlier tokens between two gates (Poli et al. 2023, "Hyena Hierarchy", section 3),
//! whose filter is a function of the distance that a small network computes.
//!
//! The filter is computed from its weights in every step, for the positions of the context that the model is built for.

use ridge_graph::ops::{Gelu, LongConvolution};
use ridge_graph::{Builder, DType, Dim, Result as GraphResult, Var};

use super::blocks::{NormKind, ResidualHalf, linear, mlp, scaled};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::layer_states::LayerStates;
use super::recurrent::{ConvActivation, columns, f32_weight, short_conv};
use super::tensors::{Cut, LLAMA_TENSORS, TensorName, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, MAX_HIDDEN, MAX_LAYERS, REMEDY};
use crate::error::Result;
use crate::model::{BuildOptions, CacheRows, StepInputs, attention_symbols, symbols, write_cache};

/// Every size of a HyenaDNA model.
#[derive(Clone, Debug, PartialEq)]
pub struct HyenaConfig {
    /// What every decoder has; its vocabulary is that of the published tensors, which are padded.
    pub decoder: DecoderConfig,
    /// Elements of the encoding of a position that the filter's network takes.
    pub position_width: usize,
    /// Width of that network.
    pub filter_width: usize,
    /// Its layers besides the first and the last.
    pub inner_layers: usize,
}

/// Taps of the short convolutions.
const TAPS: usize = 3;
/// What a filter has besides its decaying part.
const SHIFT: f64 = 0.05;
/// The epsilon of the norms of layers, which configurations do not have.
const LAYER_EPS: f64 = 1e-5;

/// The cache of what is convolved, in a layer and in the scope of its mixer.
const HISTORY_OF_LAYER: &str = "mixer.history";
const HISTORY: &str = "history";

impl HyenaConfig {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        const KEYS: DecoderKeys = DecoderKeys {
            hidden_size: "d_model",
            intermediate_size: "d_inner",
            intermediate_factor: Some(4),
            num_hidden_layers: "n_layer",
            num_attention_heads: "",
            num_key_value_heads: "",
            max_position_embeddings: "max_seq_len",
            positions: Some(1024),
            norm_eps: "layer_norm_epsilon",
            default_eps: Some(1e-5),
            ..DECODER_KEYS
        };
        let mut decoder = DecoderConfig::read(f, &KEYS)?;
        f.must_be("hyena_order", 2)?;
        f.must_be("short_filter_order", TAPS)?;
        f.must_be("train_freq", true)?;
        let multiple = f.optional_size("pad_vocab_size_multiple", MAX_HIDDEN)?.unwrap_or(8);
        decoder.vocab_size = decoder.vocab_size.next_multiple_of(multiple.max(1));
        let position_width = f.optional_size("emb_dim", MAX_HIDDEN)?.unwrap_or(3);
        if position_width < 3 || position_width.is_multiple_of(2) {
            return Err(f.wrong("emb_dim", "is not odd and 3 or more: a time, and pairs of sine and cosine", REMEDY));
        }
        let inner_layers = f.count("num_inner_mlps")?.unwrap_or(2).min(MAX_LAYERS as u64) as usize;
        let filter_width = f.optional_size("filter_order", MAX_HIDDEN)?.unwrap_or(64);
        Ok(Self { decoder, position_width, filter_width, inner_layers })
    }
}

deref_to_decoder!(HyenaConfig);

/// Dropout, values that weights begin with, and a switch that the published code does not read.
const HARMLESS: &[&str] = &["activation_freq", "embed_dropout", "hyena_dropout", "hyena_filter_dropout", "use_bias"];

/// How it is registered.
pub(super) static HYENA: FamilyDefinition = FamilyDefinition {
    name: "hyena",
    model_type: "hyenadna",
    class: Some("HyenaDNAForCausalLM"),
    harmless: &[HARMLESS],
    read: ReadConfig::Decoder(|f| Ok(Box::new(HyenaConfig::read(f)?))),
    tensors: TensorTable {
        embedding: TensorName { scope: "hyena.backbone.embeddings.word_embeddings", cut: None, gguf: None },
        layers: "hyena.backbone.layers",
        attention: "mixer",
        norm: TensorName { scope: "hyena.backbone.ln_f", cut: None, gguf: None },
        head: TensorName::planned("lm_head", Cut::Vocabulary),
        layer: &[],
        // The frequencies of all sines of a filter are one parameter, which has the name of the first.
        computed: &["*.implicit_filter.3.freq", "*.implicit_filter.5.freq", "*.implicit_filter.7.freq"],
        ..LLAMA_TENSORS
    },
    gguf: None,
};

impl DecoderFamily for HyenaConfig {
    fn states(&self, _index: usize, options: &BuildOptions) -> LayerStates {
        let convolved = LayerStates::none().with_cache(HISTORY_OF_LAYER, [1, 1, self.hidden_size]);
        convolved.with_conv("mixer", 3 * self.hidden_size, TAPS, options)
    }

    fn norm(&self) -> NormKind {
        NormKind::Layer(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let norm = NormKind::Layer(LAYER_EPS);
        let x = ResidualHalf::before(norm, "norm1").add(g, x, "mixer", |g, x| self.mix(g, x, at))?;
        ResidualHalf::before(norm, "norm2")
            .add(g, x, "mlp", |g, x| mlp(g, x, ["fc1", "fc2"], self.intermediate_size, Gelu::Tanh, true))
    }
}

impl HyenaConfig {
    /// `out(a * (filter over (b * v)))` of `x`, `[tokens, hidden]`, with `a`, `b` and `v` projected from it and convolved over three
    /// tokens.
    fn mix(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let (hidden, dtype) = (self.hidden_size, g.ty(x)?.dtype);
        let slots = at.slots(g, "a long convolution, whose inputs are those of a cache,")?;
        let all = linear(g, "in_proj", x, 3 * hidden, true)?;
        let all = short_conv(g, at, "short_filter", all, TAPS, true, ConvActivation::None)?;
        let [outer, inner, v] = columns(g, all, [hidden; 3])?;
        let v = g.mul(v, inner)?;
        let v = g.cast(v, dtype)?;

        let row = g.reshape(v, [Dim::sym(symbols::TOKENS), 1.into(), hidden.into()])?;
        let new = CacheRows { rows: &[row], slots, shape: [1, 1, hidden] };
        let cache = write_cache(g, HISTORY, &new, None, at.options)?;
        let (filter, bias) = g.scoped("filter_fn", |g| -> GraphResult<(Var, Var)> {
            Ok((self.filter(g, at.options)?, f32_weight(g, "bias", [hidden])?))
        })?;
        let step = StepInputs::ask(g)?;
        let (pairs, cached) = attention_symbols(None);
        let op = LongConvolution { pairs, cached };
        let y = g.long_convolution(&cache, [step.block_table, step.seq_ids, at.positions()], filter, op)?;
        let v = g.cast(v, DType::F32)?;
        let now = g.mul(v, bias)?;
        let y = g.add(y, now)?;
        let y = g.mul(y, outer)?;
        let y = g.cast(y, dtype)?;
        linear(g, "out_proj", y, hidden, true)
    }

    /// What each channel takes of a token so many positions back: f32 `[positions, hidden]`.
    fn filter(&self, g: &mut Builder, options: &BuildOptions) -> GraphResult<Var> {
        let (longest, hidden, width) = (self.max_position_embeddings, self.hidden_size, self.filter_width);
        let count = options.context.map_or(longest, |context| context.clamp(1, longest));
        let rows = |g: &mut Builder, name: &str, width: usize| -> GraphResult<Var> {
            let all = f32_weight(g, name, [1, longest, width])?;
            let all = g.reshape(all, [longest, width])?;
            g.slice(all, 0, 0, count)
        };
        let (mut h, time) = g.scoped("pos_emb", |g| -> GraphResult<(Var, Var)> {
            Ok((rows(g, "z", self.position_width)?, rows(g, "t", 1)?))
        })?;
        h = g.scoped("implicit_filter", |g| -> GraphResult<Var> {
            let frequency = g.scoped("1", |g| f32_weight(g, "freq", [1, width]))?;
            for layer in 0..=self.inner_layers {
                h = linear(g, &(2 * layer).to_string(), h, width, true)?;
                h = g.mul(h, frequency)?;
                h = g.sin(h)?;
            }
            linear(g, &(2 * self.inner_layers + 2).to_string(), h, hidden, false)
        })?;
        let rates = g.scoped("modulation", |g| f32_weight(g, "deltas", [1, 1, hidden]))?;
        let rates = g.reshape(rates, [1, hidden])?;
        let opposite = scaled(g, rates, -1.0)?;
        // The larger of a rate and its opposite is its magnitude.
        let rates = g.max(rates, opposite)?;
        let exponent = g.mul(time, rates)?;
        let exponent = scaled(g, exponent, -1.0)?;
        let decay = g.exp(exponent)?;
        let shift = g.constant(DType::F32, SHIFT)?;
        let decay = g.add(decay, shift)?;
        g.mul(h, decay)
    }
}
