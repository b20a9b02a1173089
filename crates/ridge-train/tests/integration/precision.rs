//! Training in 16 bits: without masters beside masters, and scales of the loss.

use ridge_train::log::TrainEvent;

use crate::common::{checkpoint, folder, run, settings};

fn losses(precision: &str, keys: &[(&str, &str)]) -> Vec<f64> {
    let dir = folder();
    let keys =
        [&[("train.precision", precision), ("checkpoint.export", "false"), ("validation.every", "0")], keys].concat();
    let ran = run(&settings(dir.path(), "llama.json", &keys));
    ran.end.as_ref().unwrap_or_else(|e| panic!("{precision}: {e}"));
    ran.losses()
}

/// Updates of a hundredth of a step between two numbers of bf16 would all be lost by rounding to the nearest.
#[test]
fn weights_without_masters_take_updates_that_are_smaller_than_their_steps() {
    let keys = [("train.steps", "120"), ("optimizer.learning_rate", "2e-5"), ("optimizer.schedule", "constant")];
    let masters = losses("bf16", &keys);
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    let fall = |losses: &[f64]| mean(&losses[..20]) - mean(&losses[100..]);
    for precision in ["bf16_stochastic", "bf16_kahan"] {
        let without = losses(precision, &keys);
        let (got, wanted) = (fall(&without), fall(&masters));
        println!("{precision}: the loss falls by {got}, with masters by {wanted}");
        assert!(wanted > 0.01 && (got - wanted).abs() < 0.2 * wanted, "{precision}: {got}, not {wanted}");
    }
}

#[test]
fn a_loss_scale_that_is_too_large_is_halved_until_gradients_fit() {
    let dir = folder();
    let base = [("train.precision", "f16"), ("train.steps", "4"), ("checkpoint.export", "false")];
    let ran = run(&settings(dir.path(), "gpt2.json", &base));
    ran.end.as_ref().unwrap_or_else(|e| panic!("{e}"));
    let path = checkpoint(dir.path(), 4).join("checkpoint.json");
    let text = std::fs::read_to_string(&path).expect("reads");
    let mut info: serde_json::Value = serde_json::from_str(&text).expect("is JSON");
    assert_eq!(info["loss_scale"]["scale"], 65536.0);
    info["loss_scale"]["scale"] = 2f64.powi(36).into();
    std::fs::write(&path, info.to_string()).expect("writes");
    let more = [("train.steps", "40"), ("checkpoint.resume", "auto"), ("train.guard", "stop")];
    let ran = run(&settings(dir.path(), "gpt2.json", &[&base[..1], &base[2..], &more[..]].concat()));
    ran.end.as_ref().unwrap_or_else(|e| panic!("{e}"));
    let halved = |event: &&TrainEvent| matches!(event, TrainEvent::Refused { why, .. } if why.contains("is halved"));
    let count = ran.events.iter().filter(halved).count();
    assert!((5..30).contains(&count), "{count} halvings: {:?}", ran.events);
    let losses = ran.losses();
    assert!(losses[35] < losses[0] - 0.1, "{losses:?}");
}
