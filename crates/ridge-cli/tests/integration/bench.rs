//! `ridge bench`, run as users run it. No speed is asserted.

use crate::common::{fixture, json, repository, ridge, stdout};

#[test]
fn each_test_stands_beside_its_floor() {
    let args = ["--prompt", "8,24", "--generate", "4", "--context", "16", "--batch", "2", "--chunk", "10"];
    let object = json(&[&["bench", "--json", "--repeat", "2"], &args[..]].concat());
    let results = object["results"].as_array().unwrap();
    let names: Vec<&str> = results.iter().map(|r| r["test"].as_str().unwrap()).collect();
    assert_eq!(names, ["pp8 @ d16", "pp24 @ d16", "tg4 @ d16"]);
    for result in results {
        let (measured, modelled) = (&result["measured"], &result["modelled"]);
        assert_eq!(measured["seconds"].as_array().unwrap().len(), 2, "the run that warms up is not among them");
        for (place, name) in [
            (measured, "median_seconds"),
            (measured, "tokens_per_second"),
            (modelled, "floor_seconds"),
            (modelled, "flops"),
            (modelled, "bytes"),
        ] {
            assert!(place[name].as_f64().unwrap() > 0.0, "{name}: {result}");
        }
        assert!(["memory", "compute"].contains(&modelled["limit"].as_str().unwrap()));
    }
    assert_eq!(object["machine"]["memory_read"]["provenance"], "measured");
    assert_eq!((&object["settings"]["batch"], &object["settings"]["context"]), (&2.into(), &16.into()));
}

#[test]
fn models_with_states_of_a_fixed_size_run_and_have_floors() {
    for family in ["mamba2", "lfm2", "qwen3_next"] {
        let folder = format!("{}/../../fixtures/families/{family}", env!("CARGO_MANIFEST_DIR"));
        let sizes = ["--prompt", "8", "--generate", "4", "--repeat", "1", "--batch", "2", "--threads", "1"];
        let object = json(&[&["bench", "--json", "--model", &folder], &sizes[..]].concat());
        let results = object["results"].as_array().unwrap();
        assert!(
            results.len() == 2 && results.iter().all(|r| r["modelled"]["floor_seconds"].as_f64() > Some(0.0)),
            "{family}: {object}"
        );
    }
}

#[test]
fn floors_are_of_products_like_those_of_the_model() {
    let rate = |args: &[&str]| {
        let object = json(&[&["bench", "--json", "--prompt", "4", "--generate", "0", "--repeat", "1"], args].concat());
        object["machine"]["matmul"]["source"].as_str().unwrap().to_owned()
    };
    assert!(rate(&[]).contains("x [1024, 1024] of f32 by"));
    assert!(rate(&["--dtype", "bf16"]).contains("of bf16 by"));
    assert!(rate(&["--format", "q8_0", "--activations", "int8"]).contains("of 8-bit codes by"));
    assert!(rate(&["--format", "q8_0", "--activations", "exact"]).contains("of f32 by"));
}

#[test]
fn a_configuration_is_enough_with_random_weights() {
    let folder = fixture("gqa2_tied");
    let args = ["--random-weights", "--prompt", "0", "--generate", "2", "--repeat", "1"];
    let text = stdout(&[&["bench", "--model", &folder], &args[..]].concat());
    assert!(text.contains("(measured)") && text.contains("floor: modelled"), "{text}");
    assert!(text.contains("\ntg2 ") && !text.contains("\npp"), "{text}");
}

#[test]
fn what_does_not_fit_is_refused_with_its_flag() {
    for (args, said) in [
        (&["--prompt", "513"][..], "--prompt 513: with 0 in the cache"),
        (&["--context", "500", "--generate", "13"], "--generate 13: with 500 in the cache"),
        (&["--context", "512"], "--context 512: leaves no room"),
        (&["--prompt", "0", "--generate", "0"], "leave no test to run"),
    ] {
        let ran = ridge(&[&["bench"], args].concat());
        assert_eq!(ran.code, 2, "{}", ran.stderr);
        assert!(ran.stderr.contains(said), "{}", ran.stderr);
    }
}

#[test]
fn each_op_is_timed_and_held_against_its_floor() {
    let made = json(&["bench", "--json", "--ops", "--prompt", "8", "--generate", "4", "--repeat", "3"]);
    for result in made["results"].as_array().expect("tests") {
        let ops = result["ops"].as_array().expect("ops");
        let sum = |part: &str, what: &str| ops.iter().map(|op| op[part][what].as_f64().expect("a number")).sum::<f64>();
        assert!((sum("measured", "share") - 1.0).abs() < 1e-9);
        assert!(ops.iter().all(|op| op["measured"]["seconds"].as_f64() >= Some(0.0)));
        // Five layers, each with one attention.
        let attention = ops.iter().find(|op| op["op"] == "attention").expect("it attends");
        assert_eq!(attention["launches"], 5);
        // A prompt of one chunk is one step: its ops' work is the test's.
        if result["kind"] == "prompt" {
            assert!((sum("modelled", "flops") - result["modelled"]["flops"].as_f64().expect("a number")).abs() < 0.5);
            assert!((sum("modelled", "bytes") - result["modelled"]["bytes"].as_f64().expect("a number")).abs() < 0.5);
        }
    }
    assert!(
        json(&["bench", "--json", "--prompt", "8", "--generate", "0", "--repeat", "1"])["results"][0]["ops"].is_null()
    );
    let shown = stdout(&["bench", "--ops", "--prompt", "0", "--generate", "4", "--repeat", "3"]);
    assert!(shown.contains("last step of tg4") && shown.contains("linear_swiglu"), "{shown}");
}

#[test]
fn a_calibration_is_what_plans_of_this_machine_read() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("this.toml").display().to_string();
    let model = repository().join("models/stories260K").display().to_string();
    let common = ["--prompt", "64", "--generate", "4", "--repeat", "2", "--threads", "1"];
    stdout(&[&["bench", "--model", &model, "--calibrate", &file], &common[..]].concat());
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.contains("[[measured]]") && text.contains("op = \"attention\""), "{text}");
    let plan = |file: &str| {
        let traffic = ["--prompt", "64", "--answer", "8", "--batch", "1", "--json"];
        ridge(&[&["plan", "serve", &model, "--device", "cpu", "--efficiency", file], &traffic[..]].concat())
    };
    let planned: serde_json::Value = serde_json::from_str(&plan(&file).stdout).unwrap();
    assert_eq!(planned["sources"]["device"], "measured");
    assert!(planned["sources"]["efficiencies"].as_str().unwrap().starts_with("measured by ridge bench --calibrate"));
    // A step of a model of a megabyte is the host's time.
    assert!((1e-4..1e-1).contains(&planned["point"]["decode_step"].as_f64().unwrap()), "{planned}");

    let bad = |from: &str, to: &str, said: &str| {
        let other = folder.path().join("bad.toml").display().to_string();
        std::fs::write(&other, text.replacen(from, to, 1)).unwrap();
        let ran = plan(&other);
        assert!(ran.code != 0 && ran.stderr.contains(said), "{}", ran.stderr);
    };
    bad("scores = ", "scores = 7 #", "has scores = 7 for cpu, which is not a share");
    bad("[[device]]", "[[devices]]", "unknown field");
    bad("source = \"measured\"", "source = \"heard\"", "heard");
    bad("name = \"cpu\"", "name = \"gpu\"", "no specification sheet for the device \"cpu\"");
    assert!(plan("nowhere.toml").stderr.contains("--efficiency nowhere.toml: cannot be read"));
}

#[test]
fn several_batches_are_measured_one_after_another() {
    let args = ["bench", "--batch", "1,2,4", "--prompt", "16", "--generate", "4", "--repeat", "1", "--threads", "1"];
    let text = stdout(&args);
    for test in ["pp16 x 1 ", "pp16 x 4 ", "tg4 x 2 ", "first token", "generation: "] {
        assert!(text.contains(test), "{test}: {text}");
    }
    let object = json(&[&args[..], &["--json"]].concat());
    assert_eq!(object["settings"]["batch"].as_array().map(Vec::len), Some(3));
    let batches: Vec<u64> =
        object["results"].as_array().unwrap().iter().map(|r| r["batch"].as_u64().unwrap()).collect();
    assert_eq!(batches, [1, 2, 4, 1, 2, 4]);
}

#[test]
fn experts_are_measured_by_batch_and_by_how_their_products_are_shaped() {
    let mixtral = repository().join("fixtures/families/mixtral");
    let args = ["bench", "--experts", "--model", mixtral.to_str().unwrap(), "--batch", "1,16", "--repeat", "2"];
    let object = json(&[&args[..], &["--json"]].concat());
    let results = object["results"].as_array().unwrap();
    assert_eq!((&object["experts"], &object["experts_of_token"], results.len()), (&4.into(), &2.into(), 2));
    for (result, tokens) in results.iter().zip([1.0, 16.0]) {
        let number = |name: &str| result[name].as_f64().unwrap();
        assert_eq!(number("tokens"), tokens);
        assert!((0.0..=1.0).contains(&number("entropy")) && number("max_load") >= 1.0, "{result}");
        // Each of the four has as many rows as the largest load, of two choices for each token.
        let rows = 4.0 * number("padded_rows_of_expert") / (2.0 * tokens);
        assert!((number("padded_rows_over_grouped") - rows).abs() < 1e-9, "{result}");
        for kind in ["grouped", "padded"] {
            assert_eq!(result[kind]["seconds"].as_array().unwrap().len(), 2, "{result}");
            assert!(result[kind]["tokens_per_second"].as_f64().unwrap() > 0.0, "{result}");
        }
    }
    // One token has two experts in each layer.
    assert_eq!(results[0]["experts_reached"], 2.0);
    let text = stdout(&args);
    assert!(text.contains("2 of 4 experts a token") && text.contains("grouped tok/s"), "{text}");
    let ran = ridge(&["bench", "--experts"]);
    assert!(ran.code == 2 && ran.stderr.contains("is not a model with routed experts"), "{}", ran.stderr);
    assert_eq!(ridge(&["bench", "--experts", "--prompt", "4"]).code, 2);
}
