//! `train.memory` on a GPU that need not be there.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ridge_cuda::PlannedGpu;
use ridge_hw::spec::DeviceSpec;
use ridge_hw::units::Bytes;
use ridge_models::ModelConfig;
use ridge_runtime::{Backend, MemoryOwner, ProgramCache};
use ridge_train::PreparedStep;
use ridge_train::settings::{Offload, Precision, Settings};

/// A step of Llama 3.1 8B with so many layers on one sequence of this length.
fn settings(length: usize) -> Settings {
    let mut settings = Settings::default();
    settings.data.sequence_length = length;
    settings.train.batch_size = 1;
    settings.train.precision = Precision::Bf16;
    settings
}

fn model(layers: usize) -> ModelConfig {
    let text = format!(
        r#"{{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": {layers},
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": false}}"#
    );
    ModelConfig::from_json("config.json", &text).expect("is a model")
}

/// What a step recomputes and offloads on this GPU within a budget of its states and a share of the other bytes that it takes as
/// it is.
fn fitted(gpu: &str, length: usize, share: f64) -> (String, Offload) {
    let sheet = DeviceSpec::find(gpu).expect("has a sheet");
    let backend: Arc<dyn Backend> = Arc::new(PlannedGpu::new(sheet).expect("is planned for"));
    let memory = |step: &PreparedStep| step.memory(&ProgramCache::new(Arc::clone(&backend))).expect("is counted");
    let whole = memory(&PreparedStep::new(settings(length), model(8)).expect("is built"));
    let states = whole.get(MemoryOwner::States) as f64;
    let budget = states + share * (whole.on_device() as f64 - states);
    let mut within = settings(length);
    within.train.memory = Some(Bytes(budget as u64));
    let mut step = PreparedStep::new(within, model(8)).expect("is built");
    step.fit(&backend, &AtomicBool::new(false)).expect("fits");
    let needed = memory(&step).on_device() as f64;
    let (recompute, offload) = (step.recompute.to_string(), step.settings.train.offload);
    let gib = |bytes: f64| bytes / f64::from(1 << 30);
    println!(
        "{gpu}, {length} tokens, {:.1} GiB of states and {:.1} of {:.1}: {recompute}, {offload}, {:.1} GiB",
        gib(states),
        gib(budget - states),
        gib(whole.on_device() as f64 - states),
        gib(needed)
    );
    assert!(needed <= budget, "{needed} of {budget}");
    (recompute, offload)
}

/// The residuals of a layer grow with the length, its attention with the square of it: long sequences hide the transfers of all
/// residuals. Of shorter ones those that norms and elementwise ops leave are computed again, since that takes less time than to
/// move them.
#[test]
fn a_budget_is_met_by_what_the_gpu_and_its_link_do_in_less_time() {
    assert_eq!(fitted("H100", 65536, 0.7), ("no activations".to_owned(), Offload::Activations));
    let selective = "the activations of norms and elementwise ops".to_owned();
    assert_eq!(fitted("H100", 8192, 0.75), (selective, Offload::Activations));
    // Moments and masters cross the link once a step, which takes longest, and are moved where nothing else is enough.
    assert_eq!(fitted("H100", 8192, 0.5).1, Offload::Optimizer);
}
