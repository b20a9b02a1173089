//! GGUF files whose metadata or tensors do not describe a model.

use ridge_files::gguf::{Gguf, GgufWriter, TensorStorage};
use ridge_graph::DType;
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
