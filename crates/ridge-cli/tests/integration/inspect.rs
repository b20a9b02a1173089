//! `ridge inspect`, run as users run it.

use std::time::{Duration, Instant};

use crate::common::{Folder, copy_folder, fixture, json, repository, stdout};

fn config(name: &str) -> String {
    let configs = repository().join("crates/ridge-models/tests/data/configs");
    configs.join(name).display().to_string()
}

#[test]
fn the_embedded_model_in_full() {
    insta::assert_snapshot!(stdout(&["inspect"]));
}

#[test]
fn two_storages_are_told_apart() {
    insta::assert_snapshot!(stdout(&["inspect", "--format", "q8_0", "--cache-dtype", "bf16", "--context", "100"]));
}

#[test]
fn a_configuration_of_405b_is_read_at_once() {
    let started = Instant::now();
    let object = json(&["inspect", &config("Meta-Llama-3.1-405B.json"), "--json", "--cache-dtype", "bf16"]);
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    let summary = &object["summary"];
    assert_eq!(summary["parameters"], 405_853_388_800u64);
    assert_eq!(summary["weight_bytes"], 811_706_777_600u64);
    assert_eq!(summary["kv_bytes_per_token"], 516_096);
    assert!(object["sources"]["weight_bytes"].as_str().unwrap().starts_with("modelled"));
    // 126 layers, keys and values of 8 heads: 128 codes and a scale of 4 bytes each.
    let object = json(&["inspect", &config("Meta-Llama-3.1-405B.json"), "--json", "--cache-dtype", "int8"]);
    assert_eq!(object["summary"]["kv_bytes_per_token"], 126 * 2 * 8 * (128 + 4));
}

#[test]
fn layers_fold_in_the_tree() {
    let text = stdout(&["inspect", &config("Meta-Llama-3.1-8B.json")]);
    assert!(text.contains("  layers.0..31 x32 "), "{text}");
    assert!(text.contains(" 8,030,261,248 "), "{text}");
}

#[test]
fn a_checkpoint_tells_its_own_storage() {
    let model = fixture("bf16_sharded");
    let object = json(&["inspect", "--model", &model, "--json"]);
    assert_eq!(object["summary"]["storage"][0]["name"], "bf16");
    assert_eq!(object["sources"]["weight_bytes"], "exact: as stored in the checkpoint");
}

#[test]
fn a_folder_with_a_configuration_alone_is_enough() {
    let folder = Folder::of_config(&std::fs::read_to_string(config("Meta-Llama-3.1-8B.json")).unwrap());
    assert_eq!(json(&["inspect", folder.path(), "--json"])["summary"]["parameters"], 8_030_261_248u64);
}

#[test]
fn the_graph_is_printed_as_written_and_as_run() {
    let written = stdout(&["inspect", "--graph"]);
    for part in ["fn decoder_layer(", "weight model.embed_tokens.weight", "call decoder_layer(", "-> next: "] {
        assert!(written.contains(part), "{part}");
    }
    let lowered = stdout(&["inspect", "--graph", "--lowered"]);
    assert_eq!(lowered, stdout(&["inspect", "--lowered"]), "which implies --graph");
    assert!(lowered.contains("group ") && !lowered.contains("-> all_logits"), "{lowered}");
}

#[test]
fn both_graphs_are_printed_where_prompts_and_answers_have_one_each() {
    let of = |args: &[&str]| stdout(&[&["inspect", "--lowered", "--format", "q8_0"], args].concat());
    let rounds = |text: &str| text.contains("quantize(");
    let both = of(&["--dtype", "bf16"]);
    if std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|cpu| cpu.contains("amx_int8")) {
        let (prompts, answers) = both.split_once("\n# generated tokens\n").expect("two graphs");
        assert!(prompts.starts_with("# prompt tokens\n"), "{prompts}");
        assert!(!rounds(prompts) && rounds(answers));
        assert!(both.contains(&of(&["--dtype", "bf16", "--activations", "exact"])));
    } else {
        println!("one graph for both: this machine has no AMX");
    }
    assert!(both.ends_with(&of(&["--dtype", "bf16", "--activations", "int8"])));
    // Activations of f32 are faster by codes in prompts too, and matrices that are in no format have nothing to choose.
    assert_eq!(of(&["--dtype", "f32"]), of(&["--dtype", "f32", "--activations", "int8"]));
    assert!(!stdout(&["inspect", "--lowered", "--dtype", "bf16"]).contains("# prompt tokens"));
}

#[test]
fn the_memory_of_a_step_is_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).display().to_string();
    let (object, figure) = (file("step.json"), file("step.svg"));
    stdout(&["inspect", "--memory", &object, "--tokens", "32", "--context", "64"]);
    stdout(&["inspect", "--memory", &figure, "--tokens", "32", "--context", "64"]);
    let text = std::fs::read_to_string(&object).unwrap();
    let read: serde_json::Value = serde_json::from_str(&text).unwrap();
    let workspace = &read["workspace"];
    let number = |value: &serde_json::Value| value.as_u64().expect("a number");
    let values = workspace["values"].as_array().unwrap();
    let launches = number(&read["step"]["launches"]);
    // Values that live at one time do not meet, and the peak is the largest sum of them.
    let live = |at: u64| values.iter().filter(move |v| (number(&v["first"])..=number(&v["last"])).contains(&at));
    let mut peak = (0, 0);
    for at in 0..launches {
        let mut spans: Vec<(u64, u64)> = live(at).map(|v| (number(&v["offset"]), number(&v["bytes"]))).collect();
        spans.sort_unstable();
        assert!(spans.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "launch {at}: {spans:?}");
        assert!(spans.iter().all(|(offset, bytes)| offset + bytes <= number(&workspace["bytes"])));
        let sum = spans.iter().map(|(_, bytes)| bytes).sum();
        if sum > peak.1 {
            peak = (at, sum);
        }
    }
    assert!(peak.1 > 0);
    assert_eq!((number(&workspace["peak"]["launch"]), number(&workspace["peak"]["bytes"])), peak);
    assert!(values.iter().any(|v| v["place"].as_str().unwrap().contains("layers.4")), "calls are told apart");
    let summary: u64 = read["weights"].as_array().unwrap().iter().map(|w| number(&w["bytes"])).sum();
    assert_eq!(summary, number(&json(&["inspect", "--json"])["summary"]["weight_bytes"]));
    assert!(!read["states"].as_array().unwrap().is_empty());
    let svg = std::fs::read_to_string(&figure).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("peak ") && svg.contains("address in the workspace"), "{svg:.500}");
    // Only the two files are there.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);

    let refused = crate::common::ridge(&["inspect", "--memory", &object, "--tokens", "65", "--context", "64"]);
    assert!(refused.code == 2 && refused.stderr.contains("--tokens 65"), "{}", refused.stderr);
    let model = config("Meta-Llama-3.1-8B.json");
    let refused = crate::common::ridge(&["inspect", &model, "--memory", &model]);
    assert!(refused.code == 2 && refused.stderr.contains("is an input of this command"), "{}", refused.stderr);
}

#[test]
fn encoders_classifiers_and_planned_families_are_inspected_too() {
    let family = |name: &str| repository().join("fixtures/families").join(name).display().to_string();
    let bert = json(&["inspect", "--json", &family("bert"), "--context", "10"]);
    assert_eq!((&bert["kind"], &bert["summary"]["parameters"]), (&"encoder".into(), &19_744.into()));
    // Four projections and an MLP for each of 10 tokens in two layers, and two products for each of 100 pairs.
    let flops = 2 * (10 * 2 * (4 * 32 * 32 + 2 * 32 * 48) + 100 * 2 * 2 * 32);
    assert_eq!(bert["summary"]["text"]["matrix_flops"], flops);
    let vit = json(&["inspect", "--json", &family("vit")]);
    assert_eq!((&vit["kind"], &vit["summary"]["parameters"]), (&"image_classifier".into(), &21_765.into()));
    assert_eq!(vit["summary"]["image"], serde_json::json!([3, 24, 24]));
    for (text, expected) in [
        (stdout(&["inspect", &family("bert")]), "One text of 48 tokens"),
        (stdout(&["inspect", &family("vit")]), "10 positions, 5 classes"),
    ] {
        assert!(text.contains(expected), "{text}");
    }
    for name in ["bert", "vit"] {
        assert!(stdout(&["inspect", "--graph", &family(name)]).contains("_layer("));
        assert!(stdout(&["inspect", "--lowered", &family(name)]).contains("ragged_attention"));
        let folder = Folder::of_config("{}");
        let file = folder.file("step.json").display().to_string();
        stdout(&["inspect", &family(name), "--memory", &file]);
        let step: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        assert!(step["workspace"]["bytes"].as_u64().is_some_and(|bytes| bytes > 0));
    }
    let refused = crate::common::ridge(&["inspect", &family("vit"), "--context", "5"]);
    assert!(refused.code == 2 && refused.stderr.contains("classifies images"), "{}", refused.stderr);
    let planned = |name: &str| {
        let config = repository().join("fixtures/configs").join(name).display().to_string();
        json(&["inspect", "--json", &config])["summary"].clone()
    };
    let deepseek = planned("DeepSeek-V3.2.json");
    // 61 layers of a latent of 512 and a rotated key of 64 in bf16, and an indexer's key of 128.
    assert_eq!(deepseek["kv_bytes_per_token"], 61 * 2 * (512 + 64 + 128));
    let hybrid = planned("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.json");
    assert_eq!(
        (&hybrid["parameters"], &hybrid["state_bytes_per_sequence"]),
        (&31_577_940_288_u64.into(), &49_082_368.into())
    );
}

#[test]
fn launches_of_a_step_are_listed_for_a_gpu_that_is_not_there() {
    let count = |name: &str, tokens: &str| {
        let config = crate::common::repository().join("fixtures/families").join(name).join("config.json");
        let listed =
            json(&["inspect", &config.display().to_string(), "--launches", "H100", "--tokens", tokens, "--json"]);
        let launches = listed["launches"].as_array().expect("a list");
        assert_eq!(listed["count"], launches.len());
        assert!(launches.iter().all(|launch| launch["kernel"].is_string() && launch["op"].is_string()), "{listed}");
        // Views are in groups, and none is a launch of its own.
        let views = ["slice", "concat", "transpose", "gather", "pad"];
        let view = launches.iter().find(|launch| views.contains(&launch["op"].as_str().unwrap_or_default()));
        assert!(view.is_none(), "{name}: {view:?}");
        launches.iter().filter(|launch| launch["path"].as_str().is_some_and(|path| path.contains(".layers.1."))).count()
    };
    // From 16 tokens on a recurrence is four launches.
    for (tokens, of_mamba) in [("1", 9), ("24", 12)] {
        assert!(count("mamba2", tokens) <= of_mamba, "{}", count("mamba2", tokens));
        assert!(count("deepseek_v2", tokens) <= 30, "{}", count("deepseek_v2", tokens));
    }
    let refused = crate::common::ridge(&["inspect", "--tokens", "1"]);
    assert!(refused.code == 2 && refused.stderr.contains("--launches"), "{}", refused.stderr);
}

#[test]
fn keys_and_values_of_few_tokens_are_written_by_the_launch_of_their_products() {
    let folder = tempfile::tempdir().unwrap();
    let written = |name: &str, more: &str| {
        let path = folder.path().join(name);
        let config = format!(
            r#"{{"num_hidden_layers": 3, "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24,
            "num_key_value_heads": 8, "vocab_size": 512, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
            "hidden_act": "silu", "tie_word_embeddings": false, "torch_dtype": "bfloat16", {more}}}"#
        );
        std::fs::write(&path, config).unwrap();
        path.display().to_string()
    };
    // The kernels of the second layer, which is not the last, up to its attention, but for norms.
    let kernels = |model: &str, tokens: &str| -> Vec<String> {
        let listed = json(&["inspect", model, "--launches", "H100", "--tokens", tokens, "--json"]);
        let launches = listed["launches"].as_array().expect("a list");
        let of_layer = launches.iter().filter(|l| l["path"].as_str().is_some_and(|path| path.contains(".layers.1.")));
        let names = of_layer.map(|launch| launch["kernel"].as_str().unwrap().to_owned());
        names.filter(|name| name != "rms_norm").take_while(|name| !name.starts_with("attention")).collect()
    };
    let together = [
        config("Meta-Llama-3.1-8B.json"),
        written("qwen2.json", r#""model_type": "qwen2""#),
        // Of 128 elements 96 are rotated.
        written(
            "phi3.json",
            r#""model_type": "phi3", "partial_rotary_factor": 0.75, "pad_token_id": 0, "eos_token_id": 0"#,
        ),
    ];
    // Attention rotates queries on its way, by a table, unless they are normed before.
    let many = ["cublaslt", "cublaslt", "cublaslt", "kv_write", "rotary_table"];
    for model in &together {
        assert_eq!(kernels(model, "1"), ["linear_rows"], "{model}");
        assert_eq!(kernels(model, "16"), ["linear_rows", "rotary_table"], "{model}");
        assert_eq!([kernels(model, "17"), kernels(model, "512")], [many; 2], "{model}");
    }
    // Keys are normed before they are rotated.
    let apart = config("Qwen3-8B.json");
    let many = ["cublaslt", "cublaslt", "cublaslt", "kv_write", "rope"];
    assert_eq!(kernels(&apart, "1"), ["linear_rows", "kv_write"]);
    assert_eq!(kernels(&apart, "16"), ["linear_rows", "kv_write", "rope"]);
    assert_eq!([kernels(&apart, "17"), kernels(&apart, "512")], [many; 2]);
}

#[test]
fn sparse_attention_of_a_gpu_is_by_its_kernels() {
    let config = repository().join("fixtures/families/glm_moe_dsa/config.json").display().to_string();
    let listed = json(&["inspect", &config, "--launches", "H100", "--tokens", "1", "--json"]);
    let launches = listed["launches"].as_array().expect("a list");
    let count = |op: &str| launches.iter().filter(|launch| launch["op"] == op).count();
    // Three layers attend, of which the last takes the selection of the one before it.
    assert_eq!(count("selected_attention"), 3, "{listed}");
    assert_eq!(count("index_topk"), 2 * 2, "{listed}");
}

#[test]
fn dense_modules_are_counted() {
    let fixtures = repository().join("fixtures");
    let folder = tempfile::tempdir().unwrap();
    copy_folder(&fixtures.join("families/bert"), folder.path());
    let model = folder.path().display().to_string();
    let parameters = || json(&["inspect", &model, "--json"])["summary"]["parameters"].as_u64().unwrap();
    let plain = parameters();
    copy_folder(&fixtures.join("sentences/bert"), folder.path());
    assert_eq!(parameters() - plain, (32 + 1) * 24 + (24 + 1) * 20 + 20 * 28 + (28 + 1) * 18 + (18 + 1) * 12);
}

#[test]
fn parameters_of_a_prediction_module_are_counted_apart() {
    let object = json(&["inspect", &config("DeepSeek-V3.json"), "--json"]);
    assert_eq!(object["summary"]["parameters"], 671_026_419_200u64);
    let module = &object["prediction"];
    assert_eq!(module["parameters"], 11_610_068_224u64);
    // One layer's latent of 512 and rotated key of 64 in bf16.
    assert_eq!(module["kv_bytes_per_token"], 2 * (512 + 64));
    // Its layer is published in fp8, but for norms, the router and what joins its inputs.
    let (joins, router, norms) = (2 * 7168 * 7168, 256 * 7168 + 256, 5 * 7168 + 1536 + 512);
    let plain: u64 = joins + router + norms;
    let scales = module["weight_bytes"].as_u64().unwrap() - 2 * plain - (11_610_068_224 - plain);
    // A factor of 4 bytes for 128 x 128, of which the last are not whole in the 576 rows of the latents.
    assert!((11_500_000_000 / 4096..11_520_000_000 / 4096).contains(&scales), "{scales}");
    // The experts that one token takes, and the output projection.
    let flops = module["draft"]["matrix_flops"].as_f64().unwrap();
    assert!((3e9..6e9).contains(&flops), "{flops}");
    let text = stdout(&["inspect", &config("DeepSeek-V3.json")]);
    assert!(text.contains("prediction module") && text.contains("11,610,068,224"), "{text}");
    assert!(json(&["inspect", &config("Meta-Llama-3.1-8B.json"), "--json"]).get("prediction").is_none());
}

#[test]
fn weights_that_the_configuration_says_are_fp8_are_counted_as_such() {
    let published = repository().join("fixtures/configs/DeepSeek-V3.json").display().to_string();
    let text = stdout(&["inspect", &published]);
    let line = |name: &str| text.lines().find(|line| line.contains(name)).unwrap_or_else(|| panic!("{name}: {text}"));
    for name in ["q_a_proj.weight", "kv_b_proj.weight", "down_proj.weight"] {
        assert!(line(name).contains(" f8e4m3_b128<bf16>["), "{text}");
    }
    for name in ["embed_tokens.weight", "lm_head.weight", "input_layernorm.weight", "  weight    "] {
        assert!(line(name).contains("bf16["), "{text}");
    }
    let source = "modelled: in the formats in which the configuration says that it is published";
    assert!(line("weights  ").ends_with(source), "{text}");
    let object = json(&["inspect", &published, "--json"]);
    // Embedding, output projection, norms, routers with their biases: 2 bytes. The rest has a byte, and 4 more for 128 x 128.
    let bytes = object["summary"]["weight_bytes"].as_u64().unwrap();
    assert!((672_900_000_000..673_200_000_000).contains(&bytes), "{bytes}");
    // Layers that are listed keep their dtype.
    let folder = Folder::of_config(&std::fs::read_to_string(&published).unwrap());
    folder.edit("config.json", |text| {
        text.replace("\"quant_method\"", "\"modules_to_not_convert\": [\"o_proj\"], \"quant_method\"")
    });
    let more = json(&["inspect", folder.path(), "--json"])["summary"]["weight_bytes"].as_u64().unwrap();
    let elements = 61 * 7168 * 16384;
    assert_eq!(more - bytes, elements - elements / (128 * 128) * 4);
}
