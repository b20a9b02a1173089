//! Speculation by a model's own prediction module, as users ask for it.

use serde_json::json;

use crate::common::server::Server;
use crate::common::{json, repository, ridge, stdout};

fn model(family: &str) -> String {
    repository().join("fixtures/prediction").join(family).display().to_string()
}

#[test]
fn a_model_that_predicts_generates_the_same_text_and_says_how_many_drafts_were_right() {
    // Latent attention is not cut.
    for (family, ranks) in [("glm4_moe", "2"), ("deepseek_v3", "1"), ("deepseek_v32", "1")] {
        let model = model(family);
        let generate = |more: &[&str]| {
            json(
                &[&["generate", "-m", &model, "--prompt-tokens", "20", "--seed", "3", "-n", "40", "--json"], more]
                    .concat(),
            )
        };
        for sampling in [&["--greedy"][..], &["--temperature", "0.7"]] {
            let plain = generate(sampling);
            assert!(plain["speculation"].is_null());
            for more in [&["--speculate", "mtp"][..], &["--speculate", "mtp:4", "--tp", ranks, "--chunk", "7"]] {
                let drafted = generate(&[sampling, more].concat());
                assert_eq!(drafted["tokens"], plain["tokens"], "{family} {sampling:?} {more:?}");
                let [drafts, accepted] = ["draft_tokens", "accepted_draft_tokens"]
                    .map(|name| drafted["speculation"][name].as_u64().unwrap());
                assert!(accepted > 3 && accepted <= drafts, "{family}: {accepted} of {drafts}");
            }
        }
    }
}

#[test]
fn a_server_whose_model_predicts_answers_as_one_without() {
    let model = model("glm4_moe");
    let ask = |server: &Server, first: u32| {
        let prompt: Vec<u32> = (0..15).map(|i| 3 + (first + i * i) % 45).collect();
        let body = json!({ "prompt": prompt, "max_tokens": 30, "temperature": 0.6, "seed": first });
        let answer = server.post("/v1/completions", &body);
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()["choices"][0]["text"].clone()
    };
    let small = ["--model", &model, "--sequences", "4", "--chunk", "32"];
    let plain = Server::start(&small);
    let drafting = Server::start(&[&small[..], &["--speculate", "mtp:2"]].concat());
    let made = ["ridge:programs_compiled_total", "ridge:buckets_bound_total"];
    let before = made.map(|name| drafting.metric(name));
    for first in 0..6 {
        assert_eq!(ask(&drafting, first), ask(&plain, first), "{first}");
    }
    assert!(drafting.metric("ridge:spec_decode_num_accepted_tokens_total") > 5.0);
    assert_eq!(made.map(|name| drafting.metric(name)), before);
}

#[test]
fn a_benchmark_reports_what_drafts_bring_and_take() {
    let model = model("glm4_moe");
    let bench = |more: &[&str]| {
        let common = ["bench", "-m", &model, "--context", "9", "--prompt", "8", "-n", "24", "--repeat", "2", "--json"];
        json(&[&common[..], more].concat())["results"].clone()
    };
    let plain = bench(&[]);
    assert!(plain[1]["speculation"].is_null());
    for (drafts, batch) in [(1, 1), (3, 1), (2, 3)] {
        let speculate = format!("mtp:{drafts}");
        let results = bench(&["--speculate", &speculate, "--batch", &batch.to_string()]);
        assert!(results[0]["speculation"].is_null(), "prompts are not speculated on");
        let found = &results[1]["speculation"];
        let count = |name: &str| found[name].as_u64().unwrap_or_else(|| panic!("{name}: {found}"));
        let seconds = |name: &str| found[name].as_f64().unwrap_or_else(|| panic!("{name}: {found}"));
        let (steps, accepted) = (count("steps"), count("accepted"));
        // Every token that was not an accepted draft took a row of a step; the model is trained, so many were.
        assert!(accepted > 0 && accepted <= count("proposed"), "{found}");
        let rows = batch * 24 - accepted;
        assert!(steps <= rows && rows <= batch * steps, "{found}");
        assert!((seconds("tokens_per_step") - (batch * 24) as f64 / rows as f64).abs() < 1e-9, "{found}");
        let parts = seconds("verifying_seconds_per_step") + seconds("drafting_seconds_per_step");
        let whole = results[1]["measured"]["median_seconds"].as_f64().unwrap() / steps as f64;
        assert!(parts > 0.3 * whole && parts < 3.0 * whole, "{parts} of {whole}: {found}");
        // Fewer steps than without, of more work each.
        let [drafted, alone] = [&results, &plain].map(|r| r[1]["modelled"]["flops"].as_f64().unwrap());
        assert!(drafted > alone * batch as f64, "{drafted} {alone}");
        assert!(seconds("drafting_floor_seconds_per_step") > 0.0);
    }
    let text = stdout(&["bench", "-m", &model, "-p", "0", "-n", "16", "--repeat", "1", "--speculate", "mtp:2"]);
    assert!(text.contains("tokens per step") && text.contains("drafts accepted; verifying takes"), "{text}");
}

#[test]
fn speculation_that_a_model_or_a_command_lacks_is_refused() {
    let refused = |args: &[&str]| {
        let ran = ridge(args);
        assert_ne!(ran.code, 0, "{args:?}");
        ran.stderr
    };
    assert!(refused(&["generate", "--speculate", "mtp"]).contains("no module that predicts further tokens"));
    assert!(refused(&["bench", "--speculate", "mtp"]).contains("no module that predicts further tokens"));
    assert!(refused(&["bench", "--speculate", "4"]).contains("lookup"));
    assert!(refused(&["bench", "--speculate", "mtp", "--ops"]).contains("cannot be used with"));
    assert!(refused(&["serve", "--speculate", "mtp:2", "--port", "0"]).contains("--speculate"));
    assert!(refused(&["generate", "--speculate", "4"]).contains("lookup"));
    assert!(refused(&["generate", "--speculate", "mtp:0"]).contains("must be a whole number from 0 to 16, mtp"));
    assert!(stdout(&["serve", "-m", &model("glm4_moe"), "--speculate", "mtp", "--dry-run"]).contains("weights"));
}
