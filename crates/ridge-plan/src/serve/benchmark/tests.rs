//! Simulated benchmarks against what follows from their steps.

use super::*;

use ridge_hw::spec::Precision;

/// A server that adds nothing, and one that keeps room for whole answers.
fn plain(reserves: bool) -> Software {
    Software { name: "plain".into(), version: String::new(), step_ms: 0.0, request_ms: 0.0, rounds: 1, reserves }
}

fn load(batch: usize, rounds: usize) -> ClosedLoop {
    let traffic = Traffic { prompt: 1024, answer: 64, batch };
    ClosedLoop { traffic, shortest: 1.0, rounds, step_tokens: 8192, cache_tokens: 1e9, hold: None }
}

fn played(load: &ClosedLoop, software: &Software) -> ClientLatency {
    let reading = crate::accuracy::tests::reading("Meta-Llama-3.1-8B");
    let machine = Machine::find("H100", Precision::Bf16).unwrap().in_a_server();
    let l = ServeLayout {
        tp: 1,
        pp: 1,
        attention_dp: 1,
        ep: 1,
        weights: crate::ledger::Quantisation::Bf16,
        cache_bytes: 2.0,
        speculation: None,
    };
    benchmark(&reading, &machine, &l, load, software)
}

#[test]
fn one_client_sees_its_prompt_and_then_steps_of_one_answer() {
    let reading = crate::accuracy::tests::reading("Meta-Llama-3.1-8B");
    let machine = Machine::find("H100", Precision::Bf16).unwrap().in_a_server();
    let weights = crate::ledger::Quantisation::Bf16;
    let l = ServeLayout { tp: 1, pp: 1, attention_dp: 1, ep: 1, weights, cache_bytes: 2.0, speculation: None };
    let seen = benchmark(&reading, &machine, &l, &load(1, 3), &plain(false));
    let host = super::super::point::HOST;
    let prompt = super::super::prefill(&reading, &machine, &l, 1024) - host;
    let step = super::super::decode_step(&reading, &machine, &l, 1, 1024 + 32) - host;
    assert!((seen.ttft / prompt - 1.0).abs() < 1e-3, "{} {prompt}", seen.ttft);
    assert!((seen.tpot / step - 1.0).abs() < 1e-2, "{} {step}", seen.tpot);
    let rate = 64.0 / (prompt + 63.0 * step);
    assert!((seen.tokens_per_second / rate - 1.0).abs() < 1e-2, "{} {rate}", seen.tokens_per_second);
}

#[test]
fn all_at_once_wait_for_the_prompts_before_them_and_less_in_later_rounds() {
    let (alone, first) = (played(&load(1, 1), &plain(false)), played(&load(64, 1), &plain(false)));
    // 8 prompts fill a step, so there are 8 of them, and a client waits for half of them and its own.
    let ratio = first.ttft / (8.0 * alone.ttft);
    assert!((3.9..5.5).contains(&ratio), "{ratio}");
    let spread = ClosedLoop { shortest: 0.5, ..load(64, 20) };
    assert!(played(&spread, &plain(false)).ttft < 0.5 * first.ttft);
}

#[test]
fn a_full_cache_makes_clients_wait_or_takes_answers_back() {
    let full = ClosedLoop { cache_tokens: 20.0 * 1088.0, ..load(64, 4) };
    let (free, kept) = (played(&load(64, 4), &plain(true)), played(&full, &plain(true)));
    assert!(kept.ttft > 2.0 * free.ttft && kept.tpot < free.tpot, "{kept:?} {free:?}");
    // Without promises more begin, and some begin again.
    let taken_back = played(&ClosedLoop { cache_tokens: 20.0 * 1040.0, ..full }, &plain(false));
    assert!(taken_back.tokens_per_second > 0.5 * kept.tokens_per_second, "{taken_back:?} {kept:?}");
    assert!(taken_back.tokens_per_second < free.tokens_per_second);
}

#[test]
fn prompts_that_wait_for_others_come_that_many_steps_later() {
    let spread = ClosedLoop { shortest: 0.5, ..load(4, 50) };
    let at_once = played(&spread, &plain(false));
    let held =
        played(&ClosedLoop { hold: Some(PromptHold { steps: 10, tokens: Some(1 << 20) }), ..spread }, &plain(false));
    let steps = (held.ttft - at_once.ttft) / at_once.tpot;
    assert!((5.0..12.0).contains(&steps), "{steps}");
    assert!(held.tpot <= 1.01 * at_once.tpot);
}
