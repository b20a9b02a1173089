//! Memory as it is predicted before a run, beside what the backend has allocated in it.

use ridge_runtime::{MemoryBytes, MemoryOwner, MemorySnapshot, ProgramCache};
use ridge_train::{Prepared, Trainer};

use crate::common::{cpu, deep, folder, settings};

#[test]
fn a_run_allocates_what_was_predicted() {
    let cases: [(&str, &[(&str, &str)]); 9] = [
        ("llama.json", &[]),
        ("gpt2.json", &[("train.precision", "bf16"), ("train.accumulation", "3")]),
        ("llama.json", &[("train.precision", "bf16_kahan"), ("optimizer.ema", "0.9")]),
        ("llama.json", &[("train.recomputation", "full"), ("train.batch_size", "16")]),
        ("llama.json", &[("train.offload", "optimizer"), ("train.precision", "bf16"), ("optimizer.ema", "0.9")]),
        ("deep_gpt2.json", &[("train.offload", "all"), ("train.batch_size", "16")]),
        ("deep.json", &[("train.offload", "activations"), ("train.precision", "bf16"), ("train.accumulation", "2")]),
        ("gpt2.json", &[("optimizer.name", "adafactor"), ("model.dropout", "0.1")]),
        ("llama.json", &[("train.fp8", "delayed"), ("train.precision", "bf16"), ("optimizer.name", "adamw8bit")]),
    ];
    for (model, keys) in cases {
        let dir = folder();
        deep(dir.path(), 8);
        let settings = settings(dir.path(), model, keys);
        let prepared = Prepared::new(settings).unwrap_or_else(|e| panic!("{keys:?}: {e}"));
        let backend = cpu(2);
        let idle = backend.memory().live.on_device();
        let predicted = prepared.step.memory(&ProgramCache::new(cpu(2))).expect("compiles");
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
        let on_host = (usage.live.on_host(), predicted.on_host());
        assert_eq!(on_host.0, on_host.1, "{model} {keys:?}: in memory of the host");
        assert_eq!(on_host.0 > 0, keys.iter().any(|(key, _)| *key == "train.offload"), "{model} {keys:?}");
        let has_activations = model.starts_with("deep");
        for (what, bytes) in [("predicted", &predicted), ("allocated", &usage.live)] {
            let activations = bytes.get(MemoryOwner::HostWorkspace);
            assert_eq!(activations > 0, has_activations, "{model} {keys:?}: {what} {activations}");
        }
        let predicted = predicted.on_device();
        for (what, bytes) in [("live", live), ("peak", peak)] {
            let off = bytes as f64 / predicted as f64 - 1.0;
            println!("{model} {keys:?}: predicted {predicted}, {what} {bytes} ({:+.3} %)", 100.0 * off);
            assert!(off.abs() < 0.01, "{model} {keys:?}: predicted {predicted}, {what} {bytes}: {usage:?}");
        }
    }
}

/// Losses of a few steps, what is allocated on the device and on the host, and the snapshot of a micro-batch.
fn trained(keys: &[(&str, &str)]) -> (Vec<u64>, [usize; 2], MemorySnapshot) {
    let dir = folder();
    deep(dir.path(), 8);
    let prepared = Prepared::new(settings(dir.path(), "deep.json", keys)).expect("prepares");
    let backend = cpu(2);
    let snapshot = prepared.step.snapshot(&ProgramCache::new(backend.clone())).expect("compiles");
    let mut trainer = Trainer::new(prepared, backend.clone(), None).expect("binds");
    let losses = (0..4).map(|_| trainer.step().expect("steps").loss.to_bits()).collect();
    let live = backend.memory().live;
    (losses, [live.on_device(), live.on_host()], snapshot)
}

#[test]
fn offloading_takes_a_fifth_of_the_memory_and_leaves_the_bits() {
    for recomputation in ["none", "selective", "full"] {
        let keys =
            |offload| [("train.recomputation", recomputation), ("train.batch_size", "16"), ("train.offload", offload)];
        let (losses, [resident, _], whole) = trained(&keys("none"));
        assert_eq!((whole.host_bytes, whole.host_values.len()), (0, 0));
        let (offloaded, [activations, on_host], snapshot) = trained(&keys("activations"));
        assert_eq!(losses, offloaded, "{recomputation}");
        println!("{recomputation}: peak {} to {}, host {on_host}", whole.peak_bytes, snapshot.peak_bytes);
        println!("{recomputation}: device {resident} to {activations}");
        assert!(snapshot.host_peak_bytes > 0 && on_host >= snapshot.host_bytes, "{recomputation}");
        // Where layers are recomputed whole, little but their inputs is kept.
        let least = if recomputation == "full" { 0.98 } else { 0.8 };
        assert!(
            (snapshot.peak_bytes as f64) < least * whole.peak_bytes as f64,
            "{recomputation}: {}",
            snapshot.peak_bytes
        );
        assert!(
            (snapshot.arena_bytes as f64) < least * whole.arena_bytes as f64,
            "{recomputation}: {}",
            snapshot.arena_bytes
        );
    }
    let keys = |offload| [("train.precision", "bf16"), ("train.batch_size", "1"), ("train.offload", offload)];
    let (losses, [resident, _], _) = trained(&keys("none"));
    let (offloaded, [device, on_host], _) = trained(&keys("optimizer"));
    println!("optimizer: device {resident} to {device}, host {on_host}");
    assert_eq!(losses, offloaded);
    assert!((device as f64) < 0.8 * resident as f64 && device + on_host <= resident + resident / 100);
    assert_eq!(trained(&keys("all")).0, losses);
}

#[test]
fn gradients_take_no_memory_of_a_step_behind_their_layer() {
    let peak = |layers: usize, accumulation: &str| {
        let dir = folder();
        deep(dir.path(), layers);
        let keys = [("train.recomputation", "full"), ("train.accumulation", accumulation), ("train.batch_size", "1")];
        let prepared = Prepared::new(settings(dir.path(), "deep.json", &keys)).expect("prepares");
        let snapshot = prepared.step.snapshot(&ProgramCache::new(cpu(1))).expect("compiles");
        let elements =
            |name: &str| snapshot.weights.iter().filter(|of| of.name.contains(name)).map(|of| of.bytes).sum::<usize>();
        (snapshot.peak_bytes, elements("layers.3."))
    };
    for accumulation in ["1", "4"] {
        let ([few, of_layer], [many, _]) = (peak(4, accumulation).into(), peak(12, accumulation).into());
        // The input of a layer: 32 tokens of 32 f32.
        let most = few + 8 * 32 * 32 * 4 + of_layer / 2;
        println!("{few} to {many}, a layer has {of_layer}");
        assert!(many < most && of_layer > 32 * 32 * 4, "{few} to {many}, a layer has {of_layer}");
    }
}
