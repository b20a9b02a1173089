//! Any text as `config.json` and as `generation_config.json`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ridge_models::{GenerationConfig, ModelConfig, NetworkConfig};

fuzz_target!(|text: &str| {
    if let Ok(config) = ModelConfig::from_json("config.json", text) {
        assert_eq!(config.num_attention_heads % config.num_key_value_heads, 0);
        assert!(config.norm_eps > 0.0 && config.max_context() > 0);
        if let Some(rope) = &config.rope {
            assert!(rope.theta > 0.0 && rope.rotary_dim % 2 == 0 && rope.rotary_dim <= config.head_dim);
        }
    }
    let _ = NetworkConfig::from_json("config.json", text);
    let _ = GenerationConfig::from_json("generation_config.json", text);
});
