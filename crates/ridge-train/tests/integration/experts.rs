//! Routing in training: beside torch and transformers (`fixtures/routing.py`), what is refused, and alarms.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ridge_train::LayerUse;
use ridge_train::log::TrainEvent;
use ridge_train::settings::{Settings, read_settings};
use serde::Deserialize;

use crate::common::{Ran, folder, run, settings as small_settings};

/// What a kind of routing came to in torch.
#[derive(Deserialize)]
struct Reference {
    model: String,
    f64: Vec<f64>,
    f32: Vec<f64>,
    /// By step, layer and expert.
    load: Vec<Vec<Vec<f64>>>,
    /// By step and layer.
    dropped: Vec<Vec<f64>>,
}

/// That of `fixtures/trajectories.py`, which `fixtures/routing.py` takes over.
const TEXT: &str = "how much wood would a woodchuck chuck";

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

fn references() -> BTreeMap<String, Reference> {
    let text = std::fs::read_to_string(fixtures().join("routing.json")).expect("is committed");
    serde_json::from_str(&text).expect("is JSON")
}

/// The run of the script with these keys.
fn settings(dir: &Path, model: &str, keys: &[(&str, &str)]) -> Settings {
    let text = dir.join("text.txt");
    std::fs::write(&text, TEXT).expect("writes");
    let toml = format!(
        "[model]\nfrom = {:?}\n[data]\ntrain = [{text:?}]\nvocabulary = \"characters\"\nsequence_length = {}\n\
         validation_fraction = 0\n[train]\nbatch_size = 1\nsteps = 20\nclip = 0\n\
         [optimizer]\nlearning_rate = 1e-3\nschedule = \"constant\"\n[validation]\nevery = 0\n\
         [checkpoint]\nfolder = {:?}\nevery = 0\nexport = false\n[log]\nevery = 1\ntensorboard = true\n",
        fixtures().join("families").join(model),
        TEXT.len() - 1,
        dir.join("run")
    );
    let keys: Vec<_> = keys.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    read_settings("test.toml", &toml, &keys).unwrap_or_else(|e| panic!("{e}"))
}

fn uses(ran: &Ran) -> Vec<Vec<LayerUse>> {
    let layers = |event: &TrainEvent| match event {
        TrainEvent::Experts { layers, .. } => Some(layers.clone()),
        _ => None,
    };
    ran.events.iter().filter_map(layers).collect()
}

fn apart(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// Twenty steps with `keys` have the losses of torch, and in each the loads and drops.
fn is_as_in_torch(kind: &str, keys: &[(&str, &str)]) {
    let reference = &references()[kind];
    let dir = tempfile::tempdir().expect("is made");
    let ran = run(&settings(dir.path(), &reference.model, keys));
    ran.end.as_ref().unwrap_or_else(|e| panic!("{kind}: {e}"));
    let (ours, theirs) = (apart(&ran.losses(), &reference.f64), apart(&reference.f32, &reference.f64));
    println!("{kind}: {ours:.1e} from f64, torch {theirs:.1e}");
    let fall = reference.f64[0] - reference.f64[19];
    assert!(ours <= (2.0 * theirs).max(1e-5 * fall), "{kind}: {ours:.1e} from f64, torch {theirs:.1e}");
    let uses = uses(&ran);
    assert_eq!(uses.len(), reference.load.len());
    for (step, (used, loads)) in uses.iter().zip(&reference.load).enumerate() {
        assert_eq!(used.len(), loads.len());
        for (layer, (used, load)) in used.iter().zip(loads).enumerate() {
            let at = format!("{kind}, step {step}, {}", used.layer);
            let total: f64 = load.iter().sum();
            let entropy: f64 = load.iter().filter(|n| **n > 0.0).map(|n| -(n / total) * (n / total).ln()).sum();
            assert!((used.entropy - entropy / (load.len() as f64).ln()).abs() < 1e-12, "{at}");
            let largest = load.iter().copied().fold(0.0, f64::max) * load.len() as f64 / total;
            assert!((used.max_load - largest).abs() < 1e-12, "{at}: {} and {largest}", used.max_load);
            assert_eq!(used.dead, load.iter().filter(|n| **n == 0.0).count(), "{at}");
            // Two of four experts a token in all of these; where experts choose, tokens are left out whole.
            let tokens = (TEXT.len() - 1) as f64;
            let choices = if kind == "expert_choice" { tokens } else { 2.0 * tokens };
            assert!((used.dropped * choices - reference.dropped[step][layer]).abs() < 1e-9, "{at}: {}", used.dropped);
        }
    }
}

#[test]
fn a_balancing_loss_is_that_of_transformers() {
    is_as_in_torch("balance", &[("experts.router_aux_loss_coef", "0.05")]);
}

#[test]
fn a_router_z_loss_is_that_of_transformers() {
    is_as_in_torch("z", &[("experts.router_z_loss_coef", "0.02")]);
}

#[test]
fn experts_drop_tokens_beyond_their_capacity_as_in_torch() {
    is_as_in_torch("capacity", &[("experts.routing", "capacity"), ("experts.capacity_factor", "0.75")]);
}

#[test]
fn experts_choose_tokens_as_in_torch() {
    is_as_in_torch("expert_choice", &[("experts.routing", "expert_choice"), ("experts.capacity_factor", "0.75")]);
}

#[test]
fn biases_follow_the_load_as_in_torch() {
    is_as_in_torch("bias", &[("experts.bias_update_speed", "0.05")]);
}

#[test]
fn what_a_model_lacks_is_refused_by_name() {
    let dir = folder();
    let refused = |model: &str, keys: &[(&str, &str)]| match model {
        "llama" => run(&small_settings(dir.path(), "llama.json", keys)).end.expect_err("has no experts").to_string(),
        _ => run(&settings(dir.path(), model, keys)).end.expect_err("is refused").to_string(),
    };
    let none = "is for models with routed experts, and this llama has none; remove the key";
    for (key, value) in [
        ("experts.router_aux_loss_coef", "0.5"),
        ("experts.router_z_loss_coef", "0.5"),
        ("experts.bias_update_speed", "0.5"),
        ("experts.routing", "capacity"),
        ("experts.routing", "expert_choice"),
    ] {
        assert_eq!(refused("llama", &[(key, value)]), format!("{key} = {value}: {none}"));
    }
    let error = refused("mixtral", &[("experts.bias_update_speed", "0.001")]);
    let why = "experts.bias_update_speed = 0.001: needs a router with a bias for the choice, and model.layers.0 of this mixtral";
    assert!(error.starts_with(why), "{error}");
    // Llama 4 multiplies what goes into an expert by the token's weight for it.
    let text = std::fs::read_to_string(fixtures().join("families/llama4/config.json")).expect("is there");
    let mut llama4: serde_json::Value = serde_json::from_str(&text).expect("is JSON");
    llama4["layer_types"] =
        vec!["full_attention"; llama4["num_hidden_layers"].as_u64().expect("has layers") as usize].into();
    std::fs::write(dir.path().join("llama4.json"), llama4.to_string()).expect("writes");
    let choice = [("experts.routing", "expert_choice")];
    let error = run(&small_settings(dir.path(), "llama4.json", &choice)).end.expect_err("weighs inputs").to_string();
    assert!(error.contains("experts cannot choose"), "{error}");
    // Experts are used evenly or not at all where there are none.
    assert!(uses(&run(&small_settings(dir.path(), "llama.json", &[("experts.collapse", "0.9")]))).is_empty());
}

#[test]
fn settings_that_contradict_each_other_are_errors() {
    let error = |keys: &[(&str, &str)]| {
        let text = "[model]\nconfig = \"c.json\"\n[data]\ntrain = [\"a.txt\"]\n";
        let keys: Vec<_> = keys.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        read_settings("c.toml", text, &keys).expect_err("is refused").to_string()
    };
    let expert_choice = ("experts.routing", "expert_choice");
    assert!(error(&[("experts.capacity_factor", "2")]).starts_with("experts.capacity_factor = 2: has no effect on"));
    for key in ["experts.router_aux_loss_coef", "experts.bias_update_speed"] {
        let message = error(&[expert_choice, (key, "0.1")]);
        assert!(message.starts_with(&format!("{key} = 0.1: cannot go with routing = expert_choice")), "{message}");
        assert!(error(&[(key, "-1")]).ends_with("must be 0 or more"));
    }
    assert!(error(&[("experts.capacity_factor", "0")]).ends_with("must be above 0"));
    assert!(error(&[("experts.collapse", "1")]).ends_with("must be at least 0 and below 1"));
    assert!(error(&[("experts.routing", "top2")]).contains("expert_choice"));
}

#[test]
fn a_layer_that_collapses_raises_one_alarm_and_logs_tell_of_experts() {
    let dir = tempfile::tempdir().expect("is made");
    let alarms = |keys: &[(&str, &str)]| {
        let _ = std::fs::remove_dir_all(dir.path().join("run"));
        let ran = run(&settings(dir.path(), "mixtral", keys));
        let alarms = ran.events.iter().filter_map(|event| match event {
            TrainEvent::ExpertCollapse { used, .. } => Some(used.layer.clone()),
            _ => None,
        });
        let low = uses(&ran).iter().filter(|layers| layers.iter().all(|used| used.collapsed)).count();
        (alarms.collect::<Vec<_>>(), low)
    };
    // No layer of it is that even in any step.
    let (layers, steps) = alarms(&[("experts.collapse", "0.9999")]);
    assert_eq!(steps, 20);
    assert_eq!(layers, ["model.layers.0", "model.layers.1"]);
    assert_eq!(alarms(&[("experts.collapse", "0")]), (Vec::new(), 0));
    let log = std::fs::read_to_string(dir.path().join("run/log.jsonl")).expect("is there");
    let lines = log.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("is JSON"));
    let experts: Vec<_> = lines.filter(|line| line["event"] == "experts").collect();
    assert_eq!(experts.len(), 20);
    assert!(experts[3]["layers"][1]["entropy"].as_f64().is_some_and(|entropy| entropy > 0.0 && entropy < 1.0));
    let events = std::fs::read_dir(dir.path().join("run/tensorboard")).expect("is there").next().expect("has a file");
    let bytes = std::fs::read(events.expect("reads").path()).expect("reads");
    for tag in ["experts/model.layers.1/entropy", "experts/model.layers.0/max_load", "experts/model.layers.0/dead"] {
        assert!(bytes.windows(tag.len()).any(|part| part == tag.as_bytes()), "{tag}");
    }
}

#[test]
fn micro_batches_are_routed_apart_and_counted_together() {
    let dir = folder();
    let mixtral = r#"{"model_type": "mixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 1,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false}"#;
    std::fs::write(dir.path().join("mixtral.json"), mixtral).expect("writes");
    for routing in ["top_k", "capacity", "expert_choice"] {
        let keys =
            [("experts.routing", routing), ("train.accumulation", "3"), ("model.dropout", "0.1"), ("log.every", "4")];
        let _ = std::fs::remove_dir_all(dir.path().join("run"));
        let ran = run(&small_settings(dir.path(), "mixtral.json", &keys));
        ran.end.as_ref().unwrap_or_else(|e| panic!("{routing}: {e}"));
        let losses = ran.losses();
        assert!(losses[losses.len() - 1] < losses[0], "{routing}: {losses:?}");
        for used in uses(&ran).concat() {
            assert!(used.entropy <= 1.0 && used.dropped < 1.0, "{routing}: {used:?}");
            match routing {
                "top_k" => assert_eq!(used.dropped, 0.0),
                // Each expert takes its number in each micro-batch.
                "expert_choice" => assert_eq!((used.entropy, used.max_load, used.dead), (1.0, 1.0, 0)),
                _ => {}
            }
        }
    }
}
