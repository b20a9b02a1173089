//! Runs that do not fit into memory are refused before any weight is made.

use ridge_hw::units::Bytes;
use ridge_runtime::{MemoryOwner, ProgramCache};
use ridge_train::log::TrainEvent;
use ridge_train::settings::Settings;
use ridge_train::{FreeMemory, Prepared, PreparedStep, TrainError};

use crate::common::{NEVER, cpu, deep, folder, run, run_within, settings};

fn step(settings: Settings) -> (PreparedStep, ProgramCache) {
    (Prepared::new(settings, &NEVER).expect("prepares").step, ProgramCache::new(cpu(1)))
}

fn shared(bytes: usize) -> FreeMemory {
    FreeMemory::Shared(Some(Bytes(bytes as u64)))
}

fn separate(device: usize, host: usize) -> FreeMemory {
    FreeMemory::Separate { device: Some(Bytes(device as u64)), host: Some(Bytes(host as u64)) }
}

fn refused(step: &PreparedStep, programs: &ProgramCache, free: FreeMemory) -> String {
    match step.admit(programs, free, &NEVER) {
        Err(error @ TrainError::Memory(_)) => error.to_string(),
        other => panic!("{free:?}: {other:?}"),
    }
}

fn has_all(text: &str, wanted: &[&str]) {
    assert!(wanted.iter().all(|wanted| text.contains(wanted)), "{text} lacks one of {wanted:?}");
}

#[test]
fn a_run_is_admitted_by_the_byte() {
    let dir = folder();
    let (step, programs) = step(settings(dir.path(), "llama.json", &[("train.batch_size", "16")]));
    let memory = step.memory(&programs).expect("compiles");
    let (all, states) = (memory.on_device(), memory.get(MemoryOwner::States));
    assert_eq!(memory.on_host(), 0);
    step.admit(&programs, shared(all), &NEVER).expect("fits");
    step.admit(&programs, FreeMemory::Shared(None), &NEVER).expect("is not known to lack anything");
    let text = refused(&step, &programs, shared(all - 1));
    let needed = format!("the run needs {} of memory, 1 B more than the ", Bytes(all as u64));
    let of_what = format!("optimizer take {}, activations {};", Bytes(states as u64), Bytes((all - states) as u64));
    has_all(&text, &[&needed, &of_what, "train.memory = \"", "train.recomputation = \"full\"", "\"adamw8bit\""]);
    has_all(&text, &["lower train.batch_size or data.sequence_length"]);
    assert!(!text.contains("train.offload"), "both memories are one: {text}");
    // Where states alone are too much, keys that change activations are not offered.
    let text = refused(&step, &programs, shared(states - 1));
    has_all(&text, &["optimizer.name = \"adamw8bit\"", "a smaller model", "change activations alone"]);
    assert!(!text.contains("train.memory"), "{text}");
}

#[test]
fn what_is_offloaded_counts_as_memory_of_the_host() {
    let dir = folder();
    deep(dir.path(), 8);
    let keys = [("train.offload", "all"), ("train.precision", "bf16"), ("train.batch_size", "16")];
    let (step, programs) = step(settings(dir.path(), "deep.json", &keys));
    let memory = step.memory(&programs).expect("compiles");
    let (device, host) = (memory.on_device(), memory.on_host());
    assert!(memory.get(MemoryOwner::HostStates) > 0 && memory.get(MemoryOwner::HostWorkspace) > 0);
    step.admit(&programs, separate(device, host), &NEVER).expect("fits");
    let text = refused(&step, &programs, separate(device - 1, usize::MAX / 2));
    has_all(&text, &["of device memory, 1 B more"]);
    assert!(!text.contains("train.offload"), "all is offloaded: {text}");
    let text = refused(&step, &programs, separate(usize::MAX / 2, host - 1));
    has_all(&text, &["of host memory, 1 B more", "offload less with train.offload = \"optimizer\""]);
    // On a CPU both are in one memory.
    step.admit(&programs, shared(device + host), &NEVER).expect("fits");
    has_all(&refused(&step, &programs, shared(device + host - 1)), &["of memory, 1 B more"]);
}

#[test]
fn a_checkpoint_that_will_not_fit_is_announced() {
    let dir = folder();
    let (step, programs) = step(settings(dir.path(), "llama.json", &[]));
    let all = step.memory(&programs).expect("compiles").on_device();
    // Weights and two moments in f32.
    let copy = 12 * step.parameters() as usize;
    assert_eq!(step.admit(&programs, shared(all + copy), &NEVER).expect("fits"), Vec::<String>::new());
    let notes = step.admit(&programs, shared(all + copy - 1), &NEVER).expect("fits");
    has_all(&notes.join(" "), &["warning: while a checkpoint is written", &Bytes(copy as u64).to_string()]);
}

#[test]
fn a_run_that_does_not_fit_makes_no_weight_and_leaves_no_file() {
    let dir = folder();
    let backend = cpu(1);
    let ran = run_within(&settings(dir.path(), "llama.json", &[]), backend.clone(), shared(1000), |_| false);
    assert!(matches!(ran.end, Err(TrainError::Memory(_))) && ran.events.is_empty(), "{:?}", ran.end);
    let peak = backend.memory().peak;
    assert_eq!((peak.get(MemoryOwner::Weights), peak.get(MemoryOwner::States)), (0, 0));
    assert!(!dir.path().join("run").exists());
    // Nor does one that continues.
    run(&settings(dir.path(), "llama.json", &[])).end.expect("runs");
    let keys = [("checkpoint.resume", "auto"), ("train.steps", "20")];
    let more = settings(dir.path(), "llama.json", &keys);
    let log = std::fs::read(dir.path().join("run/log.jsonl")).expect("reads");
    let ran = run_within(&more, backend.clone(), shared(1000), |_| false);
    assert!(matches!(ran.end, Err(TrainError::Memory(_))), "{:?}", ran.end);
    assert_eq!(backend.memory().peak.get(MemoryOwner::States), 0);
    assert_eq!(std::fs::read(dir.path().join("run/log.jsonl")).expect("reads"), log);
    let ran = run_within(&more, cpu(1), shared(usize::MAX / 2), |_| false);
    assert!(ran.end.is_ok() && matches!(ran.events[0], TrainEvent::Started { step: 12, .. }), "{:?}", ran.events);
}
