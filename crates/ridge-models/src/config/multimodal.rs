//! The language model within a multimodal one, as a configuration of its own.

use serde_json::{Map, Value, json};

/// A multimodal family whose text part is a family of its own.
struct Multimodal {
    /// The `model_type` of the whole.
    model_type: &'static str,
    /// The `model_type` of its `text_config`.
    text: &'static str,
    /// Values of the text part's configuration class where `text_config` leaves them out: published files do.
    defaults: fn() -> Value,
}

const MULTIMODAL: &[Multimodal] = &[
    Multimodal {
        model_type: "gemma3",
        text: "gemma3_text",
        defaults: || {
            json!({
                "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
                "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256,
                "sliding_window": 4096, "tie_word_embeddings": true
            })
        },
    },
    Multimodal {
        model_type: "gemma3n",
        text: "gemma3n_text",
        defaults: || {
            json!({
                "vocab_size": 262_400, "hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 35,
                "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32_768,
                "rms_norm_eps": 1e-6, "sliding_window": 512, "tie_word_embeddings": true
            })
        },
    },
    Multimodal {
        model_type: "gemma4",
        text: "gemma4_text",
        defaults: || {
            json!({
                "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
                "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "sliding_window": 512,
                "tie_word_embeddings": true
            })
        },
    },
    Multimodal { model_type: "llama4", text: "llama4_text", defaults: || json!({ "attention_chunk_size": 8192 }) },
    Multimodal { model_type: "qwen3_5", text: "qwen3_5_text", defaults: || json!({}) },
    Multimodal { model_type: "qwen3_5_moe", text: "qwen3_5_moe_text", defaults: || json!({}) },
    Multimodal { model_type: "kimi_k25", text: "kimi_k2", defaults: || json!({}) },
];

/// Keys of the whole that speak of its text part too, and have priority over `text_config`.
const TOKENS: [&str; 2] = ["bos_token_id", "eos_token_id"];
/// The same where `text_config` does not have them.
const SHARED: [&str; 4] = ["torch_dtype", "dtype", "tie_word_embeddings", "quantization_config"];

/// The text of a `config.json` of the language model that `text`, the `config.json` of a multimodal model, contains;
/// `text` itself if it is no such file.
pub(crate) fn language_model(text: String) -> String {
    let Ok(Value::Object(whole)) = serde_json::from_str(&text) else { return text };
    let of = |family: &&Multimodal| whole.get("model_type").is_some_and(|it| it == family.model_type);
    let (Some(family), Some(Value::Object(part))) = (MULTIMODAL.iter().find(of), whole.get("text_config")) else {
        return text;
    };
    let Value::Object(mut config) = (family.defaults)() else { return text };
    let present = |map: &Map<String, Value>, key: &str| map.get(key).filter(|value| !value.is_null()).cloned();
    // Newer files call the dtype `dtype`; one of the two spellings is enough.
    let has_dtype = ["torch_dtype", "dtype"].iter().any(|key| present(part, key).is_some());
    for key in SHARED.iter().filter(|key| !(has_dtype && key.ends_with("dtype"))) {
        config.extend(present(&whole, key).map(|value| ((*key).to_owned(), value)));
    }
    config.extend(part.clone());
    for key in TOKENS {
        config.extend(present(&whole, key).map(|value| (key.to_owned(), value)));
    }
    config.insert("model_type".into(), family.text.into());
    config.remove("architectures");
    Value::Object(config).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_part_takes_defaults_and_shared_keys() {
        let whole = r#"{"model_type": "gemma3", "eos_token_id": [1, 106], "torch_dtype": "bfloat16", "vision_config": {},
            "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "eos_token_id": 1}}"#;
        let part: Value = serde_json::from_str(&language_model(whole.to_owned())).unwrap();
        assert_eq!(part["model_type"], "gemma3_text");
        assert_eq!((&part["hidden_size"], &part["num_attention_heads"]), (&json!(2560), &json!(8)));
        assert_eq!((&part["eos_token_id"], &part["torch_dtype"]), (&json!([1, 106]), &json!("bfloat16")));
        assert!(part.get("vision_config").is_none());
    }

    #[test]
    fn other_configurations_stay_as_they_are() {
        for text in [r#"{"model_type": "llama"}"#, r#"{"model_type": "gemma3"}"#, "[1", "{}"] {
            assert_eq!(language_model(text.to_owned()), text);
        }
    }
}
