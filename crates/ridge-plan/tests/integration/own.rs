//! Plans of Ridge's own training, held against the memory that a step of it is planned to take.

use ridge_graph::grad::{float_weights, gradient};
use ridge_graph::{Bindings, DType, passes};
use ridge_models::{BuildOptions, ModelConfig, symbols};
use ridge_plan::ledger::activations_of_layer;
use ridge_plan::reading::Reading;
use ridge_plan::train::{Layout, Workload};
use ridge_runtime::{lower, plan};

fn config(layers: usize) -> String {
    format!(
        r#"{{"model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": {layers},
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5}}"#
    )
}

/// Bytes of workspace of a forward and backward pass over these sequences.
fn workspace(layers: usize, sequences: usize, tokens: usize) -> f64 {
    let options = BuildOptions { activations: DType::BF16, ..BuildOptions::default() };
    let config = ModelConfig::from_json("config.json", &config(layers)).unwrap();
    let mut loss = config.build_training(&options).unwrap().graph;
    passes::prune(&mut loss, &["loss"]).unwrap();
    let weights = float_weights(&loss);
    let graph = gradient(&loss, "loss", &weights).unwrap();
    let outputs: Vec<String> = weights.iter().map(|name| format!("grad.{name}")).collect();
    let outputs: Vec<&str> = outputs.iter().map(String::as_str).collect();
    let bindings = Bindings::new().with(symbols::TOKENS, sequences * tokens);
    plan(&lower(&graph, &outputs, &[]).unwrap(), &bindings).unwrap().arena_bytes as f64
}

#[test]
fn what_a_layer_keeps_is_what_each_more_layer_takes() {
    let reading = Reading::trained_by_ridge("config.json", &config(2)).unwrap();
    for (sequences, tokens) in [(1, 64), (3, 64), (2, 160)] {
        let layout = Layout { micro_batch: sequences, ..Layout::default() };
        let work = Workload { seq: tokens, ..Workload::default() };
        let planned = activations_of_layer(&reading.kinds[0], reading.hidden, &layout, &work).kept;
        let taken = (workspace(8, sequences, tokens) - workspace(4, sequences, tokens)) / 4.0;
        let off = planned / taken - 1.0;
        assert!(off.abs() < 0.02, "{sequences} x {tokens} tokens: planned {planned}, taken {taken}, off by {off:.3}");
    }
}

#[test]
fn ranks_of_tensor_parallelism_share_what_is_cut() {
    let reading = Reading::trained_by_ridge("config.json", &config(2)).unwrap();
    let own = reading.kinds[0].own.as_ref().unwrap();
    let [one, two, four] = [1, 2, 4].map(|tp| own.bytes(1, 64, tp));
    // Norms' inputs are whole on every rank.
    assert!(two < 0.65 * one && two > 0.5 * one, "{one} and {two}");
    assert!((2.0 * (two - four) - (one - two)).abs() < 1.0, "{one}, {two} and {four}");
}

#[test]
fn what_ridge_does_not_train_is_refused() {
    let reading = Reading::trained_by_ridge("config.json", &config(2)).unwrap();
    let refused = |layout: Layout| layout.check(&reading, 64, 8).unwrap_err().to_string();
    assert!(refused(Layout { zero: 1, dp: 2, ..Layout::default() }).contains("ZeRO 1 and 2"));
    assert!(refused(Layout { pp: 2, ..Layout::default() }).contains("pipeline"));
    assert!(Layout { zero: 3, dp: 2, tp: 2, ..Layout::default() }.check(&reading, 64, 8).is_ok());
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/configs/DeepSeek-V3.2.json");
    let error = Reading::trained_by_ridge("config.json", &std::fs::read_to_string(file).unwrap()).unwrap_err();
    assert!(error.to_string().contains("does not train this family"), "{error}");
}
