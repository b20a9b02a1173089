//! Every op on the GPU, in every dtype, against its f64 meaning by the one rule of tolerance, with poisoned memory.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::{deterministic_gpu, gpu};
use crate::running::{run, same_bits};
use ridge_graph::conformance::{all_samples, judge};
use ridge_graph::sample::Sample;
use ridge_graph::{Arg, Bindings, DType};
use ridge_runtime::Backend;

fn check(backend: &Arc<dyn Backend>, sample: &Sample) -> Result<(), String> {
    let graph = sample.graph().map_err(|e| e.to_string())?;
    let value = |arg: &Arg| sample.inputs[arg.name.parse::<usize>().expect("inputs are numbered")].clone();
    let step = || run(backend, &graph, &Bindings::new(), &value).map_err(|e| e.to_string());
    let (got, again) = (step()?, step()?);
    judge(sample, &got)?;
    if same_bits(&got, &again) { Ok(()) } else { Err(format!("{:?}: a second run gives other bits", sample.op)) }
}

fn conforms(dtype: DType) {
    let Some(gpu) = gpu() else { return };
    let samples = all_samples(dtype, 11);
    // Spread over the processor's cores, since their meaning takes longer than the GPU does.
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(|| {
                while let Some((name, sample)) = samples.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(why) = check(&gpu, sample) {
                        failures.lock().expect("no thread panics").push(format!("{name}: {why:.600}"));
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().expect("no thread panics");
    println!("{dtype}: {} of {} samples conform", samples.len() - failures.len(), samples.len());
    let shown = failures.iter().take(30).map(String::as_str).collect::<Vec<_>>().join("\n");
    assert!(failures.is_empty(), "{} of {} samples fail:\n{shown}", failures.len(), samples.len());
}

#[test]
fn every_op_conforms_in_f32() {
    conforms(DType::F32);
}

#[test]
fn every_op_conforms_in_bf16() {
    conforms(DType::BF16);
}

#[test]
fn every_op_conforms_in_f16() {
    conforms(DType::F16);
}

#[test]
fn every_op_conforms_in_f8e4m3() {
    conforms(DType::F8E4M3);
}

#[test]
fn every_op_conforms_in_f8e5m2() {
    conforms(DType::F8E5M2);
}

/// Samples that a deterministic GPU takes, which are most of them.
fn conforms_deterministically(dtype: DType) {
    let Some(gpu) = deterministic_gpu() else { return };
    let samples = all_samples(dtype, 11);
    let (mut refused, mut failures) = (Vec::new(), Vec::new());
    for (name, sample) in &samples {
        match check(&gpu, sample) {
            Ok(()) => {}
            Err(why) if why.contains("leave --deterministic out") => refused.push(name.to_string()),
            Err(why) => failures.push(format!("{name}: {why:.600}")),
        }
    }
    let total = samples.len();
    refused.dedup();
    println!("{dtype}: some samples of {} are refused", refused.join(", "));
    let shown = failures.iter().take(30).map(String::as_str).collect::<Vec<_>>().join("\n");
    assert!(failures.is_empty(), "{} of {total} samples fail:\n{shown}", failures.len());
    for op in ["rms_norm", "layer_norm", "swiglu", "rope", "kv_write", "sample_token", "softmax", "embedding"] {
        assert!(!refused.iter().any(|name| name == op), "{op} is refused");
    }
}

#[test]
fn ops_that_a_deterministic_gpu_takes_conform_in_bf16() {
    conforms_deterministically(DType::BF16);
}

#[test]
fn ops_that_a_deterministic_gpu_takes_conform_in_f16() {
    conforms_deterministically(DType::F16);
}
