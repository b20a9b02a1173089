//! Memory as it is predicted before a run, beside what the backend has allocated in it.

use ridge_runtime::{MemoryBytes, MemoryOwner, ProgramCache};
use ridge_train::{Prepared, Trainer};

use crate::common::{cpu, folder, settings};

#[test]
fn a_run_allocates_what_was_predicted() {
    let cases: [(&str, &[(&str, &str)]); 6] = [
        ("llama.json", &[]),
        ("gpt2.json", &[("train.precision", "bf16"), ("train.accumulation", "3")]),
        ("llama.json", &[("train.precision", "bf16_kahan"), ("optimizer.ema", "0.9")]),
        ("llama.json", &[("train.recomputation", "full"), ("train.batch_size", "16")]),
        ("gpt2.json", &[("optimizer.name", "adafactor"), ("model.dropout", "0.1")]),
        ("llama.json", &[("train.fp8", "delayed"), ("train.precision", "bf16"), ("optimizer.name", "adamw8bit")]),
    ];
    for (model, keys) in cases {
        let dir = folder();
        let settings = settings(dir.path(), model, keys);
        let prepared = Prepared::new(settings).unwrap_or_else(|e| panic!("{keys:?}: {e}"));
        let backend = cpu(2);
        let idle = backend.memory().live.on_device();
        let predicted: u64 = prepared.memory(&ProgramCache::new(cpu(2))).expect("compiles").iter().sum();
        let mut trainer = Trainer::new(prepared, backend.clone(), None).unwrap_or_else(|e| panic!("{keys:?}: {e}"));
        for _ in 0..3 {
            trainer.step().expect("steps");
        }
        trainer.validate().expect("validates");
        let usage = backend.memory();
        // Threads have a few hundred KiB each to work in, which no program knows. On the CPU what is loaded is moved to where it
        // can be written ahead of all else.
        let of = |bytes: &MemoryBytes, but: &[MemoryOwner]| -> usize {
            but.iter().fold(bytes.on_device() - idle, |sum, owner| sum - bytes.get(*owner))
        };
        let live = of(&usage.live, &[MemoryOwner::Threads]);
        let peak = of(&usage.peak, &[MemoryOwner::Threads, MemoryOwner::Weights]);
        for (what, bytes) in [("live", live), ("peak", peak)] {
            let off = bytes as f64 / predicted as f64 - 1.0;
            println!("{model} {keys:?}: predicted {predicted}, {what} {bytes} ({:+.3} %)", 100.0 * off);
            assert!(off.abs() < 0.01, "{model} {keys:?}: predicted {predicted}, {what} {bytes}: {usage:?}");
        }
    }
}
