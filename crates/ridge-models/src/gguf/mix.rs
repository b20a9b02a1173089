//! Mixes of formats: `llama-quantize`'s ways to spend more bits where they matter most, which are the last projections of
//! attention and MLP of the first and last layers, and of every third between.

use ridge_files::gguf::TensorStorage;

use super::names::Sizes;
use crate::families::MixRules;

/// A mix of formats, called as llama.cpp calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mix {
    /// Its name, such as `q4_k_m`.
    pub name: &'static str,
    /// The format of most matrices.
    base: &'static str,
    /// The number by which a file tells of it.
    pub(super) file_type: u32,
}

/// What is called plainly Q2_K elsewhere is `q2_k_m` here, where `q2_k` is a format.
const MIXES: [Mix; 9] = [
    Mix { name: "q2_k_s", base: "q2_k", file_type: 21 },
    Mix { name: "q2_k_m", base: "q2_k", file_type: 10 },
    Mix { name: "q3_k_s", base: "q3_k", file_type: 11 },
    Mix { name: "q3_k_m", base: "q3_k", file_type: 12 },
    Mix { name: "q3_k_l", base: "q3_k", file_type: 13 },
    Mix { name: "q4_k_s", base: "q4_k", file_type: 14 },
    Mix { name: "q4_k_m", base: "q4_k", file_type: 15 },
    Mix { name: "q5_k_s", base: "q5_k", file_type: 16 },
    Mix { name: "q5_k_m", base: "q5_k", file_type: 17 },
];

/// What of a model decides.
#[derive(Clone, Copy, Debug)]
pub(super) struct MixedModel {
    pub(super) layers: usize,
    /// Heads that share keys and values.
    pub(super) sharing: usize,
    pub(super) falcon: bool,
    /// Llama or Qwen 2, whose largest models have small matrices of values.
    pub(super) llama: bool,
    /// Is the embedding the output projection too?
    pub(super) tied: bool,
}

impl MixedModel {
    pub(super) fn new(rules: MixRules, sizes: &Sizes, tied: bool) -> Self {
        Self {
            layers: sizes.layers,
            sharing: sizes.heads / sizes.kv_heads.max(1),
            falcon: rules == MixRules::Falcon,
            llama: rules == MixRules::Llama,
            tied,
        }
    }
}

impl Mix {
    /// All of them.
    pub fn all() -> &'static [Self] {
        &MIXES
    }

    /// The mix called `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        MIXES.into_iter().find(|mix| mix.name == name)
    }

    /// The storage of a matrix called `tensor`, whose rows have `width` elements.
    pub(super) fn of(&self, tensor: &str, width: usize, model: &MixedModel) -> Option<TensorStorage> {
        TensorStorage::from_name(self.format(tensor, width, model))
    }

    fn format(&self, tensor: &str, width: usize, model: &MixedModel) -> &'static str {
        let MixedModel { layers, sharing, falcon, llama, tied } = *model;
        if tensor == "output.weight" || tied && tensor == "token_embd.weight" {
            return if falcon || !width.is_multiple_of(256) { "q8_0" } else { "q6_k" };
        }
        let layer = tensor.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let Some((layer, role)) = layer.and_then(|(n, role)| Some((n.parse::<usize>().ok()?, role))) else {
            return self.base;
        };
        let more = layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2;
        let first = |part: usize| layer < layers / part;
        // Experts are stored as an MLP is.
        let role = if role == "ffn_down_exps.weight" { "ffn_down.weight" } else { role };
        match (role, self.name) {
            ("attn_v.weight" | "attn_qkv.weight", _) => {
                let format = self.values(layer, sharing, more);
                // The largest models have so few of them that more bits cost next to nothing.
                let largest = llama && layers == 80 && sharing > 1;
                if largest && matches!(format, "q3_k" | "q4_k") { "q5_k" } else { format }
            }
            ("ffn_down.weight", "q2_k_m") => "q3_k",
            ("ffn_down.weight", "q2_k_s") if first(8) => "q4_k",
            ("ffn_down.weight", "q3_k_m") if first(16) => "q5_k",
            ("ffn_down.weight", "q3_k_m") if !falcon || more => "q4_k",
            ("ffn_down.weight" | "attn_output.weight", "q3_k_l") if falcon => "q4_k",
            ("ffn_down.weight" | "attn_output.weight", "q3_k_l") => "q5_k",
            ("ffn_down.weight", "q4_k_m") if falcon && first(16) => "q6_k",
            ("ffn_down.weight", "q4_k_m") if falcon && more => "q5_k",
            ("ffn_down.weight", "q4_k_m" | "q5_k_m") if more => "q6_k",
            ("ffn_down.weight", "q4_k_s") if !falcon && first(8) => "q5_k",
            ("attn_output.weight", "q2_k_m") if !falcon => "q3_k",
            ("attn_output.weight", "q3_k_m") if !falcon => "q4_k",
            _ => self.base,
        }
    }

    /// Of the projection to values, fused with those to queries and keys or not.
    fn values(&self, layer: usize, sharing: usize, more: bool) -> &'static str {
        match self.name {
            "q2_k_m" if sharing < 4 => "q3_k",
            "q2_k_m" | "q2_k_s" if sharing >= 4 => "q4_k",
            "q3_k_m" if layer < 2 => "q5_k",
            "q3_k_m" => "q4_k",
            "q3_k_l" => "q5_k",
            "q4_k_m" | "q5_k_m" if more => "q6_k",
            "q4_k_s" if layer < 4 => "q5_k",
            _ => self.base,
        }
    }
}
