//! Published configurations by their figures: parameters exactly, caches, and what one token multiplies.

use std::collections::BTreeMap;
use std::path::Path;

use ridge_graph::{Bindings, Graph, Role, passes};
use ridge_models::{BuildOptions, Model, ModelConfig, NetworkConfig, PlannedConfig, symbols, with_reached};

fn fixtures() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

fn model(name: &str) -> Model {
    let text = std::fs::read_to_string(fixtures().join("configs").join(format!("{name}.json"))).unwrap();
    let options = BuildOptions { cache: ridge_graph::DType::BF16, ..BuildOptions::default() };
    ModelConfig::from_json(name, &text).unwrap().build(&options).unwrap()
}

/// Biases by which experts are chosen, and factors of layers: transformers keeps them as buffers, which it does not count.
fn buffers(graph: &Graph) -> u64 {
    let is_buffer = |name: &str| ["e_score_correction_bias", "layer_scalar"].iter().any(|end| name.ends_with(end));
    let buffers = graph.args(Role::Weight).filter(|a| is_buffer(&a.name));
    buffers.map(|a| a.ty.shape.elements().as_const().unwrap() as u64).sum()
}

#[test]
fn every_config_has_exactly_the_parameters_that_transformers_counts() {
    let counts = std::fs::read_to_string(fixtures().join("parameters.json")).unwrap();
    let counts: BTreeMap<String, u64> = serde_json::from_str(&counts).unwrap();
    assert_eq!(counts.len(), std::fs::read_dir(fixtures().join("configs")).unwrap().count());
    for (name, count) in counts {
        let model = model(&name);
        assert_eq!(model.parameter_count() - buffers(&model.graph), count, "{name}");
    }
}

/// Holds the configurations of a file to the counts beside them.
fn has_the_counts_of(file: &str, at_least: usize) {
    let text = std::fs::read_to_string(fixtures().join(file)).unwrap();
    let models: BTreeMap<String, serde_json::Value> = serde_json::from_str(&text).unwrap();
    assert!(models.len() >= at_least, "{}", models.len());
    let mut wrong = Vec::new();
    for (name, said) in models {
        let want = said["parameters"].as_u64().unwrap();
        match NetworkConfig::from_json(&name, &said["config"].to_string()) {
            Err(why) => wrong.push(why.to_string()),
            Ok(config) => {
                let network = config.build(&BuildOptions::default()).unwrap_or_else(|e| panic!("{name}: {e}"));
                let counted = network.module().parameter_count() - buffers(&network.module().graph);
                if counted != want {
                    wrong.push(format!("{name} has {counted} parameters instead of {want}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn published_sizes_have_exactly_the_parameters_that_transformers_counts() {
    has_the_counts_of("sizes.json", 20);
}

#[test]
fn configurations_with_all_keys_that_publishers_write_are_read() {
    has_the_counts_of("published.json", 40);
}

#[test]
fn totals_with_correction_biases_are_those_that_the_makers_publish() {
    // The model card of DeepSeek-V3 (671B) and the tensors of Nemotron-3-Nano.
    assert_eq!(model("DeepSeek-V3").parameter_count(), 671_026_419_200);
    assert_eq!(model("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16").parameter_count(), 31_577_940_288);
}

#[test]
fn caches_are_of_their_kinds() {
    let groups = |name: &str| -> Vec<(usize, usize, usize)> {
        model(name).state_groups.iter().map(|g| (g.bytes_per_token, g.bytes_per_sequence, g.heads)).collect()
    };
    assert_eq!(groups("Mixtral-8x7B-v0.1"), [(2 * 32 * 8 * 128 * 2, 0, 8)]);
    // 70,272 bytes a token: 61 rows of 512 + 64 (DeepSeek-V3 report, table 1 of the V2 report for the formula).
    assert_eq!(groups("DeepSeek-V3"), [(61 * 576 * 2, 0, 1)]);
    assert_eq!(groups("Kimi-K2-Instruct"), [(61 * 576 * 2, 0, 1)]);
    // The keys of indexers are a group of their own.
    assert_eq!(groups("DeepSeek-V3.2"), [(61 * 576 * 2, 0, 1), (61 * 128 * 2, 0, 1)]);
    let hybrid = groups("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16");
    // 23 scans of 64 x 64 x 128 states in f32 and 6144 channels of 3 tokens in f32; 6 layers of attention.
    assert_eq!(hybrid, [(2 * 6 * 2 * 128 * 2, 0, 2), (0, 23 * (64 * 64 * 128 + 6144 * 3) * 4, 1)]);
}

/// Matrix FLOPs of one token without any context, halved: the parameters that it multiplies.
fn active(name: &str) -> i128 {
    let mut graph = model(name).module.graph;
    passes::prune(&mut graph, &["next"]).unwrap();
    let mut step = Bindings::new();
    for symbol in [symbols::TOKENS, symbols::SEQS, symbols::TABLE, symbols::BLOCKS] {
        step = step.with(symbol, 1);
    }
    for symbol in [symbols::PAIRS, symbols::CACHED, "pairs_within_2048", "cached_within_2048"] {
        step = step.with(symbol, 0);
    }
    let cost = graph.cost();
    cost.matrix_flops.eval(&with_reached(&cost, step, 1)).unwrap() / 2
}

#[test]
fn a_token_multiplies_the_parameters_that_its_experts_have() {
    // Published: 12.9B of Mixtral (embedding included), 3.3B of Qwen3-30B-A3B, 22B, 37B, 3.2B (without embedding).
    for (name, least, most) in [
        ("Mixtral-8x7B-v0.1", 12.6e9, 12.9e9),
        ("Qwen3-30B-A3B", 3.0e9, 3.4e9),
        ("Qwen3-235B-A22B", 21.0e9, 22.3e9),
        ("DeepSeek-V3", 36.0e9, 37.5e9),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 3.0e9, 3.6e9),
    ] {
        let active = active(name) as f64;
        assert!((least..most).contains(&active), "{name}: {active}");
    }
}

#[test]
fn a_choice_of_experts_that_cannot_be_made_is_refused_by_key() {
    let read = |name: &str| std::fs::read_to_string(fixtures().join(format!("configs/{name}.json"))).unwrap();
    let text = read("Mixtral-8x7B-v0.1");
    let said =
        |from: &str, to: &str| ModelConfig::from_json("c.json", &text.replace(from, to)).unwrap_err().to_string();
    let message = said("\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 9");
    assert!(message.starts_with("c.json: num_experts_per_tok = 9 is above the 8 experts"), "{message}");
    assert!(said("\"vocab_size\"", "\"new_trick\": 1, \"vocab_size\"").contains("unknown key new_trick"));

    let text = read("DeepSeek-V3.2");
    let said =
        |from: &str, to: &str| PlannedConfig::from_json("c.json", &text.replace(from, to)).unwrap_err().to_string();
    let message = said("\"num_experts_per_tok\": 8", "\"num_experts_per_tok\": 129");
    assert!(message.starts_with("c.json: num_experts_per_tok = 129 is above the 128 experts"), "{message}");
    assert!(said("\"vocab_size\"", "\"new_trick\": 1, \"vocab_size\"").contains("unknown key new_trick"));
    assert!(said("\"deepseek_v32\"", "\"deepseek_v4\"").contains("such graphs are those of deepseek_v3, kimi_k2"));
}

#[test]
fn a_planned_op_is_refused_where_it_would_run() {
    let text = std::fs::read_to_string(fixtures().join("configs/DeepSeek-V3.2.json")).unwrap();
    let planned = PlannedConfig::from_json("DeepSeek-V3.2", &text).unwrap();
    let graph = planned.build(&BuildOptions::default()).unwrap().module.graph;
    let why = ridge_runtime::lower(&graph, &["next"], &[]).unwrap_err().to_string();
    assert!(why.contains("latent_attention is for plans alone"), "{why}");
}

#[test]
fn what_runs_is_planned_with_the_same_parameters_in_either_spelling() {
    for file in ["deepseek_v3", "deepseek_v32", "glm_moe_dsa"]
        .into_iter()
        .flat_map(|family| ["config.json", "config_v4.json"].map(|file| format!("{family}/{file}")))
    {
        let file = &*file;
        let text = std::fs::read_to_string(fixtures().join("families").join(file)).unwrap();
        let runs = ModelConfig::from_json(file, &text).unwrap().build(&BuildOptions::default()).unwrap();
        let planned = PlannedConfig::from_json(file, &text).unwrap_or_else(|e| panic!("{e}"));
        let planned = planned.build(&BuildOptions::default()).unwrap();
        assert_eq!(planned.parameter_count(), runs.parameter_count(), "{file}");
    }
}
