//! Several steps in flight.

use std::collections::HashMap;
use std::sync::Arc;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_graph::{Bindings, Builder, CollectiveKind, DType, Prim, Type};
use ridge_runtime::late::Late;
use ridge_runtime::{Backend, CollectiveError, Collectives, Session};

use crate::common::poisoned;
use crate::in_flight;

#[test]
fn steps_in_flight_keep_their_promises() {
    for threads in [1, 3] {
        in_flight::holds(&poisoned(threads));
    }
}

#[test]
fn steps_in_flight_keep_their_promises_however_late_they_complete() {
    let late: Arc<dyn Backend> = Arc::new(Late::new(poisoned(2), 2));
    in_flight::holds(&late);
}

/// A group of two of which the other rank is gone.
struct Broken;

impl Collectives for Broken {
    fn ranks(&self) -> usize {
        2
    }

    fn rank(&self) -> usize {
        0
    }

    fn exchange(&self, _what: &str, _send: &[&[u8]], _receive: &mut [&mut [u8]]) -> Result<(), CollectiveError> {
        Err(CollectiveError::Lost { rank: 1, why: "rank 1 is gone".into() })
    }

    fn abort(&self, _why: &str) {}
}

#[test]
fn a_step_that_failed_fails_those_in_flight_behind_it() {
    let ty = || Type::tensor(DType::F32, [8]);
    let mut g = Builder::new();
    let x = g.step_input("x", ty()).expect("fresh");
    let prim = Prim::Collective { kind: CollectiveKind::AllReduce, mesh: "tp".into(), ranks: 2 };
    let y = g.prim(prim, &[x]).expect("types")[0];
    let failing = g.finish(vec![("y".into(), y)]).expect("finishes");
    let mut g = Builder::new();
    let state = g.state("kv", ty()).expect("fresh");
    let (before, x) = (g.state_read(state).expect("reads"), g.step_input("x", ty()).expect("fresh"));
    let after = g.add(before, x).expect("types");
    g.state_write(state, after).expect("writes");
    let counter = g.finish(vec![("y".into(), after)]).expect("finishes");
    for (threads, late) in [(1, false), (3, false), (2, true)] {
        let mesh = HashMap::from([("tp".to_owned(), Arc::new(Broken) as Arc<dyn Collectives>)]);
        let options = CpuOptions { threads: Some(threads), mesh, ..CpuOptions::default() };
        let cpu: Arc<dyn Backend> = Arc::new(Cpu::new(options).expect("starts"));
        let backend = if late { Arc::new(Late::new(cpu, 1)) } else { cpu };
        let mut session = Session::new(Arc::clone(&backend));
        session.allocate_states(&counter, &Bindings::new()).expect("fits");
        let bucket = |graph| session.compile(graph, &["y"]).and_then(|c| c.bucket(&Bindings::new())).expect("binds");
        let (mut first, mut behind, mut fresh) = (bucket(&failing), bucket(&counter), bucket(&counter));
        behind.submit().and_then(|()| behind.wait()).expect("runs");
        behind.input(0).as_chunks_mut::<4>().0.fill(1f32.to_le_bytes());
        first.submit().expect("is queued");
        behind.submit().expect("is queued");
        let said = behind.wait().expect_err("is behind it").to_string();
        assert!(said.contains("a step submitted before it failed") && said.contains("rank 1 is gone"), "{said}");
        let said = first.wait().expect_err("failed").to_string();
        assert!(!said.contains("before") && said.contains("rank 1 is gone"), "{said}");
        // What the step behind would have written was not; its cache is broken nevertheless only where it has a version.
        let state = session.state("kv").expect("is there");
        assert!(backend.read(&state).expect("is there").iter().all(|byte| *byte == 0));
        backend.write(&state, &[0; 32]).expect("fits");
        session.load("kv", &ty(), vec![ridge_runtime::WeightData::Owned(vec![0; 32])]).expect("fits");
        // Steps submitted after the failure was reported run.
        fresh.input(0).as_chunks_mut::<4>().0.fill(2f32.to_le_bytes());
        fresh.submit().and_then(|()| fresh.wait()).expect("runs");
        assert_eq!(fresh.output(0)[..4], 2f32.to_le_bytes());
    }
}
