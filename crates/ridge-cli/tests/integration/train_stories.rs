//! A model of the size of stories260K, from text to an answer over HTTP.

use serde_json::{Value, json};

use crate::common::server::Server;
use crate::common::{Folder, json as printed_json, repository, ridge, stdout};

const CONFIG: &str = r#"{"model_type": "llama", "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 5,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": 2}"#;

/// The paragraphs of documents of this repository, one a line.
fn corpus() -> String {
    let files = ["ARCHITECTURE.md", "README.md", "docs/training.md", "docs/serving.md"];
    let texts = files.map(|file| std::fs::read_to_string(repository().join(file)).unwrap());
    let paragraphs = texts.iter().flat_map(|text| text.split("\n\n")).filter(|paragraph| paragraph.len() > 40);
    paragraphs.map(|paragraph| json!({ "text": paragraph }).to_string() + "\n").collect()
}

#[test]
fn a_model_of_the_size_of_stories260k_is_trained_exported_and_served() {
    let folder = Folder::of_config(CONFIG);
    folder.write("corpus.jsonl", corpus());
    let at = |name: &str| folder.file(name).display().to_string();
    let stories = repository().join("models/stories260K");
    let tokenizer = stories.display().to_string();
    let ran = ridge(&["data", &at("corpus.jsonl"), "-o", &at("shards"), "--tokenizer", &tokenizer]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);

    folder.write(
        "run.toml",
        format!(
            "[model]\nconfig = {:?}\n[data]\ntrain = [{:?}]\nsequence_length = 64\n[train]\nsteps = 20\nbatch_size = 4\n\
             [optimizer]\nlearning_rate = 1e-2\nwarmup = 5\n[validation]\nevery = 20\n[checkpoint]\nfolder = {:?}\n\
             [log]\nevery = 1\n",
            at("config.json"),
            at("shards"),
            at("run")
        ),
    );
    let printed = stdout(&["train", &at("run.toml"), "-t", "1"]);
    let log = std::fs::read_to_string(folder.file("run/log.jsonl")).unwrap();
    let events: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let losses: Vec<f64> =
        events.iter().filter(|event| event["event"] == "step").map(|event| event["loss"].as_f64().unwrap()).collect();
    // A model that knows nothing has the logarithm of the size of its vocabulary.
    assert!((losses[0] - 512_f64.ln()).abs() < 0.2, "{printed}");
    let validation = events.iter().rfind(|event| event["event"] == "validation").unwrap()["loss"].as_f64().unwrap();
    println!("losses {:.3} {:.3}, validation {validation:.3}", losses[0], losses[19]);
    assert!(validation < 5.0, "it learns which tokens are frequent: {printed}");

    let model = at("run/model");
    let config: Value = serde_json::from_slice(&std::fs::read(folder.file("run/model/config.json")).unwrap()).unwrap();
    assert_eq!((&config["vocab_size"], &config["hidden_size"]), (&json!(512), &json!(64)));
    let parameters = |model: &str| printed_json(&["inspect", model, "--json"])["parameters"].clone();
    assert_eq!(parameters(&model), parameters(&tokenizer), "it has the size of the published model");

    let text = stdout(&["generate", "-m", &model, "The planner", "-n", "12", "--temperature", "0"]);
    let server = Server::start(&["--model", &model]);
    let ask = json!({ "prompt": "The planner", "temperature": 0, "max_tokens": 12 });
    let answer = server.post("/v1/completions", &ask).json();
    assert_eq!(answer["choices"][0]["text"], text.trim_end_matches('\n'), "{answer}");
    assert_eq!(answer["usage"]["completion_tokens"], 12, "{answer}");
}
