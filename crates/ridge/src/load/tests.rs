//! Loading within limits of memory, and what a deterministic device answers.

use std::collections::BTreeMap;
use std::time::Duration;

use ridge_engine::scoring::ScorerOptions;
use ridge_engine::service::{self, Event, Happened, Policy, RequestId, Service, ServiceOptions};
use ridge_engine::{Logprobs, Request, Sampling};
use ridge_runtime::MemoryOwner;

use super::*;
use crate::host_weights::tests::config_text;
use crate::placement::Device;

const CONTEXT: usize = 128;

#[test]
fn a_gpu_of_limited_memory_stays_within_it_and_gives_the_same_tokens() {
    let limited = |gpu_memory| Placement { gpu_memory, ..Device::Cuda(0).into() };
    if let Err(why) = OpenDevice::open(&limited(None)) {
        ridge_testing::skip!("{why}");
    }
    let files = ModelFiles::of_text("a mixture of experts", &config_text());
    let config = files.config().unwrap();
    let numbers = NumberSettings { dtype: Some(DType::BF16), ..NumberSettings::default() };
    let options = EngineOptions { context: CONTEXT, sequences: 1, chunk: 64, blocks: None };
    let cached = CacheSize::Engine(options);
    let workspace = |model: &Decoder, backend: &dyn Backend| {
        let largest = StepExtents { tokens: 64, sequences: 1, context: CONTEXT, candidates: 0 };
        engine_bytes(model, backend, EnginePrograms::Sampling, largest)
    };
    let run =
        |placement| RunSettings { placement, context: CONTEXT, prompt: 64, chunk: 64, random_weights: true, drafts: 0 };
    let whole = estimate_memory(&files, &config, &numbers, &run(limited(None)), cached, workspace, &mut ()).unwrap();
    let limit = Bytes(whole.weights.0 / 4 * 3 + whole.cache.0 + whole.workspace.0);
    let tokens = |placement: Placement| {
        let limit = placement.gpu_memory;
        let loaded = load_model(&files, &config, &numbers, &run(placement), cached, workspace, &mut ()).unwrap();
        let backend = std::sync::Arc::clone(loaded.session.backend());
        let mut engine = Engine::new(loaded.session, &loaded.model, options).unwrap();
        let prompt = (1..50).collect();
        let request = Request { prompt, sampling: Sampling::GREEDY, max_tokens: 30, stop_tokens: Vec::new() };
        let generated = engine.generate(&request, |_| std::ops::ControlFlow::Continue(())).unwrap();
        let live = backend.memory().live;
        assert_eq!(live.get(MemoryOwner::HostWeights) as u64, loaded.on_host.bytes.0);
        if let Some(limit) = limit {
            assert!(
                loaded.on_host.bytes.0 > 0 && live.on_device() as u64 <= limit.0,
                "{} of {limit}",
                live.on_device()
            );
        }
        generated.tokens
    };
    assert_eq!(tokens(limited(Some(limit))), tokens(limited(None)));
}

#[test]
fn drafts_compile_for_a_gpu_and_are_counted() {
    let gpu = ridge_cuda::PlannedGpu::new(ridge_hw::spec::DeviceSpec::find("H100").unwrap()).unwrap();
    let largest = StepExtents { tokens: 32, sequences: 4, context: CONTEXT, candidates: 0 };
    for family in ["glm4_moe", "deepseek_v3", "deepseek_v32"] {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/prediction").join(family);
        let files = ModelFiles::open(Some(&folder)).unwrap();
        let config = files.config().unwrap();
        let bytes = |drafts| {
            let options =
                BuildOptions { activations: DType::BF16, cache: DType::BF16, drafts, ..BuildOptions::default() };
            let mut model = config.build(&options).unwrap();
            model.store(&WeightSource::Random(DType::BF16), None).unwrap();
            let cache =
                cache_bytes(&model, CacheSize::Scorer(ScorerOptions { context: CONTEXT, step: 1, questions: 1 }));
            (engine_bytes(&model, &gpu, EnginePrograms::All, largest).unwrap(), cache)
        };
        let ((plain, cache), (drafting, larger)) = (bytes(0), bytes(2));
        assert!(drafting > plain, "{family}: {drafting} and {plain}");
        // A layer more.
        assert_eq!(larger.0 - cache.0, (cache.0 - 4 * CONTEXT as u64) / 2, "{family}");
    }
}

/// A decoder of random weights: `qwen3` has norms of heads.
fn decoder(model_type: &str, head_dim: usize) -> ModelFiles {
    let config = format!(
        r#"{{"model_type": "{model_type}", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": {head_dim}, "vocab_size": 512, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 2048, "tie_word_embeddings": false, "torch_dtype": "bfloat16"}}"#
    );
    ModelFiles::of_text(model_type, &config)
}

/// Tokens with their log-probabilities.
type Answer = (Vec<u32>, Vec<Logprobs>);

/// What a deterministic service answers; and how many preemptions and hits of the prefix cache there were.
fn answers(
    files: &ModelFiles,
    device: Device,
    (chunk, blocks): (usize, Option<usize>),
    requests: &[service::Request],
    at_once: bool,
) -> (Vec<Answer>, u64, u64) {
    let engine = EngineOptions { context: 768, sequences: 12, chunk, blocks };
    let placement = Placement { deterministic: true, ..device.into() };
    let run = RunSettings { placement, context: 768, prompt: 64, chunk, random_weights: true, drafts: 0 };
    let numbers = NumberSettings { dtype: Some(DType::BF16), ..NumberSettings::default() };
    let config = files.config().unwrap();
    let loaded =
        load_model(files, &config, &numbers, &run, CacheSize::Engine(engine), |_, _| Ok(Bytes(0)), &mut ()).unwrap();
    let options = ServiceOptions { engine, queue: 100, policy: Policy::FirstCome, prefix_cache: true };
    let mut service = Service::new(loaded.session, &loaded.model, options).unwrap();
    let mut all: BTreeMap<RequestId, Answer> = BTreeMap::new();
    let mut events = Vec::new();
    for (nth, request) in requests.iter().enumerate() {
        service.submit(request.clone(), Duration::ZERO).unwrap();
        if at_once && nth + 1 < requests.len() {
            continue;
        }
        while !service.is_idle() {
            service.step(Duration::ZERO, &mut events);
            for Event { id, what } in events.drain(..) {
                if let Happened::Token { token, logprobs, .. } = what {
                    let answer = all.entry(id).or_default();
                    answer.0.push(token);
                    answer.1.extend(logprobs);
                }
            }
        }
    }
    let stats = service.stats();
    (all.into_values().collect(), stats.preemptions, stats.prefix_hits)
}

#[test]
fn deterministic_answers_do_not_depend_on_load_chunks_cache_or_preemption() {
    let gpu = Device::Cuda(0);
    let devices = match OpenDevice::open(&gpu.into()) {
        Ok(_) => vec![Device::Cpu, gpu],
        Err(why) => {
            ridge_testing::report_skipped(format_args!("on a GPU: {why}"));
            vec![Device::Cpu]
        }
    };
    let sampling = |seed| Sampling { temperature: 0.8, seed, logprobs: Some(3), ..Sampling::GREEDY };
    let shared = (0..90).map(|at| (at * 37 + 11) % 512);
    let prompts = (0..14u32).map(|nth| {
        let own = (0..[1, 5, 17, 40, 130, 300][nth as usize % 6]).map(move |at| (at * 13 + nth * 101 + 3) % 512);
        if nth % 3 == 0 { shared.clone().chain(own).collect() } else { own.collect::<Vec<u32>>() }
    });
    let requests: Vec<service::Request> = prompts
        .enumerate()
        .map(|(nth, prompt)| service::Request { sampling: sampling(nth as u64), ..service::Request::new(prompt, 40) })
        .collect();
    for device in devices {
        for (model_type, head_dim) in [("llama", 64), ("qwen3", 128), ("qwen3", 80)] {
            let files = decoder(model_type, head_dim);
            let (alone, ..) = answers(&files, device, (512, None), &requests, false);
            assert!(alone.iter().all(|(tokens, logprobs)| tokens.len() == 40 && logprobs.len() == 40));
            let (mut preempted, mut found) = (0, 0);
            for size in [(512, None), (64, None), (33, Some(60))] {
                let (together, preemptions, hits) = answers(&files, device, size, &requests, true);
                assert_eq!(
                    together, alone,
                    "{model_type} of heads of {head_dim} on {device:?}, chunk and blocks {size:?}"
                );
                preempted += preemptions;
                found += hits;
            }
            assert!(preempted > 0 && found > 0, "{preempted} preempted, {found} found");
        }
    }
}
