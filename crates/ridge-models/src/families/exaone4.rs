//! EXAONE 4 (LG AI Research 2025, "EXAONE 4.0", section 2.1): norms behind attention and MLP, norms of each head of queries
//! and keys, and in the larger model local layers that rotate and global ones that do not.

use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{MlpGate, NormKind, ResidualHalf, gated_mlp, linear};
use super::decoder::{DecoderFamily, DecoderLayer, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::gguf_mapping::{GgufEntry, GgufMapping, window_metadata};
use super::tensors::{ATTENTION, GATED_MLP, LLAMA_TENSORS, OUTPUT_NORMS, QK_NORMS, QKV, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, Fields, REMEDY, ROPE_KEYS, layer_windows, read_rope, sliding_window};
use crate::error::Result;

/// Every size and switch of an EXAONE 4 model.
#[derive(Clone, Debug, PartialEq)]
pub struct Exaone4Config {
    /// What every decoder has.
    pub decoder: DecoderConfig,
    /// How many tokens a token sees in each layer, itself included; all if `None`.
    pub windows: Vec<Option<usize>>,
    /// Do layers without a window rotate queries and keys? Where no layer has one.
    pub rotates_globally: bool,
}

impl Exaone4Config {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        f.must_be("hidden_act", "silu")?;
        let mut decoder = DecoderConfig::read(f, &DECODER_KEYS)?;
        decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?);
        let layers = decoder.num_hidden_layers;
        let window = sliding_window(f, Some(4096))?;
        let pattern = read_pattern(f)?;
        let windows = layer_windows(f, layers, window, |i| pattern.get(i % pattern.len().max(1)) == Some(&true))?;
        Ok(Self { decoder, windows, rotates_globally: window.is_none() })
    }
}

/// The layers with windows, which repeat: a text such as `LLLG`, or the number of layers until the global one.
fn read_pattern(f: &mut Fields<'_>) -> Result<Vec<bool>> {
    const KEY: &str = "sliding_window_pattern";
    if f.is_text(KEY) {
        let text: &str = f.required(KEY)?;
        if text.is_empty() || !text.chars().all(|c| "LG".contains(c)) {
            return Err(f.wrong(KEY, "is no sequence of L and G", REMEDY));
        }
        return Ok(text.chars().map(|c| c == 'L').collect());
    }
    let every = f.count(KEY)?.unwrap_or(4).min(1 << 12) as usize;
    Ok((1..=every).map(|i| i != every).collect())
}

deref_to_decoder!(Exaone4Config);

/// How it is registered.
pub(super) static EXAONE4: FamilyDefinition = FamilyDefinition {
    name: "exaone4",
    model_type: "exaone4",
    class: Some("Exaone4ForCausalLM"),
    harmless: &[],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Exaone4Config::read(f)?))),
    tensors: TensorTable { layer: &[ATTENTION, GATED_MLP, QK_NORMS, OUTPUT_NORMS], ..LLAMA_TENSORS },
    gguf: Some(GgufMapping {
        read: |file, to| {
            to.insert("sliding_window".into(), file.window().into());
            Ok(())
        },
        ..GgufMapping::new("exaone4")
    }),
};

impl DecoderFamily for Exaone4Config {
    fn window(&self, index: usize) -> Option<usize> {
        self.windows.get(index).copied().flatten()
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let norm = self.norm();
        let half = |after| ResidualHalf { norm, before: None, after: Some(after) };
        let x = half("post_attention_layernorm").add(g, x, "self_attn", |g, x| {
            let [q, k, v] = at.project(g, x, QKV, false)?;
            let (q, k) = (norm.apply(g, "q_norm", q)?, norm.apply(g, "k_norm", k)?);
            let mut scores = at.scores();
            if at.window.is_none() && !self.rotates_globally {
                scores.rope = None;
            }
            let a = at.attend(g, [q, k, v], &scores)?;
            linear(g, "o_proj", a, self.hidden_size, false)
        })?;
        half("post_feedforward_layernorm")
            .add(g, x, "mlp", |g, x| gated_mlp(g, x, self.intermediate_size, MlpGate::Silu, false))
    }

    fn gguf_metadata(&self) -> Result<Vec<(&'static str, GgufEntry)>, &'static str> {
        let window = self.windows.iter().copied().flatten().next();
        let usual = |(i, window): (usize, &Option<usize>)| window.is_none() == (i + 1).is_multiple_of(4);
        if window.is_some() && !self.windows.iter().enumerate().all(usual) {
            return Err("its layers with windows are not where those of its family are");
        }
        if window.is_none() && !self.rotates_globally {
            return Err("it has a window that no layer uses");
        }
        Ok(window_metadata(window))
    }
}
