//! Schedules: stages in order that pass values in parameters, run once or for each part, and ended by their driver.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Arc;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_graph::{Bindings, Builder, DType, Graph, Result as GraphResult, Type};
use ridge_runtime::late::Late;
use ridge_runtime::{
    Backend, MemoryOwner, ProgramCache, RuntimeError, Schedule, ScheduleDriver, Session, Stage, StageInputs,
    StageOutputs, Times,
};

fn vector() -> Type {
    Type::tensor(DType::F32, [4])
}

/// `sum += x`, or `sum = x` in the first part.
fn accumulate() -> GraphResult<Graph> {
    let mut g = Builder::new();
    let x = g.step_input("x", Type::tensor(DType::I32, [4]))?;
    let x = g.cast(x, DType::F32)?;
    let first = g.step_input("first", Type::tensor(DType::F32, [1]))?;
    let state = g.state("sum", vector())?;
    let before = g.state_read(state)?;
    let zero = g.constant(DType::F32, 0.0)?;
    let is_first = g.gt(first, zero)?;
    let before = g.select(is_first, zero, before)?;
    let sum = g.add(before, x)?;
    g.state_write(state, sum)?;
    g.finish(Vec::new())
}

fn reduce() -> GraphResult<Graph> {
    let mut g = Builder::new();
    let sum = g.weight("sum", vector())?;
    let total = g.reduce_sum(sum, 0)?;
    g.finish(vec![("total".into(), total)])
}

/// `w += sum`.
fn update() -> GraphResult<Graph> {
    let mut g = Builder::new();
    let sum = g.weight("sum", vector())?;
    let state = g.state("w", vector())?;
    let w = g.state_read(state)?;
    let next = g.add(w, sum)?;
    g.state_write(state, next)?;
    g.finish(Vec::new())
}

fn schedule() -> Schedule {
    let stage =
        |name, graph: GraphResult<Graph>, outputs, times| Stage { name, graph: graph.expect("builds"), outputs, times };
    Schedule {
        stages: vec![
            stage("accumulate", accumulate(), vec![], Times::EachPart),
            stage("reduce", reduce(), vec!["total"], Times::Once),
            stage("update", update(), vec![], Times::Once),
        ],
    }
}

#[derive(Default)]
struct Driver {
    totals: Vec<f32>,
    filled: Vec<(&'static str, usize)>,
    ends: bool,
}

impl ScheduleDriver for Driver {
    type Error = RuntimeError;

    fn fill(&mut self, stage: &'static str, part: usize, inputs: &mut StageInputs<'_>) -> Result<(), RuntimeError> {
        self.filled.push((stage, part));
        if stage == "accumulate" {
            assert!(inputs.has("x") && !inputs.has("y"));
            inputs.set_i32("x", &[part as i32 + 1; 4])?;
            inputs.set_scalar("first", DType::F32, if part == 0 { 1.0 } else { 0.0 })?;
        }
        Ok(())
    }

    fn done(&mut self, stage: &'static str, outputs: &mut StageOutputs<'_>) -> Result<ControlFlow<()>, RuntimeError> {
        assert_eq!(stage, "reduce");
        self.totals.extend(outputs.f32s("total")?);
        Ok(if self.ends { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }
}

fn values(session: &Session, name: &str) -> Vec<f64> {
    let bytes = session.backend().read(&session.state(name).expect("is allocated")).expect("reads");
    DType::F32.decode(&bytes)
}

#[test]
fn stages_run_in_order_and_a_driver_may_leave_out_those_that_are_left() {
    let cpu = || -> Arc<dyn Backend> {
        Arc::new(Cpu::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).expect("starts"))
    };
    for backend in [cpu(), Arc::new(Late::new(cpu(), 2))] {
        let mut session = Session::new(backend);
        let mut bound = schedule().bind(&mut session, &Bindings::new()).unwrap_or_else(|e| panic!("{e}"));
        let mut driver = Driver::default();
        // More parts than steps may be in flight.
        bound.pass(5, &mut driver).unwrap_or_else(|e| panic!("{e}"));
        bound.wait().expect("completes");
        assert_eq!(values(&session, "w"), [15.0; 4]);
        driver.ends = true;
        bound.pass(2, &mut driver).expect("runs");
        assert_eq!(values(&session, "w"), [15.0; 4], "the update was left out");
        driver.ends = false;
        bound.pass(1, &mut driver).expect("runs");
        bound.wait().expect("completes");
        assert_eq!(values(&session, "w"), [16.0; 4], "what was accumulated before is replaced");
        assert_eq!(driver.totals, [60.0, 12.0, 4.0]);
        let stages: Vec<&str> = driver.filled.iter().map(|(stage, _)| *stage).collect();
        let wanted =
            [&["accumulate"; 5][..], &["reduce", "update", "accumulate", "accumulate", "reduce", "accumulate"]];
        assert_eq!(stages, [&wanted.concat()[..], &["reduce", "update"]].concat());
    }
}

#[test]
fn memory_is_predicted_before_anything_is_allocated() {
    let cpu: Arc<dyn Backend> = Arc::new(Cpu::new(CpuOptions::default()).expect("starts"));
    let before = cpu.memory().live;
    let (schedule, none) = (schedule(), Bindings::new());
    let parameters = schedule.parameter_memory(&none, &*cpu, &HashSet::new()).expect("has no symbols").on_device();
    let programs = ProgramCache::new(Arc::clone(&cpu));
    let besides = schedule.memory(&programs, &none).expect("compiles");
    assert_eq!(cpu.memory().live, before);
    assert!(besides.on_device() > 0);
    let mut session = Session::new(Arc::clone(&cpu));
    let _bound = schedule.bind(&mut session, &none).expect("binds");
    let allocated = cpu.memory().live;
    assert_eq!(allocated.get(MemoryOwner::States) + allocated.get(MemoryOwner::Weights), parameters);
}
