//! Any text as `config.json` and as `generation_config.json`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ridge_models::{GenerationConfig, LlamaConfig};

fuzz_target!(|text: &str| {
    if let Ok(config) = LlamaConfig::from_json("config.json", text) {
        assert_eq!(config.num_attention_heads % config.num_key_value_heads, 0);
        assert_eq!(config.head_dim % 2, 0);
        assert!(config.rms_norm_eps > 0.0 && config.rope_theta > 0.0);
    }
    let _ = GenerationConfig::from_json("generation_config.json", text);
});
