//! Logits of a small random model of each family on an NVIDIA GPU against its forward pass in doubles, by the rule of
//! tolerance beside transformers and plain implementations; skipped where there is no GPU, unless
//! `RIDGE_GPU_TESTS=required`.
use std::sync::Arc;

use crate::common::{ALL, FAMILIES, Fixture, OnCpu as OnDevice, SHUFFLED, Sequence, judge, plain_logits, rows, stack};
use crate::encoders::{ALONE, BATCH, Bert};
use crate::mixed_precision::trains_as_near_to_exact_as_torch;
use crate::vit;
use ridge_cuda::{Cuda, CudaOptions};
use ridge_graph::{DType, Tensor};
use ridge_runtime::{Backend, Refresh};

/// A GPU with poisoned memory, or why there is none.
fn gpu() -> Result<Arc<dyn Backend>, String> {
    match Cuda::new(CudaOptions { poison: true, ..CudaOptions::default() }) {
        Ok(cuda) => Ok(Arc::new(cuda)),
        Err(why) if std::env::var_os("RIDGE_GPU_TESTS").is_some_and(|v| v == "required") => panic!("no GPU: {why}"),
        Err(why) => Err(why.to_string()),
    }
}

#[test]
fn prompt_logits_are_as_near_to_exact_as_those_of_transformers() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(why) => ridge_testing::skip!("no GPU: {why}"),
    };
    let families = FAMILIES.iter().map(|(name, context)| Fixture::family(name, *context));
    for fixture in ALL.into_iter().map(Fixture::open).chain(families) {
        let (tokens, expected) = (fixture.prompt(), &fixture.expected);
        let mut sequence = [Sequence::new(&tokens, &SHUFFLED[0])];
        let got = OnDevice::with(&fixture, Arc::clone(&gpu)).run(&mut sequence, &[tokens.len()]);
        let (torch, exact) = (expected.tensor("logits_f32"), expected.tensor("logits_f64"));
        let used = judge(fixture.name, &got, &torch, &plain_logits(&fixture), &exact);
        println!("{}: {used:.2} of what is allowed", fixture.name);
    }
}

#[test]
fn decoding_from_the_cache_gives_the_logits_of_the_whole_prompt() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(why) => ridge_testing::skip!("no GPU: {why}"),
    };
    for &(name, context) in FAMILIES {
        let fixture = Fixture::family(name, context);
        let (tokens, expected) = (fixture.prompt(), &fixture.expected);
        let mut device = OnDevice::with(&fixture, Arc::clone(&gpu));
        let mut sequence = [Sequence::new(&tokens, &SHUFFLED[0])];
        let cuts: Vec<usize> = [16].into_iter().chain(std::iter::repeat_n(1, tokens.len() - 16)).collect();
        let parts: Vec<Tensor> = cuts.iter().map(|n| device.run(&mut sequence, &[*n])).collect();
        let got = rows(&stack(&parts), 0..tokens.len());
        let (torch, exact) = (expected.tensor("logits_f32"), expected.tensor("logits_f64"));
        judge(name, &got, &torch, &plain_logits(&fixture), &exact);
    }
}

#[test]
fn steps_in_mixed_precision_are_as_near_to_exact_as_those_of_torch() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(why) => ridge_testing::skip!("no GPU: {why}"),
    };
    for refresh in [Refresh::Fused, Refresh::Lazy] {
        trains_as_near_to_exact_as_torch(&gpu, refresh);
    }
}

#[test]
fn logits_of_two_gpus_are_as_near_to_exact_as_those_of_transformers() {
    if let Err(why) = gpu() {
        ridge_testing::skip!("no GPU: {why}");
    }
    let test = "cuda::logits_of_two_gpus_are_as_near_to_exact_as_those_of_transformers";
    crate::llama_parallel::logits_of_two_gpus_are_as_near_to_exact_as_those_of_transformers(test);
}

#[test]
fn training_steps_on_two_gpus_are_those_of_one() {
    if let Err(why) = gpu() {
        ridge_testing::skip!("no GPU: {why}");
    }
    crate::llama_gathered::steps_on_two_gpus_are_those_of_one("cuda::training_steps_on_two_gpus_are_those_of_one");
}

#[test]
fn networks_without_a_cache_are_as_near_to_exact_as_those_of_transformers() {
    let gpu = match gpu() {
        Ok(gpu) => gpu,
        Err(why) => ridge_testing::skip!("no GPU: {why}"),
    };
    let bert = Bert::open();
    for (prefix, lengths) in [ALONE, BATCH] {
        bert.judge(Arc::clone(&gpu), &bert.step(prefix, lengths), "hidden", &format!("{prefix}hidden"));
    }
    let vit = vit::open(DType::F32);
    for output in ["logits", "hidden"] {
        vit.judge(Arc::clone(&gpu), &vit::step(&vit, 0..3), output, output);
    }
}
