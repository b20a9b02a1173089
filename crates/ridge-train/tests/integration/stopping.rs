//! Runs that are asked to stop before their first step.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use ridge_graph::passes::Kernel;
use ridge_graph::{Graph, Type};
use ridge_runtime::{Backend, Buffer, MemoryUse, Program, Result, WeightData};
use ridge_train::checkpoint;
use ridge_train::settings::Settings;
use ridge_train::{FreeMemory, RunEnd, TrainError, train};

use crate::common::{checkpoint as checkpoint_of, cpu, folder, run, settings};

/// A CPU that asks the run to stop when the given number of buffers is written.
struct Stopping {
    cpu: Arc<dyn Backend>,
    stop: Arc<AtomicBool>,
    until: usize,
    written: AtomicUsize,
}

impl Backend for Stopping {
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
        let written = self.written.fetch_add(1, Ordering::Relaxed) + 1;
        self.stop.fetch_or(written == self.until, Ordering::Relaxed);
        self.cpu.write(buffer, bytes)
    }

    fn compile(&self, graph: Arc<Graph>) -> Result<Box<dyn Program>> {
        self.cpu.compile(graph)
    }

    fn padded_bytes(&self, bytes: usize) -> usize {
        self.cpu.padded_bytes(bytes)
    }

    fn memory(&self) -> MemoryUse {
        self.cpu.memory()
    }
}

/// Buffers that a run writes which is to stop at number `until`, without a step or an event.
fn written(settings: &Settings, until: usize) -> usize {
    let stop = Arc::new(AtomicBool::new(false));
    let backend = Arc::new(Stopping { cpu: cpu(1), stop: Arc::clone(&stop), until, written: AtomicUsize::new(0) });
    let mut events = 0;
    let free = || FreeMemory::Shared(None);
    let end = train(settings.clone(), backend.clone(), &free, &stop, &mut |_| events += 1);
    assert_eq!(end.unwrap_or_else(|e| panic!("{e}")), RunEnd::StoppedBeforeFirstStep);
    assert_eq!(events, 0);
    backend.written.load(Ordering::Relaxed)
}

#[test]
fn a_run_stops_between_weights_and_leaves_no_file() {
    let dir = folder();
    let masters = [("train.precision", "bf16"), ("optimizer.name", "adamw8bit"), ("optimizer.ema", "0.9")];
    for (keys, copies) in [(&[][..], 1), (&masters[..], 3)] {
        let settings = settings(dir.path(), "llama.json", keys);
        // The copies of one weight are made at once.
        assert_eq!(
            [1, 7, 10].map(|until| written(&settings, until)),
            [1, 7, 10].map(|n: usize| n.next_multiple_of(copies))
        );
        assert!(!dir.path().join("run").exists());
    }
}

#[test]
fn a_run_that_continues_stops_while_its_checkpoint_is_read() {
    let dir = folder();
    run(&settings(dir.path(), "llama.json", &[])).end.expect("runs");
    let path = checkpoint_of(dir.path(), 12);
    let state = || std::fs::read(path.join("state.safetensors")).expect("reads");
    let (before, log) = (state(), std::fs::read(dir.path().join("run/log.jsonl")).expect("reads"));
    let more = settings(dir.path(), "llama.json", &[("checkpoint.resume", "auto"), ("train.steps", "20")]);
    assert_eq!(written(&more, 3), 3);
    assert!(state() == before);
    assert_eq!(std::fs::read(dir.path().join("run/log.jsonl")).expect("reads"), log);
    // Its verification stops too, and that is no damage.
    let set = AtomicBool::new(true);
    assert!(matches!(checkpoint::open(&path, &set).err(), Some(TrainError::Stopped)));
    let all = path.parent().expect("has one");
    assert!(matches!(checkpoint::latest(all, &set).err(), Some(TrainError::Stopped)));
}

#[test]
fn a_run_that_is_to_stop_from_the_beginning_reads_no_data() {
    let dir = folder();
    let settings = settings(dir.path(), "llama.json", &[]);
    std::fs::write(dir.path().join("text.txt"), b"\xff is not UTF-8").expect("writes");
    let free = || panic!("memory is asked for behind the data");
    let end = train(settings, cpu(1), &free, &AtomicBool::new(true), &mut |_| {});
    assert_eq!(end.unwrap_or_else(|e| panic!("{e}")), RunEnd::StoppedBeforeFirstStep);
    assert!(!dir.path().join("run").exists());
}
