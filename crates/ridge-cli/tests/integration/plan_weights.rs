//! `ridge plan` with weights in the formats in which files store them.

use serde_json::Value;

use crate::plan::{json, ridge};

#[test]
fn a_gguf_file_is_planned_in_the_formats_that_it_has() {
    let folder = tempfile::tempdir().unwrap();
    let weights = |file: &str, more: &str| {
        let fit = json(&format!("plan fit {file} --device A100 --context 64 --json{more}"));
        let entries = fit["fit"]["ledger"]["entries"].as_array().unwrap().clone();
        (
            fit["memory"]["weights"].clone(),
            entries.into_iter().find(|e| e["what"] == "weights").unwrap()["bytes"].clone(),
        )
    };
    let model = crate::common::Folder::stories();
    // Rows that are no whole number of blocks, those of `down`, stay at 16 bits.
    for (write, bits) in [("quantize --format q8_0", 8.5..12.0), ("convert --dtype bf16", 16.0..16.1)] {
        let file = folder.path().join(format!("{}.gguf", bits.start)).display().to_string();
        let written = ridge(&format!("{write} {} {file}", model.path()));
        assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
        let (of, bytes) = weights(&file, "");
        assert!(bits.contains(&of["file"]["matrices"].as_f64().unwrap()), "{of}");
        // Norms are f32 in both.
        let stored = json(&format!("inspect {file} --json"))["summary"]["weight_bytes"].as_u64().unwrap();
        let planned = bytes.as_u64().unwrap();
        assert!(planned.abs_diff(stored) <= 1, "{planned} planned, {stored} stored");
        // What is asked for comes first.
        assert_eq!(weights(&file, " --weights q4_k").0["blocks"]["format"], "q4_k");
    }
    let narrow = json("plan fit Qwen3-8B.json --weights q4_k --json");
    let wide = json("plan fit Qwen3-8B.json --json");
    assert_eq!(wide["memory"]["weights"], "bf16");
    assert!(narrow["fit"]["room"].as_f64().unwrap() > wide["fit"]["room"].as_f64().unwrap());
}

#[test]
fn an_output_projection_that_is_stored_is_planned_whatever_the_config_says() {
    let folder = tempfile::tempdir().unwrap();
    let from = crate::common::repository().join("fixtures/families/exaone4");
    std::fs::copy(from.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let untied = std::fs::read_to_string(from.join("config.json")).unwrap();
    let tied = untied.replace("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    assert_ne!(tied, untied);
    std::fs::write(folder.path().join("config.json"), tied).unwrap();
    let path = folder.path().display();
    let stored = json(&format!("inspect {path} --json"))["summary"]["weight_bytes"].as_u64().unwrap();
    let fit = json(&format!("plan fit {path} --device A100 --context 64 --json"));
    let entries = fit["fit"]["ledger"]["entries"].as_array().unwrap();
    let planned = entries.iter().find(|e| e["what"] == "weights").unwrap()["bytes"].as_u64().unwrap();
    assert!(planned.abs_diff(stored) <= 1, "{planned} planned, {stored} stored");
}

#[test]
fn a_limit_of_gpu_memory_keeps_weights_in_host_memory() {
    // A quarter of the layers of Qwen3-30B-A3B, which say the same in a quarter of the time.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    let text =
        std::fs::read_to_string(crate::common::repository().join("fixtures/configs/Qwen3-30B-A3B.json")).unwrap();
    assert!(text.contains("\"num_hidden_layers\": 48"));
    std::fs::write(&path, text.replace("\"num_hidden_layers\": 48", "\"num_hidden_layers\": 12")).unwrap();
    let fit = format!("plan fit {}", path.display());
    let line = format!("{fit} --device H100 --context 1024 --host-link 50GB/s --json");
    let plan = |limit: &str| json(&format!("{line} --gpu-memory {limit}"));
    let number = |value: &Value| value.as_f64().unwrap();
    let (whole, half, least) = (plan("70GiB"), plan("6GiB"), plan("4GiB"));
    assert_eq!(whole["host_weight_bytes"], 0);
    let total = number(&whole["gpu_weight_bytes"]);
    for plan in [&half, &least] {
        assert_eq!(number(&plan["gpu_weight_bytes"]) + number(&plan["host_weight_bytes"]), total);
        let used = ["gpu_weight_bytes", "cache_bytes", "workspace_bytes"].map(|what| number(&plan[what]));
        assert!(used.iter().sum::<f64>() <= number(&plan["gpu_memory"]));
    }
    assert!(number(&half["host_weight_bytes"]) < number(&least["host_weight_bytes"]));
    // The embedding and experts: of 128 of these a token reads 8.
    let names = |plan: &Value| plan["host_weights"].as_array().unwrap().clone();
    assert!(names(&half).iter().all(|n| [".experts.", "embed_tokens"].iter().any(|w| n.as_str().unwrap().contains(w))));
    let embedding = 151_936.0 * 2048.0 * 2.0;
    let step = |plan: &Value, nth: usize| plan["steps"][nth].clone();
    let token = step(&half, 0);
    let expected = (number(&half["host_weight_bytes"]) - embedding) * 8.0 / 128.0;
    assert_eq!(number(&token["host_bytes"]), expected);
    assert_eq!(token["host_bytes"], token["host_bytes_in_place"]);
    assert_eq!((&token["limit"], &step(&whole, 0)["limit"]), (&"host_link".into(), &"memory".into()));
    assert!(number(&token["link_seconds"]) == expected / 50e9 && number(&token["seconds"]) > expected / 50e9);
    // A prompt takes all experts over the link, and copies them.
    let prompt = step(&half, 3);
    assert_eq!(number(&prompt["host_bytes"]), number(&half["host_weight_bytes"]) - embedding);
    assert_eq!(prompt["host_bytes_in_place"], 0);
    let text = String::from_utf8(ridge(&format!("{fit} --gpu-memory 6GiB")).stdout).unwrap();
    assert!(text.contains("of weights (") && text.contains("host link"), "{text}");
    // Caches of more sequences push weights off the GPU, until there is no room for them.
    let line = format!("{fit} --context 16384 --gpu-memory 7GiB");
    let plan = json(&format!("{line} --json"));
    let on_host = |nth: usize| number(&plan["steps"][nth]["host_weight_bytes"]);
    assert_eq!(on_host(0), number(&plan["host_weight_bytes"]));
    assert!(on_host(1) >= on_host(0) + 3.0 * number(&plan["cache_bytes"]) * 0.8, "{} {}", on_host(0), on_host(1));
    assert_eq!((&plan["steps"][1]["fits"], &plan["steps"][2]["fits"]), (&true.into(), &false.into()));
    assert_eq!(on_host(3), on_host(0), "a prompt is one sequence");
    let text = String::from_utf8(ridge(&line).stdout).unwrap();
    assert!(text.lines().any(|line| line.contains("each of 16") && line.contains("does not fit")), "{text}");
}

#[test]
fn a_model_is_planned_in_the_formats_in_which_its_configuration_says_it_is_published() {
    let fit = json("plan fit DeepSeek-V3.json --device H200 --tp 8 --json");
    assert_eq!(fit["fits"], true);
    let stored = &fit["memory"]["weights"]["file"];
    // A byte for each element, 4 more for 128 x 128; routers have 16 bits.
    let bits = |of: &str| stored[of].as_f64().unwrap_or_else(|| panic!("{stored}"));
    assert!((bits("experts") - (8.0 + 32.0 / 16384.0)).abs() < 1e-6, "{stored}");
    assert!((8.0..8.1).contains(&bits("matrices")), "{stored}");
    assert_eq!((bits("ends"), &stored["precision"]), (16.0, &"fp8".into()));
    let said = json("plan fit DeepSeek-V3.json --device H200 --tp 8 --weights fp8 --json");
    let weights = |plan: &Value| {
        let entries = plan["fit"]["ledger"]["entries"].as_array().unwrap();
        let entry = entries.iter().find(|entry| entry["what"] == "weights").unwrap_or_else(|| panic!("{plan}"));
        entry["bytes"].as_f64().unwrap()
    };
    // Published are the projections to latents, too, a byte for each element, of which --weights fp8 converts what ranks divide.
    let latents = 61.0 * 7168.0 * (1536.0 + 576.0);
    assert!(
        (weights(&fit) / (weights(&said) - latents) - 1.0).abs() < 5e-4,
        "{} and {}",
        weights(&fit),
        weights(&said)
    );
    // Products are of 8-bit floats, as with --weights fp8.
    let step = |weights: &str| {
        let serve = json(&format!("plan serve DeepSeek-V3.json --device H200 --tp 8 --batch 32 {weights} --json"));
        serve["point"]["prefill"].as_f64().or(serve["point"]["ttft"].as_f64()).unwrap_or_else(|| panic!("{serve}"))
    };
    assert!((step("") / step("--weights fp8") - 1.0).abs() < 0.01, "{} and {}", step(""), step("--weights fp8"));
    // Degrees that Ridge itself does not run are said to be of others.
    let others = "Ridge runs latent attention on one rank";
    let said = |line: &str| String::from_utf8(ridge(line).stdout).unwrap();
    assert!(said("plan fit DeepSeek-V3.json --device H200 --tp 8").contains(others));
    let least = said("plan fit DeepSeek-V3.json --device H200");
    assert!(least.contains("the smallest sufficient degree is tp 8 (") && least.contains(others), "{least}");
    assert!(!said("plan fit Meta-Llama-3.1-70B.json --device H200 --tp 2").contains(others));
    let wide = ridge("plan fit DeepSeek-V3.json --device H200 --tp 8 --weights bf16");
    assert_eq!(wide.status.code(), Some(3), "{}", String::from_utf8_lossy(&wide.stdout));
}
