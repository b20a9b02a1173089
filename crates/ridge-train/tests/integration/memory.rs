//! Memory as it is predicted before a run, beside what the backend has allocated in it.

use std::sync::Arc;

use ridge_graph::passes::Kernel;
use ridge_graph::{Graph, Type};
use ridge_runtime::{
    Backend, Buffer, MemoryBytes, MemoryOwner, MemorySnapshot, Program, ProgramCache, Result, WeightData,
};
use ridge_train::settings::Offload;
use ridge_train::{Prepared, TrainError, Trainer};

use crate::common::{NEVER, cpu, deep, folder, settings};

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
        let prepared = Prepared::new(settings, &NEVER).unwrap_or_else(|e| panic!("{keys:?}: {e}"));
        let backend = cpu(2);
        let idle = backend.memory().live.on_device();
        let predicted = prepared.step.memory(&ProgramCache::new(cpu(2))).expect("compiles");
        let programs = Arc::new(ProgramCache::new(backend.clone()));
        let mut trainer = Trainer::new(prepared, programs, None, &NEVER).unwrap_or_else(|e| panic!("{keys:?}: {e}"));
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
    let prepared = Prepared::new(settings(dir.path(), "deep.json", keys), &NEVER).expect("prepares");
    let backend = cpu(2);
    let programs = Arc::new(ProgramCache::new(backend.clone()));
    let snapshot = prepared.step.snapshot(&programs).expect("compiles");
    let mut trainer = Trainer::new(prepared, programs, None, &NEVER).expect("binds");
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
        let prepared = Prepared::new(settings(dir.path(), "deep.json", &keys), &NEVER).expect("prepares");
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

/// A CPU that says it has a link to memory of the host.
struct Linked {
    cpu: Arc<dyn Backend>,
    bytes_per_second: f64,
}

impl Backend for Linked {
    fn name(&self) -> &'static str {
        self.cpu.name()
    }

    fn kernels(&self) -> &[Kernel] {
        self.cpu.kernels()
    }

    fn upload(&self, ty: &Type, parts: Vec<WeightData>) -> Result<Buffer> {
        self.cpu.upload(ty, parts)
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        self.cpu.allocate(bytes)
    }

    fn read(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        self.cpu.read(buffer)
    }

    fn write(&self, buffer: &Buffer, bytes: &[u8]) -> Result<()> {
        self.cpu.write(buffer, bytes)
    }

    fn compile(&self, graph: Arc<Graph>) -> Result<Box<dyn Program>> {
        self.cpu.compile(graph)
    }

    fn padded_bytes(&self, bytes: usize) -> usize {
        self.cpu.padded_bytes(bytes)
    }

    fn host_link(&self) -> Result<Option<f64>> {
        Ok(Some(self.bytes_per_second))
    }
}

#[test]
fn a_budget_is_met_by_what_costs_least() {
    let dir = folder();
    deep(dir.path(), 4);
    let cpu = cpu(2);
    // What a step recomputes and offloads, and its bytes, by a link of this rate, if that is above 0.
    let fitted = |bytes_per_second: f64, keys: &[(&str, &str)]| {
        let keys = [&[("train.batch_size", "16")], keys].concat();
        let mut step = Prepared::new(settings(dir.path(), "deep.json", &keys), &NEVER).expect("prepares").step;
        let linked = || Arc::new(Linked { cpu: Arc::clone(&cpu), bytes_per_second });
        let backend: Arc<dyn Backend> = if bytes_per_second > 0.0 { linked() } else { Arc::clone(&cpu) };
        step.fit(&backend, &NEVER)?;
        let bytes = step.memory(&ProgramCache::new(backend)).expect("compiles").on_device();
        Ok::<_, TrainError>((step.recompute.to_string(), step.settings.train.offload, bytes))
    };
    let (fast, slow) = (1e15, 1e3);
    let bytes = |keys: &[(&str, &str)]| fitted(fast, keys).expect("has no budget").2;
    let [whole, offloaded, recomputed] = [
        bytes(&[]),
        bytes(&[("train.offload", "activations")]),
        bytes(&[("train.recomputation", "full"), ("train.offload", "all")]),
    ];
    let within = |link: f64, bytes: usize, keys: &[(&str, &str)]| {
        let found = fitted(link, &[&[("train.memory", &*format!("{bytes}B"))], keys].concat());
        found.inspect(|(level, offload, needed)| {
            println!("{bytes} by {link:e}: {level}, {offload}, {needed}");
            assert!(*needed <= bytes);
        })
    };
    // What fits stays as it is, also by the fastest link.
    assert_eq!(within(fast, whole, &[]).expect("fits"), ("no activations".to_owned(), Offload::None, whole));
    // A fast link moves activations, and nothing is computed again; by a slow one they are computed again.
    let (level, offload, _) = within(fast, offloaded, &[]).expect("fits");
    assert!(level == "no activations" && offload.has_activations(), "{level}, {offload}");
    let (level, offload, _) = within(slow, offloaded, &[]).expect("fits");
    assert!(level != "no activations" && offload == Offload::None, "{level}, {offload}");
    // What is asked for stays.
    let (_, offload, _) = within(slow, offloaded - 1, &[("train.offload", "optimizer")]).expect("fits");
    assert!(offload.has_optimizer(), "{offload}");
    // What no recomputation reaches, offloading does, however slow the link; below that, nothing.
    let error = within(0.0, recomputed, &[]).expect_err("does not fit").to_string();
    assert!(error.contains("with all layers recomputed; raise it"), "{error}");
    let (_, offload, least) = within(slow, recomputed, &[]).expect("fits");
    assert_ne!(offload, Offload::None);
    let error = within(fast, least / 2, &[]).expect_err("does not fit").to_string();
    assert!(error.contains("with all layers recomputed and all offloaded that can be; raise it"), "{error}");
}
