//! A model of random weights in the shape of Llama-3.2-1B, as a folder that `ridge convert` reads.

use std::io::{self, BufWriter, Write as _};
use std::path::Path;

const HIDDEN: usize = 2048;
const LAYERS: usize = 16;
const FFN: usize = 8192;
const VOCABULARY: usize = 128_256;
const KEYS: usize = 8 * 64;

const CONFIG: &str = r#"{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16,
  "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256,
  "tie_word_embeddings": true, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072,
  "hidden_act": "silu", "bos_token_id": 128000, "eos_token_id": 128001, "torch_dtype": "bfloat16"
}
"#;

/// Names and shapes of the tensors.
fn tensors() -> Vec<(String, Vec<usize>)> {
    let mut all = vec![("model.embed_tokens.weight".to_owned(), vec![VOCABULARY, HIDDEN])];
    for layer in 0..LAYERS {
        let of_layer = [
            ("self_attn.q_proj", vec![HIDDEN, HIDDEN]),
            ("self_attn.k_proj", vec![KEYS, HIDDEN]),
            ("self_attn.v_proj", vec![KEYS, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, HIDDEN]),
            ("mlp.gate_proj", vec![FFN, HIDDEN]),
            ("mlp.up_proj", vec![FFN, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, FFN]),
            ("input_layernorm", vec![HIDDEN]),
            ("post_attention_layernorm", vec![HIDDEN]),
        ];
        all.extend(of_layer.map(|(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape)));
    }
    all.push(("model.norm.weight".to_owned(), vec![HIDDEN]));
    all
}

/// Writes `config.json` and `model.safetensors` to `folder`: matrices of bf16 numbers between -0.06 and 0.06, norms of ones.
pub(super) fn write(folder: &Path) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    std::fs::write(folder.join("config.json"), CONFIG)?;
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in tensors() {
        let begin = end;
        end += 2 * shape.iter().product::<usize>();
        let entry = serde_json::json!({ "dtype": "BF16", "shape": shape, "data_offsets": [begin, end] });
        header.insert(name, entry);
    }
    let mut header = serde_json::Value::Object(header).to_string();
    // The length before it is eight bytes.
    header.extend(std::iter::repeat_n(' ', (8 + header.len()).next_multiple_of(64) - 8 - header.len()));
    let mut file = BufWriter::with_capacity(1 << 20, std::fs::File::create(folder.join("model.safetensors"))?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut state = 88_172_645_463_325_252u64;
    for (_, shape) in tensors() {
        for _ in 0..shape.iter().product() {
            let bits = if shape.len() == 1 { 0x3f80 } else { number(&mut state) };
            file.write_all(&bits.to_le_bytes())?;
        }
    }
    file.flush()
}

/// The bits of a bf16 number of either sign from 2^-7 to below 2^-4, by xorshift (Marsaglia 2003).
fn number(state: &mut u64) -> u16 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    let exponent = 120 + (*state >> 40) % 3;
    (*state & 0x8000) as u16 | (exponent as u16) << 7 | (*state >> 20) as u16 & 0x7f
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_small_and_of_both_signs() {
        let mut state = 1;
        let values: Vec<f32> = (0..1000).map(|_| f32::from_bits(u32::from(number(&mut state)) << 16)).collect();
        assert!(values.iter().all(|x| x.abs() >= 0.0078 && x.abs() < 0.0625), "{values:?}");
        assert!(values.iter().filter(|x| **x < 0.0).count().abs_diff(500) < 100);
    }
}
