//! In the steady state nothing is allocated: a decoder's steps run over memory that binding took once.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::decoder::{Step, decoder};
use crate::rerun::rerun;
use ridge_cpu::{Cpu, CpuOptions};
use ridge_graph::{DType, Role, Value};
use ridge_runtime::{Bucket, Session, WeightData};

/// Counts what it passes on to the system, in the process that counts.
struct CountingAllocator;

static COUNTS: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

fn count() {
    if COUNTS.load(Ordering::Relaxed) {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
    }
}

// SAFETY: every call is passed on unchanged.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(ptr, layout, size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Set in the process that runs this test alone.
const COUNTING: &str = "RIDGE_CPU_COUNT_ALLOCATIONS";

/// In a process of its own, since other tests of this binary would allocate meanwhile.
#[test]
fn a_thousand_steps_allocate_nothing() {
    if std::env::var_os(COUNTING).is_none() {
        let (passed, printed) = rerun(&["steady_state::a_thousand_steps_allocate_nothing"], &[(COUNTING, "1")]);
        return assert!(passed, "{printed}");
    }
    COUNTS.store(true, Ordering::SeqCst);
    for threads in [1, 2] {
        let graph = decoder(DType::BF16, true).expect("builds");
        let options = CpuOptions { threads: Some(threads), ..CpuOptions::default() };
        let mut session = Session::new(Arc::new(Cpu::new(options).expect("threads start")));
        let step = Step::new(&[(3, 4), (7, 1)], 1);
        for arg in graph.args(Role::Weight) {
            let parts = match step.value(arg) {
                Value::Plain(tensor) => vec![WeightData::Owned(tensor.to_bytes())],
                Value::Stored { components, .. } => {
                    components.iter().map(|c| WeightData::Owned(c.to_bytes())).collect()
                }
            };
            session.load(&arg.name, &arg.ty, parts).expect("loads");
        }
        session.allocate_states(&graph, &step.bindings).expect("allocates");
        let compiled = session.compile(&graph, &["logits", "next"]).expect("compiles");
        let inputs: Vec<Vec<u8>> =
            compiled.graph().args(Role::StepInput).map(|arg| step.value(arg).tensor().to_bytes()).collect();
        let run = |bucket: &mut Bucket| {
            for (i, bytes) in inputs.iter().enumerate() {
                bucket.input(i).copy_from_slice(bytes);
            }
            bucket.submit().expect("runs");
            while !bucket.poll().expect("runs") {
                std::hint::spin_loop();
            }
            bucket.output(0)[0]
        };

        let mut bucket = compiled.bucket(&step.bindings).expect("binds");
        let first = run(&mut bucket);
        for _ in 0..200 {
            run(&mut bucket);
        }
        let before = ALLOCATIONS.load(Ordering::SeqCst);
        assert!(before > 0, "allocations are counted");
        for _ in 0..1000 {
            assert_eq!(run(&mut bucket), first);
        }
        let allocations = ALLOCATIONS.load(Ordering::SeqCst) - before;
        // A worker's scratch memory may grow once for each kind of kernel, when it first comes to run it.
        let allowed = if threads == 1 { 0 } else { 20 };
        assert!(allocations <= allowed, "{allocations} allocations in 1000 steps on {threads} threads");
    }
}
