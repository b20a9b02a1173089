//! SmolLM 3 (Hugging Face 2025): Llama's layers, of which every fourth does not rotate queries and keys (Yang et al. 2025,
//! "Rope to Nope and Back Again").

use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp};
use super::decoder::{AttentionScores, DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::gguf_mapping::{GgufEntry, GgufMapping, read_attention_bias};
use super::llama;
use super::tensors::LLAMA_TENSORS;
use crate::config::{
    DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, MAX_POSITIONS, REMEDY, ROPE_KEYS, RopeKeys, layer_windows,
    read_rope, sliding_window,
};
use crate::error::Result;

/// Every size and switch of a SmolLM 3 model.
#[derive(Clone, Debug, PartialEq)]
pub struct SmolLm3Config {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// Do the four projections of attention have biases?
    pub attention_bias: bool,
    /// Do the three projections of the MLP have biases?
    pub mlp_bias: bool,
    /// Which layers rotate queries and keys.
    pub rotated: Vec<bool>,
    /// How many tokens a token sees in each layer, itself included; all if `None`.
    pub windows: Vec<Option<usize>>,
}

/// Every so manieth layer does not rotate where the configuration does not say.
const INTERVAL: usize = 4;

impl SmolLm3Config {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        const KEYS: DecoderKeys = DecoderKeys { tie_word_embeddings: true, ..DECODER_KEYS };
        const ROPE: RopeKeys = RopeKeys { default_theta: 2_000_000.0, ..ROPE_KEYS };
        f.needs(&["num_key_value_heads"])?;
        f.must_be("hidden_act", "silu")?;
        let mut decoder = DecoderConfig::read(f, &KEYS)?;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE)?);
        let layers = decoder.num_hidden_layers;
        let interval = f.optional_size("no_rope_layer_interval", MAX_POSITIONS)?.unwrap_or(INTERVAL);
        let rotated: Vec<bool> = match f.optional::<Vec<u64>>("no_rope_layers")? {
            None => (0..layers).map(|i| !(i + 1).is_multiple_of(interval)).collect(),
            Some(listed) if listed.len() == layers => listed.iter().map(|one| *one != 0).collect(),
            Some(listed) => {
                return Err(f.wrong("no_rope_layers", format!("names {} layers of {layers}", listed.len()), REMEDY));
            }
        };
        let in_use = f.optional("use_sliding_window")?.unwrap_or(false);
        let window = sliding_window(f, None)?.filter(|_| in_use);
        let windows = layer_windows(f, layers, window, |layer| !rotated_at(&rotated, layer))?;
        Ok(Self {
            decoder,
            attention_bias: f.optional("attention_bias")?.unwrap_or(false),
            mlp_bias: f.optional("mlp_bias")?.unwrap_or(false),
            rotated,
            windows,
        })
    }
}

fn rotated_at(rotated: &[bool], layer: usize) -> bool {
    rotated.get(layer).copied().unwrap_or(true)
}

deref_to_decoder!(SmolLm3Config);

/// How it is registered.
pub(super) static SMOLLM3: FamilyDefinition = FamilyDefinition {
    name: "smollm3",
    model_type: "smollm3",
    class: Some("SmolLM3ForCausalLM"),
    harmless: &[&["max_window_layers", "pretraining_tp"]],
    read: ReadConfig::Decoder(|f| Ok(Box::new(SmolLm3Config::read(f)?))),
    tensors: LLAMA_TENSORS,
    gguf: Some(GgufMapping {
        interleaved: true,
        read: |file, to| {
            to.insert("mlp_bias".into(), file.has("blk.0.ffn_up.bias").into());
            read_attention_bias(file, to)
        },
        ..GgufMapping::new("smollm3")
    }),
};

/// The layers that do not rotate.
const UNROTATED: &str = "unrotated";

impl DecoderFamily for SmolLm3Config {
    fn window(&self, index: usize) -> Option<usize> {
        self.windows.get(index).copied().flatten()
    }

    fn kind(&self, index: usize) -> &'static str {
        if rotated_at(&self.rotated, index) { "" } else { UNROTATED }
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let usual = at.scores();
        let scores = match at.kind {
            UNROTATED => AttentionScores { rope: None, ..usual },
            _ => usual,
        };
        let x = ResidualHalf::before(self.norm(), "input_layernorm")
            .add(g, x, "self_attn", |g, x| llama::self_attention(self, g, x, at, [self.attention_bias; 2], &scores))?;
        ResidualHalf::before(self.norm(), "post_attention_layernorm")
            .add(g, x, "mlp", |g, x| gated_mlp(g, x, self.intermediate_size, MlpGate::Silu, self.mlp_bias))
    }

    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        if self.windows.iter().any(Option::is_some) {
            return Err("some of its layers see a window only");
        }
        match self.rotated.iter().enumerate().all(|(i, rotated)| *rotated != (i + 1).is_multiple_of(INTERVAL)) {
            true => Ok(Vec::new()),
            false => Err("its layers without rotation are not every fourth one"),
        }
    }
}
