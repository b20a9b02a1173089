//! Configurations of every family: what is read, what is refused and how, and published files by their figures.

use std::path::{Path, PathBuf};

use crate::common::fixtures;
use ridge_models::families::{Gemma3nConfig, GemmaConfig, MistralConfig, QwenConfig};
use ridge_models::{BuildOptions, ModelConfig, ModelFiles};
use serde_json::{Value, json};

const FAMILIES: &[&str] = &[
    "bamba",
    "bloom",
    "cohere",
    "cohere2",
    "deepseek_v2",
    "deepseek_v32",
    "exaone4",
    "falcon",
    "falcon_h1",
    "falcon_mamba",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4_dense",
    "gemma4_moe",
    "glm",
    "glm4",
    "glm4_moe",
    "glm_moe_dsa",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "hyena",
    "jamba",
    "minimax_m2",
    "mistral",
    "mpt",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi3",
    "phi3_longrope",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "smollm3",
    "stablelm",
    "starcoder2",
    "zamba2",
];

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/families").join(name)
}

/// A fixture's configuration in the older spelling, with `changes` laid over it; `null` is null.
fn with(name: &str, changes: &Value) -> Result<ModelConfig, String> {
    let text = std::fs::read_to_string(folder(name).join("config_v4.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    ModelConfig::from_json("config.json", &config.to_string()).map_err(|e| e.to_string())
}

fn without(name: &str, key: &str) -> Result<ModelConfig, String> {
    let text = std::fs::read_to_string(folder(name).join("config_v4.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config.as_object_mut().unwrap().remove(key).unwrap();
    ModelConfig::from_json("config.json", &config.to_string()).map_err(|e| e.to_string())
}

#[test]
fn an_unknown_key_is_refused_in_every_family() {
    for name in FAMILIES {
        let message = with(name, &json!({"new_trick": 3})).unwrap_err();
        assert!(message.starts_with("config.json: unknown key new_trick = 3; "), "{name}: {message}");
    }
}

#[test]
fn another_class_of_model_is_refused_in_every_family() {
    for name in FAMILIES {
        let message = with(name, &json!({"architectures": ["Mine"]})).unwrap_err();
        assert!(message.contains("architectures = [\"Mine\"] is not what Ridge reads; choose"), "{name}: {message}");
    }
}

#[test]
fn what_would_change_the_model_is_refused_by_key_and_value() {
    for (name, key, value) in [
        ("bloom", "apply_residual_connection_post_layernorm", json!(true)),
        ("cohere", "hidden_act", json!("gelu")),
        ("cohere2", "use_parallel_block", json!(false)),
        ("bamba", "hidden_act", json!("gelu")),
        ("bamba", "mlp_bias", json!(true)),
        ("deepseek_v2", "topk_method", json!("noaux_tc")),
        ("deepseek_v32", "scoring_func", json!("softmax")),
        ("deepseek_v32", "rope_interleave", json!(false)),
        ("falcon_h1", "projectors_bias", json!(true)),
        ("falcon_mamba", "hidden_act", json!("gelu")),
        ("jamba", "hidden_act", json!("gelu")),
        ("exaone4", "hidden_act", json!("gelu")),
        ("falcon", "apply_residual_connection_post_layernorm", json!(true)),
        ("falcon", "activation", json!("relu")),
        ("gemma2", "hidden_activation", json!("silu")),
        ("gpt2", "scale_attn_weights", json!(false)),
        ("gpt2", "scale_attn_by_inverse_layer_idx", json!(true)),
        ("gpt2", "activation_function", json!("relu")),
        ("gpt_neox", "hidden_act", json!("relu")),
        ("glm4", "hidden_act", json!("gelu")),
        ("granite", "hidden_act", json!("gelu")),
        ("minimax_m2", "scoring_func", json!("softmax")),
        ("mpt", "no_bias", json!(false)),
        ("qwen2_moe", "decoder_sparse_step", json!(2)),
        ("mistral", "hidden_act", json!("gelu")),
        ("olmo2", "clip_qkv", json!(8.0)),
        ("olmo3", "clip_qkv", json!(8.0)),
        ("phi3", "lm_head_bias", json!(true)),
        ("phi3", "hidden_act", json!("gelu")),
        ("qwen2", "use_mrope", json!(true)),
        ("qwen3", "hidden_act", json!("gelu")),
        ("qwen3_5", "attn_output_gate", json!(false)),
        ("qwen3_5_moe", "norm_topk_prob", json!(false)),
        ("zamba2", "add_bias_linear", json!(true)),
        ("zamba2", "use_long_context", json!(true)),
        ("gemma3n", "hidden_activation", json!("silu")),
        ("gemma4_dense", "use_bidirectional_attention", json!("all")),
        ("smollm3", "hidden_act", json!("gelu")),
        ("stablelm", "hidden_act", json!("gelu")),
        ("starcoder2", "norm_type", json!("rms_norm")),
    ] {
        let message = with(name, &json!({key: value})).unwrap_err();
        assert!(message.starts_with(&format!("config.json: {key} = {value} is not supported; ")), "{name}: {message}");
    }
}

#[test]
fn what_makes_a_decoder_an_encoder_is_told() {
    for (name, key, value) in [
        ("gemma3", "use_bidirectional_attention", json!(true)),
        ("qwen3", "architectures", json!(["Qwen3ForSequenceClassification"])),
    ] {
        let message = with(name, &json!({key: value})).unwrap_err();
        assert!(message.starts_with(&format!("config.json: {key} = {value} makes it an encoder")), "{name}: {message}");
    }
}

#[test]
fn layers_that_cannot_share_are_refused() {
    for (name, key, value, why) in [
        ("gemma3n", "num_kv_shared_layers", json!(3), "leaves layer 2 without an earlier layer whose keys"),
        ("gemma3n", "num_kv_shared_layers", json!(5), "leaves none of 5 layers with keys of its own"),
        ("gemma3n", "altup_num_inputs", json!(1), "is below 2"),
        ("gemma3n", "altup_active_idx", json!(3), "is not below altup_num_inputs = 3"),
        ("gemma3n", "intermediate_size", json!([20, 20, 20, 20, 24]), "is not one width, 5 times"),
        ("gemma3n", "activation_sparsity_pattern", json!([0.5, 0.5]), "has 2 shares for 5 layers"),
        ("gemma3n", "activation_sparsity_pattern", json!([0.5, 1.0, 0, 0, 0]), "has 1, which is outside 0.0..1.0"),
        ("zamba2", "layers_block_type", json!(["mamba", "hybrid"]), "names 2 layers of 4"),
        ("zamba2", "hybrid_layer_ids", json!([1, 2]), "are not the hybrid layers"),
    ] {
        let message = with(name, &json!({key: value})).unwrap_err();
        assert!(message.starts_with(&format!("config.json: {key} = ")) && message.contains(why), "{name}: {message}");
    }
}

#[test]
fn heads_of_global_layers_that_contradict_each_other_are_refused() {
    // Four query heads, two or four of keys; four of keys in dense layers with a window and two in the others.
    let per_layer = json!({"2": {"head_dim": 12}, "4": {"head_dim": 12}});
    let odd = json!({"2": {"head_dim": 12, "num_key_value_heads": 3}, "4": {"head_dim": 12, "num_key_value_heads": 3}});
    let kv_heads = "num_global_key_value_heads";
    for (name, changes, key, why) in [
        ("gemma4", json!({kv_heads: 4}), kv_heads, "contradicts the 2 of num_key_value_heads without attention_k_eq_v"),
        (
            "gemma4",
            json!({"per_layer_config": per_layer, kv_heads: 4}),
            kv_heads,
            "contradicts the 2 of per_layer_config",
        ),
        (
            "gemma4",
            json!({"per_layer_config": per_layer, "global_head_dim": 16}),
            "global_head_dim",
            "contradicts the 12 of per_layer_config",
        ),
        ("gemma4", json!({"per_layer_config": odd}), "per_layer_config", "gives global layers 3 heads of keys"),
        ("gemma4_dense", json!({kv_heads: 3}), kv_heads, "gives global layers 3 heads of keys"),
        (
            "gemma4_dense",
            json!({"global_head_dim": 7}),
            "global_head_dim",
            "gives global layers 2 heads of keys, 7 wide",
        ),
    ] {
        let message = with(name, &changes).unwrap_err();
        assert!(message.starts_with(&format!("config.json: {key} = ")) && message.contains(why), "{name}: {message}");
    }
    let alike = with("gemma4", &json!({"per_layer_config": null, "global_head_dim": null})).unwrap();
    assert_eq!(alike.other_heads, Some([2, 8]), "null is no layer that differs");
    // What agrees is no contradiction.
    for changes in [json!({kv_heads: 2}), json!({"per_layer_config": per_layer, kv_heads: 2})] {
        assert_eq!(with("gemma4", &changes).unwrap(), with("gemma4", &json!({})).unwrap());
    }
}

#[test]
fn global_layers_of_gemma_4_say_how_they_rotate() {
    let ropes = |rope_type: Value| {
        let mut full = json!({"partial_rotary_factor": 0.5, "rope_theta": 10000.0});
        if !rope_type.is_null() {
            full["rope_type"] = rope_type;
        }
        let local = json!({"rope_theta": 100.0, "rope_type": "default"});
        with("gemma4", &json!({"rope_parameters": {"full_attention": full, "sliding_attention": local}}))
    };
    assert!(ropes(json!("proportional")).is_ok());
    for (rope_type, why) in [(Value::Null, "is missing; "), (json!("default"), "= \"default\" is not supported; ")] {
        let message = ropes(rope_type).unwrap_err();
        let key = "config.json: rope_parameters.full_attention.rope_type ";
        assert!(message.starts_with(&format!("{key}{why}")), "{message}");
    }
}

#[test]
fn defaults_that_differ_between_versions_are_not_guessed() {
    for (name, keys) in [
        ("gemma2", &["num_key_value_heads", "head_dim", "sliding_window", "query_pre_attn_scalar"][..]),
        ("gemma3", &["num_key_value_heads", "head_dim", "sliding_window", "query_pre_attn_scalar"]),
        ("mistral", &["num_key_value_heads"]),
        ("qwen2", &["num_key_value_heads"]),
        ("qwen3", &["num_key_value_heads", "head_dim"]),
        ("deepseek_v32", &["routed_scaling_factor", "first_k_dense_replace", "n_shared_experts"]),
        ("glm_moe_dsa", &["routed_scaling_factor", "first_k_dense_replace", "n_shared_experts"]),
    ] {
        for key in keys {
            let message = without(name, key).unwrap_err();
            assert!(message.starts_with(&format!("config.json: {key} is missing; ")), "{name}: {message}");
        }
    }
}

#[test]
fn what_a_family_may_leave_out_has_its_default() {
    let window = |config: ModelConfig| config.downcast_ref::<MistralConfig>().expect("is a Mistral").sliding_window;
    let mistral = without("mistral", "sliding_window").unwrap();
    assert_eq!(window(mistral), Some(4096), "absent is the family's window");
    let mistral = with("mistral", &json!({"sliding_window": null})).unwrap();
    assert_eq!(window(mistral), None, "null is none");
    let cap = |config: ModelConfig| config.downcast_ref::<Gemma3nConfig>().expect("is a 3n").final_logit_softcapping;
    assert_eq!(cap(without("gemma3n", "final_logit_softcapping").unwrap()), Some(30.0), "absent is the family's");
    assert_eq!(cap(with("gemma3n", &json!({"final_logit_softcapping": null})).unwrap()), None, "null is none");
    assert_eq!(without("gpt2", "n_inner").unwrap().intermediate_size, 128);
    assert_eq!(without("falcon", "ffn_hidden_size").unwrap().intermediate_size, 128);
    assert_eq!(without("falcon", "max_position_embeddings").unwrap().max_position_embeddings, 2048);
    for (name, tied) in [("falcon", true), ("gemma2", true), ("gpt2", true), ("qwen2", false), ("olmo2", false)] {
        assert_eq!(without(name, "tie_word_embeddings").unwrap().tie_word_embeddings, tied, "{name}");
    }
    for (name, theta) in [("qwen3", 1e4), ("gemma2", 1e4), ("gemma3", 1e6)] {
        assert_eq!(without(name, "rope_theta").unwrap().rope.as_ref().unwrap().theta, theta, "{name}");
    }
    let rope = without("gpt_neox", "rotary_pct").unwrap().rope.clone().unwrap();
    assert_eq!(rope.rotary_dim, 4, "a quarter of 16");
}

#[test]
fn windows_of_layers_follow_types_or_the_family_rule() {
    let windows = |name: &str, changes: Value| {
        let config = with(name, &changes).unwrap();
        let qwen = config.downcast_ref::<QwenConfig>().map(|c| c.windows.clone());
        let gemma = config.downcast_ref::<GemmaConfig>().map(|c| c.windows.clone());
        qwen.or(gemma).unwrap_or_else(|| panic!("{config:?}"))
    };
    let on = json!({"use_sliding_window": true, "sliding_window": 8, "max_window_layers": 1});
    assert_eq!(windows("qwen2", on), [None, Some(8)]);
    let off = json!({"use_sliding_window": false, "sliding_window": 8, "max_window_layers": 1});
    assert_eq!(windows("qwen2", off), [None, None]);
    let types = json!({"layer_types": ["full_attention", "sliding_attention"]});
    assert_eq!(windows("gemma2", types), [None, Some(8)]);
    assert_eq!(windows("gemma3", json!({"sliding_window_pattern": 2})), [Some(8), None, Some(8)]);

    let refused = |changes: Value| with("qwen2", &changes).unwrap_err();
    let message = refused(json!({"layer_types": ["full_attention"]}));
    assert!(message.contains("layer_types = [\"full_attention\"] names 1 layers of 2"), "{message}");
    let message = refused(json!({"layer_types": ["full_attention", "linear_attention"]}));
    assert!(message.contains("has \"linear_attention\", which is not supported"), "{message}");
    let message = refused(json!({"layer_types": ["full_attention", "sliding_attention"]}));
    assert!(message.contains("has sliding layers, and there is no sliding_window"), "{message}");
}

#[test]
fn the_part_of_a_head_that_is_rotated_is_of_pairs() {
    let message = with("gpt_neox", &json!({"rotary_pct": 0.2})).unwrap_err();
    assert!(message.contains("rotary_pct = 0.2 makes 3 elements of each head turn, which are no pairs"), "{message}");
    let message = with("gpt_neox", &json!({"rotary_pct": 1.5})).unwrap_err();
    assert!(message.contains("rotary_pct = 1.5 is above 1"), "{message}");
    let message = with("mistral", &json!({"partial_rotary_factor": 0.5})).unwrap_err();
    assert!(message.contains("partial_rotary_factor = 0.5 is not supported"), "{message}");
}

fn published(name: &str) -> ModelFiles {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/configs").join(format!("{name}.json"));
    ModelFiles::from_config(&path).unwrap()
}

#[test]
fn published_models_have_their_published_numbers_of_parameters() {
    for (name, count) in [
        ("Meta-Llama-3.1-8B", 8_030_261_248),
        ("Meta-Llama-3.1-70B", 70_553_706_496),
        ("Meta-Llama-3.1-405B", 405_853_388_800),
        ("Qwen3-0.6B", 596_049_920),
        ("Qwen3-8B", 8_190_735_360),
        ("Qwen3-32B", 32_762_123_264),
    ] {
        let model = published(name).config().unwrap().build(&BuildOptions::default()).unwrap();
        assert_eq!(model.parameter_count(), count, "{name}");
    }
}

#[test]
fn hyena_has_the_sizes_of_published_models_and_refuses_what_it_does_not_compute() {
    // hyenadna-tiny-1k-seqlen: the elements of the reference's tensors, output projection included (fixtures/hyena.py).
    let tiny = json!({
        "d_model": 128, "d_inner": 512, "filter_order": 64, "max_seq_len": 1026, "n_layer": 2, "vocab_size": 12,
    });
    let config = with("hyena", &tiny).unwrap();
    assert_eq!((config.vocab_size, config.max_context()), (16, 1026));
    let model = config.build(&BuildOptions::default()).unwrap();
    assert_eq!(model.parameter_count(), 450_712);
    for (changes, key) in [
        (json!({"hyena_order": 3}), "hyena_order"),
        (json!({"short_filter_order": 4}), "short_filter_order"),
        (json!({"train_freq": false}), "train_freq"),
        (json!({"emb_dim": 4}), "emb_dim"),
        (json!({"emb_dim": 1}), "emb_dim"),
    ] {
        assert!(with("hyena", &changes).unwrap_err().starts_with(&format!("config.json: {key} = ")), "{changes}");
    }
}

#[test]
fn published_models_of_other_families_are_refused_by_the_key() {
    let text = std::fs::read_to_string(fixtures().join("configs/DeepSeek-V3.2.json")).unwrap();
    let message = ModelConfig::from_json("c.json", &text.replace("v32", "v4")).unwrap_err().to_string();
    let start = "c.json: model_type = \"deepseek_v4\" is not a family that Ridge reads; choose a checkpoint of ";
    assert!(message.starts_with(start), "{message}");
}

#[test]
fn layers_of_sparse_attention_are_as_one_spells_them() {
    let kinds = |name: &str, changes: Value| -> Vec<String> {
        let model = with(name, &changes).unwrap().build(&BuildOptions::default()).unwrap();
        let states = model.state_groups.iter().flat_map(|group| &group.states);
        states.filter_map(|state| state.strip_suffix(".self_attn.index_keys")).map(str::to_owned).collect()
    };
    let all = ["model.layers.0", "model.layers.1", "model.layers.2"];
    let glm = |changes: Value| kinds("glm_moe_dsa", changes);
    assert_eq!(glm(json!({})), all[..2]);
    assert_eq!(glm(json!({"indexer_types": null})), all);
    assert_eq!(glm(json!({"indexer_types": null, "index_topk_pattern": "FSS"})), all[..1]);
    // Behind the first, every second.
    assert_eq!(glm(json!({"indexer_types": null, "index_topk_freq": 2})), all[..2]);
    assert_eq!(
        glm(json!({"indexer_types": null, "index_topk_freq": 2, "index_skip_topk_offset": 1})),
        [all[0], all[2]]
    );

    let refused = |name: &str, changes: Value| with(name, &changes).unwrap_err();
    let message = refused("glm_moe_dsa", json!({"indexer_types": ["shared", "full", "full"]}));
    assert!(message.starts_with("config.json: indexer_types = "), "{message}");
    assert!(message.contains("lets the first layer share a selection"), "{message}");
    let schedule = json!({"indexer_types": null, "index_topk_freq": 2, "index_skip_topk_offset": 0});
    let message = refused("glm_moe_dsa", schedule);
    assert!(message.starts_with("config.json: index_skip_topk_offset = 0 lets the first layer share"), "{message}");
    let every = json!({"indexer_types": null, "index_topk_freq": 1, "index_skip_topk_offset": 0});
    assert_eq!(glm(every), all, "no layer shares");
    let message = refused("glm_moe_dsa", json!({"indexer_types": ["full", "full"]}));
    assert!(message.contains("is of 2 layers and not of 3"), "{message}");
    let message = refused("deepseek_v32", json!({"mlp_layer_types": ["sparse", "sparse"]}));
    assert!(message.starts_with("config.json: mlp_layer_types = "), "{message}");
    let message = refused("deepseek_v32", json!({"layer_types": ["indexed_attention", "full_attention"]}));
    assert!(message.starts_with("config.json: layer_types = "), "{message}");
    let message = refused("deepseek_v32", json!({"index_head_dim": 2}));
    assert!(message.starts_with("config.json: index_head_dim = 2 is below qk_rope_head_dim = 4"), "{message}");
    for key in ["index_topk", "index_n_heads", "index_head_dim", "q_lora_rank"] {
        assert!(without("deepseek_v32", key).unwrap_err().contains(key), "{key}");
    }
}
