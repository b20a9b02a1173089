//! GGUF files whose metadata or tensors do not describe a model.

use ridge_files::gguf::{Gguf, GgufWriter, TensorStorage};
use ridge_graph::DType;
use ridge_models::ModelFiles;
use ridge_models::gguf::{checkpoint, config_json};

/// A file with these keys and tensors, the data being zeros.
fn made(keys: impl Fn(&mut GgufWriter), tensors: &[(&str, &[usize])]) -> Vec<u8> {
    let mut writer = GgufWriter::default();
    keys(&mut writer);
    for (name, shape) in tensors {
        writer.tensor(name, shape, &TensorStorage::plain(DType::F32)).expect("fits");
    }
    let mut out = Vec::new();
    let bytes = |i: usize| tensors[i].1.iter().product::<usize>() * 4;
    writer.write::<std::io::Error>(&mut out, |i| Ok(vec![0; bytes(i)])).expect("writes");
    out
}

#[test]
fn tensors_without_elements_are_no_model() {
    let gguf = Gguf::from_bytes("x.gguf", made(|_| (), &[("none", &[0, 7])])).expect("reads");
    assert!(config_json(&gguf).is_err() && checkpoint(&gguf).is_err());
}

/// Metadata of a model of one layer.
fn small(writer: &mut GgufWriter, architecture: &str) {
    writer.text("general.architecture", architecture);
    for (key, value) in [
        ("embedding_length", 4),
        ("feed_forward_length", 4),
        ("block_count", 1),
        ("attention.head_count", 1),
        ("context_length", 8),
        ("vocab_size", 4),
    ] {
        writer.u32(&format!("{architecture}.{key}"), value);
    }
    writer.f32(&format!("{architecture}.attention.layer_norm_rms_epsilon"), 1e-5);
}

#[test]
fn extents_whose_product_cannot_be_counted_are_no_panic() {
    let huge: &[usize] = &[0, 1 << 40, 1 << 40];
    let file = made(|w| small(w, "llama"), &[("token_embd.weight", &[4, 4]), ("blk.0.attn_output.weight", huge)]);
    let gguf = Gguf::from_bytes("x.gguf", file).expect("reads");
    let checkpoint = checkpoint(&gguf).expect("tensors");
    assert_eq!(checkpoint.tensor("model.layers.0.self_attn.o_proj.weight").expect("has it").shape, huge);
}

#[test]
fn an_array_of_metadata_has_one_value_for_each_layer() {
    let file = |kv: &[i32]| {
        let keys = |w: &mut GgufWriter| {
            small(w, "llama");
            w.i32s("llama.attention.head_count_kv", kv);
        };
        let gguf = Gguf::from_bytes("x.gguf", made(keys, &[])).expect("reads");
        config_json(&gguf).map_err(|e| e.to_string())
    };
    assert!(file(&[1]).expect("one layer").contains("\"num_key_value_heads\":1"));
    assert!(file(&[1, 1]).expect_err("two").contains("attention.head_count_kv has 2 values for 1 layers"));
    let layers = made(
        |w| {
            w.text("general.architecture", "llama");
            w.i32s("llama.block_count", &[1, 1]);
        },
        &[],
    );
    let gguf = Gguf::from_bytes("x.gguf", layers).expect("reads");
    let refused = config_json(&gguf).expect_err("an array").to_string();
    assert!(refused.contains("llama.block_count = an array of 2 values is not a number"), "{refused}");
}

#[test]
fn a_pattern_of_windows_that_is_no_number_is_refused() {
    let file = |pattern: Option<&str>| {
        let keys = |w: &mut GgufWriter| {
            small(w, "gemma3");
            pattern.iter().for_each(|text| w.text("gemma3.attention.sliding_window_pattern", text));
        };
        let gguf = Gguf::from_bytes("x.gguf", made(keys, &[])).expect("reads");
        config_json(&gguf).map_err(|e| e.to_string())
    };
    assert!(file(None).expect("reads").contains("\"sliding_window_pattern\":6"));
    let refused = file(Some("x")).expect_err("a text");
    assert!(refused.contains("sliding_window_pattern = \"x\" is not a whole number"), "{refused}");
}

/// What the configuration of a small file with further keys says, or why there is none.
fn with(architecture: &str, keys: impl Fn(&mut GgufWriter)) -> Result<serde_json::Value, String> {
    let keys = |w: &mut GgufWriter| {
        small(w, architecture);
        keys(w);
    };
    let gguf = Gguf::from_bytes("x.gguf", made(keys, &[])).expect("reads");
    config_json(&gguf).map(|text| serde_json::from_str(&text).expect("JSON")).map_err(|e| e.to_string())
}

#[test]
fn keys_that_change_the_model_are_refused_by_name() {
    let floats: [(&str, f32); 5] = [
        ("attention.scale", 0.25),
        ("attention.clamp_kqv", 8.0),
        ("rope.scaling.attn_factor", 2.0),
        ("rope.scaling.yarn_ext_factor", 0.5),
        ("new_trick", 1.0),
    ];
    for (key, value) in floats {
        let refused = with("llama", |w| w.f32(&format!("llama.{key}"), value)).expect_err(key);
        assert!(refused.contains(&format!("llama.{key}")), "{refused}");
    }
    for (key, value) in [("attention.value_length", 2), ("rope.dimension_count", 2)] {
        let refused = with("llama", |w| w.u32(&format!("llama.{key}"), value)).expect_err(key);
        assert!(refused.contains(&format!("llama.{key}")) && refused.contains("4 elements of a head"), "{refused}");
    }
    let refused = with("llama", |w| w.bool("llama.attention.causal", false)).expect_err("sees later tokens");
    assert!(refused.contains("llama.attention.causal"), "{refused}");
}

#[test]
fn keys_that_say_the_usual_are_read() {
    let said = with("llama", |w| {
        w.f32("llama.attention.scale", 0.5);
        w.u32("llama.attention.value_length", 4);
        w.u32("llama.rope.dimension_count", 4);
        w.bool("llama.attention.causal", true);
        w.text("llama.tensor_data_layout", "Meta AI original pth");
        w.f32("llama.rope.scaling.factor", 1.0);
    });
    assert!(said.expect("reads").get("rope_scaling").is_none());
}

#[test]
fn factor_without_a_type_is_linear_under_either_name() {
    for key in ["llama.rope.scale_linear", "llama.rope.scaling.factor"] {
        let scaling = with("llama", |w| w.f32(key, 2.0)).expect("reads")["rope_scaling"].take();
        assert_eq!(scaling, serde_json::json!({"rope_type": "linear", "factor": 2.0}), "{key}");
    }
    let none = with("llama", |w| {
        w.text("llama.rope.scaling.type", "none");
        w.f32("llama.rope.scaling.factor", 2.0);
    });
    assert!(none.expect("reads").get("rope_scaling").is_none());
    let yarn = with("llama", |w| {
        w.text("llama.rope.scaling.type", "yarn");
        w.f32("llama.rope.scaling.factor", 1.0);
        w.f32("llama.rope.scaling.attn_factor", 2.0);
        w.f32("llama.rope.scaling.yarn_attn_factor", 1.5);
    });
    assert_eq!(yarn.expect("reads")["rope_scaling"]["attention_factor"], 3.0);
}

#[test]
fn vocabulary_alone_needs_no_key_of_a_layer() {
    // An architecture that Ridge does not run, with keys that it would refuse.
    let keys = |w: &mut GgufWriter| {
        w.text("general.architecture", "mpt");
        w.f32("mpt.attention.max_alibi_bias", 8.0);
        w.u32("mpt.expert_count", 8);
        w.text("tokenizer.ggml.model", "llama");
        w.texts("tokenizer.ggml.tokens", ["<unk>", "<s>", "</s>", "\u{2581}", "a", "b", "ab"].into_iter());
        w.f32s("tokenizer.ggml.scores", &[0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -0.5]);
        w.i32s("tokenizer.ggml.token_type", &[2, 3, 3, 1, 1, 1, 1]);
    };
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("vocabulary.gguf");
    std::fs::write(&path, made(keys, &[])).expect("writes");
    let files = ModelFiles::open(Some(&path)).expect("opens");
    let tokens = files.tokenizer().expect("is whole").encode("ab", false).expect("encodes");
    assert_eq!(tokens.last(), Some(&6));
    let refused = files.config().expect_err("is no model that Ridge runs").to_string();
    assert!(refused.contains("mpt"), "{refused}");
}
