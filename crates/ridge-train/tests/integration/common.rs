//! A small model and text to train it on.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_runtime::Backend;
use ridge_train::log::TrainEvent;
use ridge_train::settings::{Settings, read_settings};
use ridge_train::{FreeMemory, Result, RunEnd, train};

const GPT2: &str = r#"{"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64,
    "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}"#;

const LLAMA: &str = r#"{"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": false}"#;

/// A run that is not asked to stop.
pub(crate) static NEVER: AtomicBool = AtomicBool::new(false);

/// A folder with `gpt2.json`, `llama.json` and `text.txt`.
pub(crate) fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("is made");
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("writes");
    write("gpt2.json", GPT2);
    write("llama.json", LLAMA);
    let lines = (0..400).map(|i| format!("{i} bottles of ink on the wall, take {} down.\n", i % 7));
    write("text.txt", &lines.collect::<String>());
    dir
}

/// Adds `deep.json` and `deep_gpt2.json`: the same models with `layers` layers.
pub(crate) fn deep(dir: &Path, layers: usize) {
    for (model, deep, key) in [(LLAMA, "deep.json", "num_hidden_layers"), (GPT2, "deep_gpt2.json", "n_layer")] {
        let text = model.replace(&format!("\"{key}\": 2"), &format!("\"{key}\": {layers}"));
        std::fs::write(dir.join(deep), text).expect("writes");
    }
}

/// Settings of a run of the model `model` in `dir`, with these keys.
pub(crate) fn settings(dir: &Path, model: &str, keys: &[(&str, &str)]) -> Settings {
    let text = format!(
        "[model]\nconfig = {:?}\n[data]\ntrain = [{:?}]\nvocabulary = \"characters\"\nsequence_length = 32\n\
         [train]\nbatch_size = 4\nsteps = 12\n[optimizer]\nlearning_rate = 1e-2\nwarmup = 2\n\
         [validation]\nevery = 6\nbatches = 3\n[checkpoint]\nfolder = {:?}\nevery = 4\n[log]\nevery = 1\n",
        dir.join(model),
        dir.join("text.txt"),
        dir.join("run")
    );
    let keys: Vec<_> = keys.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    read_settings("test.toml", &text, &keys).unwrap_or_else(|e| panic!("{e}"))
}

pub(crate) fn cpu(threads: usize) -> Arc<dyn Backend> {
    Arc::new(Cpu::new(CpuOptions { threads: Some(threads), ..CpuOptions::default() }).expect("starts"))
}

/// What a run came to.
pub(crate) struct Ran {
    pub(crate) end: Result<RunEnd>,
    pub(crate) events: Vec<TrainEvent>,
}

impl Ran {
    /// The losses of all reported steps.
    pub(crate) fn losses(&self) -> Vec<f64> {
        let loss = |event: &TrainEvent| match event {
            TrainEvent::Step(report) => Some(report.loss),
            _ => None,
        };
        self.events.iter().filter_map(loss).collect()
    }
}

impl Ran {
    /// The norm of the gradient of the first reported step.
    pub(crate) fn first_norm(&self) -> f64 {
        let norm = |event: &TrainEvent| match event {
            TrainEvent::Step(report) => Some(report.gradient_norm),
            _ => None,
        };
        self.events.iter().find_map(norm).expect("a step was reported")
    }

    /// The losses of the reported steps whose updates were made.
    pub(crate) fn losses_of_updates(&self) -> Vec<f64> {
        let refused = |step: u64| {
            self.events.iter().any(|event| matches!(event, TrainEvent::Refused { step: of, .. } if *of == step))
        };
        let loss = |event: &TrainEvent| match event {
            TrainEvent::Step(report) if !refused(report.step) => Some(report.loss),
            _ => None,
        };
        self.events.iter().filter_map(loss).collect()
    }
}

pub(crate) fn run(settings: &Settings) -> Ran {
    run_on(settings, cpu(2), |_| false)
}

/// Runs until `stop` says so of an event.
pub(crate) fn run_on(settings: &Settings, backend: Arc<dyn Backend>, stop: impl Fn(&TrainEvent) -> bool) -> Ran {
    run_within(settings, backend, FreeMemory::Shared(None), stop)
}

/// As [`run_on`], where no more than this is free.
pub(crate) fn run_within(
    settings: &Settings,
    backend: Arc<dyn Backend>,
    free: FreeMemory,
    stop: impl Fn(&TrainEvent) -> bool,
) -> Ran {
    let mut events = Vec::new();
    let flag = AtomicBool::new(false);
    let end = train(settings.clone(), backend, &|| free, &flag, &mut |event| {
        if stop(event) {
            flag.store(true, std::sync::atomic::Ordering::Relaxed);
        }
        events.push(event.clone());
    });
    Ran { end, events }
}

/// The tensors of the checkpoint of `step`.
pub(crate) fn state(dir: &Path, step: u64) -> Vec<u8> {
    std::fs::read(checkpoint(dir, step).join("state.safetensors")).expect("reads")
}

pub(crate) fn checkpoint(dir: &Path, step: u64) -> PathBuf {
    dir.join(format!("run/checkpoints/step-{step:08}"))
}
