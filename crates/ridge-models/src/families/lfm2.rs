//! LFM2 (Liquid AI 2025, "LFM2 Technical Report", section 2): layers of a gated short convolution or of grouped-query attention
//! with norms of queries and keys, each before a gated MLP.

use ridge_files::checkpoint::Part;
use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp, linear};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::MAX_SIZE;
use super::layer_states::LayerStates;
use super::recurrent::{ConvActivation, columns, short_conv};
use super::tensors::{Cut, LLAMA_TENSORS, QKV, TensorName, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, REMEDY, ROPE_KEYS, RopeKeys, read_rope};
use crate::error::Result;
use crate::model::BuildOptions;

/// Every size and switch of an LFM2 model.
#[derive(Clone, Debug, PartialEq)]
pub struct Lfm2Config {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Which layers attend; the others convolve.
    pub attends: Vec<bool>,
    /// Tokens that a convolution sees.
    pub kernel: usize,
    /// Do convolutions and their projections have biases?
    pub conv_bias: bool,
}

impl Lfm2Config {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.harmless(&[
            "block_dim",
            "block_mlp_init_scale",
            "block_norm_eps",
            "block_out_init_scale",
            "block_use_swiglu",
        ]);
        f.harmless(&[
            "block_use_xavier_init",
            "conv_dim",
            "conv_dim_out",
            "conv_use_xavier_init",
            "num_heads",
            "theta",
        ]);
        f.must_be("use_pos_enc", true)?;
        // Newer files have the width under the name of other families too.
        let intermediate_size = if f.has("intermediate_size") { "intermediate_size" } else { "block_ff_dim" };
        let keys = DecoderKeys { norm_eps: "norm_eps", tie_word_embeddings: true, intermediate_size, ..DECODER_KEYS };
        let mut decoder = DecoderConfig::read(f, &keys)?;
        if let Some(tied) = f.optional("tie_embedding")? {
            decoder.tie_word_embeddings = tied;
        }
        if let Some(width) = f.optional_size("block_ff_dim", MAX_SIZE)? {
            decoder.intermediate_size = width;
        }
        if f.optional("block_auto_adjust_ff_dim")?.unwrap_or(true) {
            let multiple = f.optional_size("block_multiple_of", MAX_SIZE)?.unwrap_or(256);
            let factor = f.optional_positive("block_ffn_dim_multiplier")?.unwrap_or(1.0);
            let width = ((2 * decoder.intermediate_size / 3) as f64 * factor) as usize;
            decoder.intermediate_size = width.next_multiple_of(multiple);
        } else {
            f.harmless(&["block_multiple_of", "block_ffn_dim_multiplier"]);
        }
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &RopeKeys { default_theta: 1e6, ..ROPE_KEYS })?);
        let layers = decoder.num_hidden_layers;
        let listed: Option<Vec<u64>> = f.optional("full_attn_idxs")?;
        let attends = match f.optional::<Vec<&str>>("layer_types")? {
            Some(types) if types.len() != layers => {
                return Err(f.wrong("layer_types", format!("names {} layers of {layers}", types.len()), REMEDY));
            }
            Some(types) => match types.iter().find(|kind| !["conv", "full_attention"].contains(*kind)) {
                Some(kind) => {
                    return Err(f.wrong("layer_types", format!("has {kind:?}, which is not supported"), REMEDY));
                }
                None => types.iter().map(|kind| *kind == "full_attention").collect(),
            },
            None => (0..layers).map(|i| listed.as_ref().is_none_or(|listed| listed.contains(&(i as u64)))).collect(),
        };
        let kernel = f.size("conv_L_cache", MAX_SIZE)?;
        if kernel < 2 {
            return Err(f.wrong("conv_L_cache", "is below 2", REMEDY));
        }
        Ok(Self { decoder, attends, kernel, conv_bias: f.optional("conv_bias")?.unwrap_or(false) })
    }
}

deref_to_decoder!(Lfm2Config);

/// Projections, cut as Llama's are.
const LAYER: &[TensorName] = &[
    TensorName::planned("self_attn.q_proj", Cut::Heads),
    TensorName::planned("self_attn.k_proj", Cut::Heads),
    TensorName::planned("self_attn.v_proj", Cut::Heads),
    TensorName::planned("self_attn.out_proj", Cut::HeadTerms),
    TensorName::planned("feed_forward.gate_proj", Cut::Columns),
    TensorName::planned("feed_forward.up_proj", Cut::Columns),
    TensorName::planned("feed_forward.down_proj", Cut::Terms),
];

/// How it is registered.
pub(super) static LFM2: FamilyDefinition = FamilyDefinition {
    name: "lfm2",
    model_type: "lfm2",
    class: Some("Lfm2ForCausalLM"),
    harmless: &[],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Lfm2Config::read(f)?))),
    tensors: TensorTable {
        norm: TensorName { scope: "model.embedding_norm", cut: None, gguf: None },
        layer: &[LAYER],
        ..LLAMA_TENSORS
    },
    gguf: None,
};

/// The layers with a convolution.
const CONV: &str = "conv";

impl DecoderFamily for Lfm2Config {
    fn kind(&self, index: usize) -> &'static str {
        if self.attends.get(index) == Some(&true) { "" } else { CONV }
    }

    fn states(&self, index: usize, options: &BuildOptions) -> LayerStates {
        match self.kind(index) {
            CONV => LayerStates::none().with_conv("conv", self.hidden_size, self.kernel, options),
            _ => LayerStates::paged(),
        }
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let before = ResidualHalf::before(self.norm(), "operator_norm");
        let x = match at.kind {
            CONV => before.add(g, x, "conv", |g, x| self.convolve(g, x, at))?,
            _ => before.add(g, x, "self_attn", |g, x| {
                let [q, k, v] = at.project(g, x, QKV, false)?;
                let (q, k) = (self.norm().apply(g, "q_norm", q)?, self.norm().apply(g, "k_norm", k)?);
                let a = at.attend(g, [q, k, v], &at.scores())?;
                linear(g, "out_proj", a, self.hidden_size, false)
            })?,
        };
        ResidualHalf::before(self.norm(), "ffn_norm")
            .add(g, x, "feed_forward", |g, x| gated_mlp(g, x, self.intermediate_size, MlpGate::Silu, false))
    }

    fn parts(&self) -> Vec<Part> {
        let names = [
            ("feed_forward.w1", "feed_forward.gate_proj"),
            ("feed_forward.w3", "feed_forward.up_proj"),
            ("feed_forward.w2", "feed_forward.down_proj"),
            ("self_attn.q_layernorm", "self_attn.q_norm"),
            ("self_attn.k_layernorm", "self_attn.k_norm"),
        ];
        let part = |(of, name): (&str, &str)| Part {
            of: format!("model.layers.*.{of}.weight"),
            name: format!("model.layers.*.{name}.weight"),
            transposed: false,
            rows: None,
        };
        names.into_iter().map(part).collect()
    }
}

impl Lfm2Config {
    /// `out(C * conv(B * x))`, with `B`, `C` and `x` projected from the input.
    fn convolve(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let dtype = g.ty(x)?.dtype;
        let all = linear(g, "in_proj", x, 3 * self.hidden_size, self.conv_bias)?;
        let [b, c, x] = columns(g, all, [self.hidden_size; 3])?;
        let x = g.mul(b, x)?;
        let y = short_conv(g, at, "conv", x, self.kernel, self.conv_bias, ConvActivation::None)?;
        let y = g.cast(y, dtype)?;
        let y = g.mul(c, y)?;
        linear(g, "out_proj", y, self.hidden_size, self.conv_bias)
    }
}
