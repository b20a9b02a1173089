//! `ridge inspect` and `ridge plan` of configurations of quantised checkpoints as they are published: all count the same bytes, or
//! refuse them for the same key.

use serde_json::{Value, json};

use crate::common::Folder;
use crate::plan::{json as json_of, ridge};

/// How compressed-tensors describes one side of a product.
fn side(bits: usize, kind: &str, strategy: &str, dynamic: bool) -> Value {
    json!({"actorder": null, "block_structure": null, "dynamic": dynamic,
           "group_size": if strategy == "group" { json!(128) } else { Value::Null }, "num_bits": bits,
           "observer": if dynamic { "memoryless" } else { "minmax" }, "observer_kwargs": {}, "strategy": strategy,
           "symmetric": true, "type": kind})
}

fn compressed(format: &str, weights: Value, activations: Value) -> Value {
    json!({"config_groups": {"group_0": {"input_activations": activations, "output_activations": null,
                                         "targets": ["Linear"], "weights": weights}},
           "format": format, "global_compression_ratio": 1.239_290_8, "ignore": ["lm_head"], "kv_cache_scheme": null,
           "quant_method": "compressed-tensors", "quantization_status": "frozen"})
}

/// A configuration of the fixtures with this `quantization_config`, in a folder.
fn published(model: &str, quantization: &Value) -> (tempfile::TempDir, String) {
    let from = crate::common::repository().join(format!("fixtures/configs/{model}.json"));
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(from).unwrap()).unwrap();
    config["quantization_config"] = quantization.clone();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    std::fs::write(&path, config.to_string()).unwrap();
    let path = path.display().to_string();
    (folder, path)
}

fn planned_weights(path: &str) -> (u64, Value) {
    let fit = json_of(&format!("plan fit {path} --device H200 --tp 1 --context 1024 --json"));
    let entries = fit["fit"]["ledger"]["entries"].as_array().unwrap();
    let bytes = entries.iter().find(|entry| entry["what"] == "weights").unwrap()["bytes"].as_u64().unwrap();
    (bytes, fit["memory"]["weights"]["file"]["precision"].clone())
}

#[test]
fn published_8_bit_checkpoints_take_the_same_bytes_everywhere() {
    // Of each of 32 layers the rows of its matrices, and their elements.
    let (hidden, kv, mlp) = (4096, 1024, 14336);
    let rows: u64 = 32 * (2 * hidden + 2 * kv + 2 * mlp + hidden);
    let elements: u64 = 32 * (2 * hidden * hidden + 2 * kv * hidden + 3 * hidden * mlp);
    let (ends, norms) = (2 * 128_256 * hidden * 2, 65 * hidden * 2);
    let in_rows = elements + 4 * rows + ends + norms;
    let in_blocks = elements + elements / 16384 * 4 + ends + norms;
    let dynamic = |kind| side(8, kind, "token", true);
    let fixed = side(8, "float", "tensor", false);
    for (name, quantization, bytes, precision) in [
        ("Llama-3.1-8B-Instruct-FP8", compressed("float-quantized", fixed.clone(), fixed), in_rows, json!("fp8")),
        (
            "Llama-3.1-8B-Instruct-FP8-dynamic",
            compressed("float-quantized", side(8, "float", "channel", false), dynamic("float")),
            in_rows,
            json!("fp8"),
        ),
        (
            "Llama-3.1-8B-Instruct-quantized.w8a8",
            compressed("int-quantized", side(8, "int", "channel", false), dynamic("int")),
            in_rows,
            json!("int8"),
        ),
        // As AutoFP8 wrote them, and with a null for blocks.
        (
            "Llama-3-8B-Instruct-FP8",
            json!({"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"}),
            in_rows,
            json!("fp8"),
        ),
        (
            "a scale for each tensor",
            json!({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": null}),
            in_rows,
            json!("fp8"),
        ),
        (
            "blocks",
            json!({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}),
            in_blocks,
            json!("fp8"),
        ),
        ("no keys", json!({}), 2 * elements + ends + norms, Value::Null),
    ] {
        let (_folder, path) = published("Meta-Llama-3.1-8B", &quantization);
        assert_eq!(json_of(&format!("inspect {path} --json"))["summary"]["weight_bytes"], bytes, "{name}");
        let (planned, multiplied) = planned_weights(&path);
        assert!(planned.abs_diff(bytes) <= 1 << 20, "{name}: {planned} planned, {bytes} stored");
        assert_eq!(multiplied, precision, "{name}");
        // A GPU without products of fp8 holds them, too.
        json_of(&format!("plan fit {path} --device A100 --context 1024 --json"));
        let limited = json_of(&format!("plan fit {path} --device H200 --gpu-memory 40GiB --context 1024 --json"));
        assert_eq!((&limited["gpu_weight_bytes"], &limited["host_weight_bytes"]), (&bytes.into(), &0.into()), "{name}");
    }
}

#[test]
fn lists_of_modules_that_are_not_converted_count_everywhere() {
    // As Qwen3-30B-A3B-Instruct-2507-FP8 lists them.
    let of_layer = |layer: usize| {
        ["input_layernorm", "mlp.gate", "post_attention_layernorm"].map(|name| format!("model.layers.{layer}.{name}"))
    };
    let plain: Vec<String> = ["lm_head".to_owned()].into_iter().chain((0..48).flat_map(of_layer)).collect();
    let blocks = json!({"activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": plain,
                        "quant_method": "fp8", "weight_block_size": [128, 128]});
    let (_folder, path) = published("Qwen3-30B-A3B", &blocks);
    let inspected = json_of(&format!("inspect {path} --json"));
    let summary = &inspected["summary"];
    let bytes = summary["weight_bytes"].as_u64().unwrap();
    let stored = |name: &str| {
        let mut all = summary["storage"].as_array().unwrap().iter();
        all.find(|s| s["name"].as_str().unwrap().starts_with(name)).unwrap()["parameters"].as_u64().unwrap()
    };
    // All but embedding, head, routers and norms.
    let plain = 2 * 151_936 * 2048 + 48 * (128 * 2048 + 2 * 2048 + 2 * 128) + 2048;
    assert_eq!((stored("bf16"), stored("f8e4m3_b128")), (plain, summary["parameters"].as_u64().unwrap() - plain));
    let (planned, precision) = planned_weights(&path);
    assert!(planned.abs_diff(bytes) <= 1 << 20, "{planned} planned, {bytes} stored");
    assert_eq!(precision, "fp8");
}

#[test]
fn checkpoints_of_4_bits_take_the_same_bytes_everywhere() {
    let packed = compressed("pack-quantized", side(4, "int", "group", false), Value::Null);
    let gptq = json!({"bits": 4, "desc_act": false, "group_size": 128, "quant_method": "gptq", "sym": true});
    let awq = json!({"bits": 4, "group_size": 128, "quant_method": "awq", "version": "gemm", "zero_point": true});
    let elements: u64 = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336);
    let plain = 2 * (2 * 128_256 * 4096 + 65 * 4096);
    for (quantization, block) in [(packed, 18), (gptq, 18), (awq, 20)] {
        let (_folder, path) = published("Meta-Llama-3.1-8B", &quantization);
        let bytes = json_of(&format!("inspect {path} --json"))["summary"]["weight_bytes"].as_u64().unwrap();
        assert_eq!(bytes, elements / 32 * block + plain, "{quantization}");
        let (planned, _) = planned_weights(&path);
        assert!(planned.abs_diff(bytes) <= 1 << 20, "{quantization}: {planned} planned, {bytes} stored");
    }
}

#[test]
fn tensors_that_are_at_hand_are_counted_rather_than_what_the_configuration_says() {
    // A model of which all tensors were left plain.
    let folder = Folder::stories();
    let awq = json!({"bits": 4, "group_size": 64, "quant_method": "awq", "version": "gemm", "zero_point": true});
    folder.edit("config.json", |text| {
        let mut config: Value = serde_json::from_str(&text).unwrap();
        config["quantization_config"] = awq;
        config.to_string()
    });
    let stored = json_of(&format!("inspect {} --json", folder.path()))["summary"]["weight_bytes"].as_u64().unwrap();
    let planned = |path: &str| {
        let fit = json_of(&format!("plan fit {path} --device A100 --context 64 --json"));
        let entries = fit["fit"]["ledger"]["entries"].as_array().unwrap();
        entries.iter().find(|entry| entry["what"] == "weights").unwrap()["bytes"].as_u64().unwrap()
    };
    assert!(planned(folder.path()).abs_diff(stored) <= 1, "{} planned, {stored} stored", planned(folder.path()));
    let limited = json_of(&format!("plan fit {} --device A100 --gpu-memory 1GiB --context 64 --json", folder.path()));
    assert_eq!(limited["gpu_weight_bytes"], stored);
    // The configuration alone has nothing else to go by, nor has a folder whose files are not those of the model.
    let by_config = planned(&folder.file("config.json").display().to_string());
    assert!(by_config < stored, "{by_config}");
    folder.write("model.safetensors", "version https://git-lfs.github.com/spec/v1\n");
    assert_eq!(planned(folder.path()), by_config);
    let ran = ridge(&format!("plan fit {} --device A100", folder.path()));
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(said.contains("because their files cannot be counted") && said.contains("model.safetensors"), "{said}");
}

#[test]
fn a_format_that_is_asked_for_replaces_one_that_is_not_supported() {
    let (_folder, path) = published("Meta-Llama-3.1-8B", &json!({"quant_method": "hqq"}));
    let int4 = |path: &str| json_of(&format!("plan fit {path} --device H100 --weights int4 --json"))["fit"].clone();
    assert_eq!(int4(&path), int4("Meta-Llama-3.1-8B.json"));
    json_of(&format!("plan train {path} --gpus 8 --top 1 --json"));
    let said = String::from_utf8_lossy(&ridge(&format!("plan fit {path} --device H100")).stderr).into_owned();
    // Errors name the file as it was given.
    assert!(said.contains(&format!("{path}: quantization_config.quant_method")), "{said}");
    assert!(said.contains("--weights FORMAT") && !said.contains("caused by"), "{said}");
}

#[test]
fn checkpoints_that_cannot_be_loaded_are_refused_by_the_key() {
    let int8 = compressed("pack-quantized", side(8, "int", "group", false), Value::Null);
    let gptq = json!({"bits": 4, "damp_percent": 0.01, "desc_act": true, "group_size": 128, "quant_method": "gptq", "sym": true});
    for (quantization, key) in [
        (int8, "quantization_config.config_groups"),
        (gptq, "quantization_config.desc_act"),
        (json!({"quant_method": "hqq"}), "quantization_config.quant_method = \"hqq\""),
    ] {
        let (_folder, path) = published("Meta-Llama-3.1-8B", &quantization);
        for line in ["inspect", "plan fit --device H100", "plan fit --device H100 --gpu-memory 40GiB"] {
            let output = ridge(&format!("{line} {path}"));
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success() && said.contains(key), "{line}: {said}");
        }
    }
}

#[test]
fn codes_of_8_bits_make_a_step_faster_than_16_bits() {
    let blocks =
        json!({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]});
    let int8 = compressed("int-quantized", side(8, "int", "channel", false), side(8, "int", "token", true));
    let steps = |quantization: &Value| {
        let (_folder, path) = published("Meta-Llama-3.1-8B", quantization);
        let plan = json_of(&format!("plan fit {path} --device H100 --gpu-memory 40GiB --context 4096 --json"));
        let seconds = |nth: usize| plan["steps"][nth]["seconds"].as_f64().unwrap();
        // Of one token, and of a prompt.
        [seconds(0), seconds(3)]
    };
    let wide = steps(&json!({}));
    for quantization in [blocks, int8] {
        let narrow = steps(&quantization);
        for (narrow, wide) in narrow.into_iter().zip(wide) {
            assert!((0.4..0.85).contains(&(narrow / wide)), "{narrow} s and {wide} s: {quantization}");
        }
    }
}
