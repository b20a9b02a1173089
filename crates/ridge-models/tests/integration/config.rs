//! `config.json`: real files mean what their authors meant, and everything else is refused by name.

use proptest::prelude::*;
use ridge_graph::DType;
use ridge_models::{GenerationConfig, LlamaConfig, ModelError, RopeConfig, RopeScaling};
use serde_json::{Value, json};

/// A small valid configuration in the older spelling.
fn small() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 5,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2
    })
}

/// [`small`] with `changes` laid over it; `null` removes a key.
fn with(changes: Value) -> Result<LlamaConfig, ModelError> {
    let mut config = small();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    LlamaConfig::from_json("config.json", &config.to_string())
}

/// The message that refuses `changes`.
fn refusal(changes: Value) -> String {
    with(changes).unwrap_err().to_string()
}

#[test]
fn published_llama_configs_are_read() {
    for (text, hidden, layers, heads) in [
        (include_str!("../data/configs/Meta-Llama-3.1-8B.json"), 4096, 32, 32),
        (include_str!("../data/configs/Meta-Llama-3.1-70B.json"), 8192, 80, 64),
        (include_str!("../data/configs/Meta-Llama-3.1-405B.json"), 16384, 126, 128),
    ] {
        let config = LlamaConfig::from_json("config.json", text).unwrap();
        assert_eq!(config.hidden_size, hidden);
        assert_eq!(config.num_hidden_layers, layers);
        assert_eq!(config.num_attention_heads, heads);
        assert_eq!(config.num_key_value_heads, 8);
        assert_eq!(config.head_dim, 128);
        assert_eq!(config.vocab_size, 128_256);
        assert_eq!(config.max_position_embeddings, 131_072);
        assert_eq!(config.norm_eps, 1e-5);
        let rope = config.rope.as_ref().unwrap();
        assert_eq!((rope.theta, rope.rotary_dim), (500_000.0, 128));
        assert_eq!(
            rope.scaling,
            Some(RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 8192,
            })
        );
        assert!(!config.tie_word_embeddings && !config.attention_bias && !config.mlp_bias);
        assert_eq!(config.torch_dtype, Some(DType::BF16));
        assert_eq!(config.bos_token_id, Some(128_000));
        assert_eq!(config.eos_token_ids, [128_001]);
    }
}

#[test]
fn absent_keys_take_the_family_defaults() {
    let config = with(json!({
        "num_key_value_heads": null, "torch_dtype": null, "bos_token_id": null, "eos_token_id": null
    }))
    .unwrap();
    assert_eq!(config.num_key_value_heads, 8);
    assert_eq!(config.head_dim, 8);
    assert_eq!(config.rope, Some(RopeConfig { theta: 10_000.0, rotary_dim: 8, scaling: None }));
    assert_eq!(config.torch_dtype, None);
    assert_eq!(config.bos_token_id, None);
    assert!(config.eos_token_ids.is_empty());
}

#[test]
fn newer_spelling_means_the_same_as_the_older() {
    let scaling = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192
    });
    let mut parameters = scaling.clone();
    parameters["rope_theta"] = json!(500_000.0);
    let old = with(json!({"rope_theta": 500_000, "rope_scaling": scaling})).unwrap();
    let new = with(json!({
        "rope_parameters": parameters, "torch_dtype": null, "dtype": "float32"
    }))
    .unwrap();
    let both = with(json!({
        "rope_parameters": parameters, "rope_theta": 5e5, "rope_scaling": scaling, "dtype": "float32"
    }))
    .unwrap();
    assert_eq!(old, new);
    assert_eq!(old, both);
    let plain = with(json!({"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}})).unwrap();
    assert_eq!(plain, with(json!({"rope_theta": 100_000})).unwrap());
}

#[test]
fn contradictory_spellings_are_refused() {
    let message = refusal(json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e5}}));
    assert!(message.contains("rope_parameters.rope_theta = 100000.0 contradicts"), "{message}");
    let message = refusal(json!({
        "rope_scaling": {"type": "linear", "factor": 2},
        "rope_parameters": {"rope_type": "linear", "factor": 4}
    }));
    assert!(message.contains("contradicts rope_scaling"), "{message}");
    let message = refusal(json!({"rope_scaling": {"type": "linear", "rope_type": "llama3"}}));
    assert!(message.contains("contradicts type"), "{message}");
    let message = refusal(json!({"dtype": "bfloat16"}));
    assert!(message.contains("dtype = \"bfloat16\" contradicts torch_dtype, which is f32"), "{message}");
}

#[test]
fn every_scaling_is_read() {
    let scaling = |block: Value| with(json!({"rope_scaling": block})).unwrap().decoder.rope.unwrap().scaling.unwrap();
    assert_eq!(scaling(json!({"type": "linear", "factor": 2})), RopeScaling::Linear { factor: 2.0 });
    let dynamic = RopeScaling::Dynamic { factor: 3.0, original_max_position_embeddings: 512 };
    assert_eq!(scaling(json!({"rope_type": "dynamic", "factor": 3})), dynamic);
    let yarn = |original_max_position_embeddings, attention_factor| RopeScaling::Yarn {
        factor: 4.0,
        original_max_position_embeddings,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
        attention_factor,
    };
    assert_eq!(scaling(json!({"type": "yarn", "factor": 4})), yarn(512, 0.1 * 4f64.ln() + 1.0));
    let given = json!({"type": "yarn", "factor": 4, "original_max_position_embeddings": 128, "attention_factor": 1.5});
    assert_eq!(scaling(given), yarn(128, 1.5));
    let equal = json!({"type": "yarn", "factor": 4, "mscale": 0.7, "mscale_all_dim": 0.7});
    assert_eq!(scaling(equal), yarn(512, 1.0));
    let long = json!({
        "type": "su", "short_factor": [1, 1, 1, 1], "long_factor": [1, 2, 3, 4.5],
        "original_max_position_embeddings": 128
    });
    assert_eq!(
        scaling(long),
        RopeScaling::LongRope {
            short_factor: vec![1.0; 4],
            long_factor: vec![1.0, 2.0, 3.0, 4.5],
            original_max_position_embeddings: 128,
            attention_factor: (1.0 + 4f64.ln() / 128f64.ln()).sqrt(),
        }
    );
}

#[test]
fn unsupported_scaling_is_refused_by_name() {
    for name in ["mrope", "Linear", ""] {
        for key in ["type", "rope_type"] {
            let message = refusal(json!({"rope_scaling": {key: name, "factor": 2}}));
            let start = format!("config.json: rope_scaling.{key} = \"{name}\" is not supported");
            assert!(message.starts_with(&start), "{message}");
        }
    }
}

#[test]
fn impossible_scaling_is_refused() {
    let llama3 = |low: f64, high: f64| {
        json!({"rope_scaling": {
            "rope_type": "llama3", "factor": 8, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": 8192
        }})
    };
    assert!(refusal(llama3(4.5, 4.0)).contains("is below low_freq_factor = 4.5"));
    assert!(refusal(llama3(0.0, 4.0)).contains("low_freq_factor = 0.0 is not above 0"));
    for factor in [json!(0), json!(-2.0)] {
        let message = refusal(json!({"rope_scaling": {"type": "linear", "factor": factor}}));
        assert!(message.contains("is not above 0"), "{message}");
    }
    assert!(refusal(json!({"rope_scaling": {"type": "dynamic", "factor": 0.5}})).contains("is below 1"));
    let flat = json!({"type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 2});
    assert!(refusal(json!({"rope_scaling": flat})).contains("beta_fast = 1 is below beta_slow = 2"));
    let long = |short: Value, original: Value| {
        refusal(json!({"rope_scaling": {
            "type": "longrope", "short_factor": short, "long_factor": [1, 1, 1, 1],
            "original_max_position_embeddings": original
        }}))
    };
    assert!(long(json!([1, 1, 1]), json!(64)).contains("lists of other lengths than the 4 pairs"));
    assert!(long(json!([1, 1, 1, 0]), json!(64)).contains("short_factor = [1,1,1,0] is not above 0 throughout"));
    assert!(long(json!([1, 1, 1, "1"]), json!(64)).contains("is not a list of numbers"));
    assert!(long(json!([1, 1, 1, 1]), Value::Null).contains("original_max_position_embeddings is missing"));
    assert!(long(json!([1, 1, 1, 1]), json!(1)).contains("too small"));
    let message = refusal(json!({"rope_scaling": {"type": "linear"}}));
    assert!(message.contains("rope_scaling.factor is missing"), "{message}");
    let message = refusal(json!({"rope_scaling": {"factor": 2.0}}));
    assert!(message.contains("unknown key rope_scaling.factor = 2.0"), "{message}");
}

#[test]
fn every_needed_key_is_named_when_it_is_missing() {
    for key in [
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
    ] {
        let message = refusal(json!({key: null}));
        assert!(message.starts_with(&format!("config.json: {key} is missing")), "{message}");
    }
}

#[test]
fn unknown_key_is_refused_with_its_value() {
    let message = refusal(json!({"sliding_window": 4096}));
    assert!(message.starts_with("config.json: unknown key sliding_window = 4096; "), "{message}");
}

#[test]
fn keys_that_do_not_change_the_model_are_accepted() {
    let plain = with(json!({})).unwrap();
    let noisy = with(json!({
        "_name_or_path": "x", "use_cache": true, "initializer_range": 0.02, "pretraining_tp": 1,
        "pad_token_id": -1, "transformers_version": "4.42.3", "pruned_heads": {},
        "is_encoder_decoder": false, "hidden_act": null, "max_sequence_length": 2048
    }))
    .unwrap();
    assert_eq!(plain, noisy);
}

#[test]
fn what_would_change_the_model_is_refused() {
    for (key, value) in [
        ("hidden_act", json!("gelu")),
        ("pretraining_tp", json!(2)),
        ("partial_rotary_factor", json!(0.5)),
        ("rope_interleaved", json!(true)),
        ("add_cross_attention", json!(true)),
        ("pruned_heads", json!({"0": [1]})),
    ] {
        let message = refusal(json!({key: value}));
        let start = format!("config.json: {key} = {value} is not supported; ");
        assert!(message.starts_with(&start), "{message}");
    }
    let quantised = |config: Value| refusal(json!({"quantization_config": config}));
    let message = quantised(json!({"bits": 4, "quant_method": "hqq"}));
    assert!(message.starts_with("config.json: quantization_config.quant_method = \"hqq\" is not"), "{message}");
    let message = quantised(json!({"quant_method": "fp8", "weight_block_size": [64, 128]}));
    assert!(message.contains("quantization_config.weight_block_size = [64,128] is not supported"), "{message}");
}

#[test]
fn other_families_are_refused() {
    let message = refusal(json!({"model_type": "mixtral"}));
    assert!(message.contains("model_type = \"mixtral\" is not a family that Ridge reads"), "{message}");
    let message = refusal(json!({"architectures": ["LlamaForSequenceClassification"]}));
    assert!(message.contains("LlamaForSequenceClassification"), "{message}");
}

#[test]
fn sizes_that_do_not_fit_each_other_are_refused() {
    assert_eq!(
        refusal(json!({"num_key_value_heads": 3})),
        "config.json: num_key_value_heads = 3 does not divide num_attention_heads = 8; \
         check that the config belongs to this checkpoint"
    );
    assert!(refusal(json!({"head_dim": 7})).contains("head_dim = 7 makes heads 7 wide, which is odd"));
    assert!(refusal(json!({"hidden_size": 60})).contains("does not divide hidden_size = 60"));
    assert!(refusal(json!({"bos_token_id": 512})).contains("is not below vocab_size = 512"));
    assert!(refusal(json!({"eos_token_id": [2, 600]})).contains("is not below vocab_size = 512"));
    assert!(refusal(json!({"attention_dropout": 1.0})).contains("is outside 0.0..1.0"));
    assert!(refusal(json!({"rms_norm_eps": 0})).contains("is not above 0"));
    assert!(refusal(json!({"rope_theta": -1e4})).contains("is not above 0"));
}

#[test]
fn sizes_beyond_all_reason_are_refused() {
    for key in [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
    ] {
        for value in [json!(0), json!(u64::MAX), json!(1u64 << 40)] {
            let message = refusal(json!({key: value}));
            assert!(message.starts_with(&format!("config.json: {key} = {value} is outside 1..=")), "{message}");
        }
    }
}

#[test]
fn numbers_in_quotes_or_with_a_point_are_not_sizes() {
    for value in [json!(64.0), json!("64"), json!([64]), json!(true), json!(-64)] {
        let message = refusal(json!({"hidden_size": value}));
        let start = format!("config.json: hidden_size = {value} is not a whole number");
        assert!(message.starts_with(&start), "{message}");
    }
    assert!(refusal(json!({"rope_theta": "1e4"})).contains("is not a number"));
    assert!(refusal(json!({"torch_dtype": "float64"})).contains("\"float64\" is not one of"));
    assert!(refusal(json!({"eos_token_id": "2"})).contains("is not a token id"));
    assert!(refusal(json!({"attention_bias": 0})).contains("is not true or false"));
}

#[test]
fn key_given_twice_is_refused() {
    let text = small().to_string().replacen('{', r#"{"hidden_size":128,"#, 1);
    let message = LlamaConfig::from_json("config.json", &text).unwrap_err().to_string();
    assert!(message.contains("the key \"hidden_size\" appears twice"), "{message}");
}

#[test]
fn largest_accepted_model_has_a_size_in_bytes() {
    let config = with(json!({
        "hidden_size": 1u64 << 20, "intermediate_size": 1u64 << 22, "num_hidden_layers": 1 << 12,
        "num_attention_heads": 1 << 14, "num_key_value_heads": 1 << 14, "head_dim": 1 << 12,
        "vocab_size": 1 << 26
    }))
    .unwrap();
    let product = |sizes: &[usize]| sizes.iter().try_fold(1u64, |bytes, &size| bytes.checked_mul(size as u64)).unwrap();
    let hidden = config.hidden_size;
    let heads = [config.num_attention_heads, config.head_dim, hidden];
    let layer = 4 * product(&heads) + 3 * product(&[hidden, config.intermediate_size]) + 2 * hidden as u64;
    let outside = 2 * product(&[hidden, config.vocab_size]) + hidden as u64;
    let bytes = layer
        .checked_mul(config.num_hidden_layers as u64)
        .and_then(|n| n.checked_add(outside))
        .and_then(|n| n.checked_mul(DType::F32.size_bytes() as u64));
    assert!(bytes.is_some());
}

#[test]
fn generation_config_may_list_end_tokens() {
    let read = |text| GenerationConfig::from_json("generation_config.json", text);
    assert_eq!(read(r#"{"eos_token_id": [1, 2], "temperature": 0.6}"#).unwrap().eos_token_ids, Some(vec![1, 2]));
    assert_eq!(read(r#"{"eos_token_id": 7}"#).unwrap().eos_token_ids, Some(vec![7]));
    assert_eq!(read("{}").unwrap().eos_token_ids, None);
    assert!(read(r#"{"eos_token_id": -1}"#).is_err());
}

proptest! {
    #[test]
    fn damaged_config_never_panics(at in 0usize..400, byte: u8) {
        let mut bytes = small().to_string().into_bytes();
        let at = at % bytes.len();
        bytes[at] = byte;
        if let Ok(text) = String::from_utf8(bytes) {
            let _ = LlamaConfig::from_json("config.json", &text);
        }
    }

    #[test]
    fn accepted_heads_always_fit(heads in 1usize..40, kv in 1usize..40, dim in 1usize..40) {
        let read = with(json!({"num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": dim}));
        prop_assert_eq!(read.is_ok(), heads % kv == 0 && dim % 2 == 0);
    }
}
