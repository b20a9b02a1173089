//! A backend for tests that completes as late as the contract allows: a step runs only when somebody has polled it
//! several times or waits for it, and staging memory is poisoned while the device has it. Callers that rely on more fail
//! here.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use ridge_graph::passes::Kernel;
use ridge_graph::{Bindings, Graph, Type};

use crate::backend::{Backend, Buffer, Program, Run, WeightData};
use crate::error::Result;
use crate::memory::{MemoryBytes, MemoryUse};
use crate::plan::plan;

/// Wraps another backend.
pub struct Late {
    inner: Arc<dyn Backend>,
    queue: Arc<StepQueue>,
    polls: usize,
}

/// Steps in the order of submission.
type StepQueue = Mutex<VecDeque<Arc<Mutex<LateStep>>>>;

struct LateStep {
    run: Box<dyn Run>,
    inputs: Vec<Vec<u8>>,
    outputs: Vec<Vec<u8>>,
    outcome: Option<Result<()>>,
}

impl Late {
    /// Steps of `inner` complete after `polls` polls, or when waited for.
    pub fn new(inner: Arc<dyn Backend>, polls: usize) -> Self {
        Self { inner, queue: Arc::default(), polls }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs queued steps, in order, until `until` is done; all of them without it. The queue stays locked meanwhile, so that
/// whoever finds it empty knows that every step has run.
fn drain(queue: &StepQueue, until: Option<&Arc<Mutex<LateStep>>>) {
    let mut queue = lock(queue);
    while let Some(step) = queue.pop_front() {
        {
            let step = &mut *lock(&step);
            for (i, bytes) in step.inputs.iter().enumerate() {
                step.run.input(i).copy_from_slice(bytes);
            }
            step.outcome = Some(step.run.submit().and_then(|()| step.run.wait()));
            for (i, bytes) in step.outputs.iter_mut().enumerate() {
                bytes.copy_from_slice(step.run.output(i));
            }
        }
        if until.is_some_and(|u| Arc::ptr_eq(u, &step)) {
            return;
        }
    }
}

impl Backend for Late {
    fn name(&self) -> &'static str {
        "late"
    }

    fn kernels(&self) -> &[Kernel] {
        self.inner.kernels()
    }

    fn upload(&self, ty: &Type, parts: Vec<WeightData>) -> Result<Buffer> {
        self.inner.upload(ty, parts)
    }

    fn set_layout(&self, buffer: &Buffer, ty: &Type, layout: &str) -> Result<()> {
        self.inner.set_layout(buffer, ty, layout)
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        self.inner.allocate(bytes)
    }

    fn is_writable(&self, buffer: &Buffer) -> bool {
        self.inner.is_writable(buffer)
    }

    fn read(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        drain(&self.queue, None);
        self.inner.read(buffer)
    }

    fn write(&self, buffer: &Buffer, bytes: &[u8]) -> Result<()> {
        drain(&self.queue, None);
        self.inner.write(buffer, bytes)
    }

    fn memory(&self) -> MemoryUse {
        self.inner.memory()
    }

    fn padded_bytes(&self, bytes: usize) -> usize {
        self.inner.padded_bytes(bytes)
    }

    fn compile(&self, graph: Arc<Graph>) -> Result<Box<dyn Program>> {
        let inner = self.inner.compile(Arc::clone(&graph))?;
        Ok(Box::new(LateProgram { graph, inner, queue: Arc::clone(&self.queue), polls: self.polls }))
    }
}

struct LateProgram {
    graph: Arc<Graph>,
    inner: Box<dyn Program>,
    queue: Arc<StepQueue>,
    polls: usize,
}

impl Program for LateProgram {
    fn bind(&self, bindings: &Bindings, weights: &[Buffer], states: &[Buffer]) -> Result<Box<dyn Run>> {
        let run = self.inner.bind(bindings, weights, states)?;
        let sizes = plan(&self.graph, bindings)?;
        let poisoned = |sizes: &[usize]| sizes.iter().map(|n| vec![POISON; *n]).collect::<Vec<_>>();
        let (inputs, outputs) = (poisoned(&sizes.input_bytes), poisoned(&sizes.output_bytes));
        let step = LateStep { run, inputs: inputs.clone(), outputs: outputs.clone(), outcome: Some(Ok(())) };
        Ok(Box::new(LateRun {
            step: Arc::new(Mutex::new(step)),
            inputs,
            outputs,
            queue: Arc::clone(&self.queue),
            polls: self.polls,
            polled: 0,
        }))
    }

    fn memory(&self, bindings: &Bindings) -> Result<MemoryBytes> {
        self.inner.memory(bindings)
    }
}

/// What staging memory holds while it belongs to the device.
const POISON: u8 = 0xa5;

struct LateRun {
    step: Arc<Mutex<LateStep>>,
    inputs: Vec<Vec<u8>>,
    outputs: Vec<Vec<u8>>,
    queue: Arc<StepQueue>,
    polls: usize,
    polled: usize,
}

impl Run for LateRun {
    fn input(&mut self, index: usize) -> &mut [u8] {
        &mut self.inputs[index]
    }

    fn submit(&mut self) -> Result<()> {
        {
            let step = &mut *lock(&self.step);
            std::mem::swap(&mut step.inputs, &mut self.inputs);
            step.outcome = None;
        }
        self.inputs.iter_mut().chain(&mut self.outputs).for_each(|bytes| bytes.fill(POISON));
        self.polled = 0;
        lock(&self.queue).push_back(Arc::clone(&self.step));
        Ok(())
    }

    fn poll(&mut self) -> Result<bool> {
        self.polled += 1;
        if self.polled <= self.polls {
            return Ok(false);
        }
        self.wait().map(|()| true)
    }

    fn wait(&mut self) -> Result<()> {
        if lock(&self.step).outcome.is_none() {
            drain(&self.queue, Some(&self.step));
        }
        let step = &mut *lock(&self.step);
        for (mine, theirs) in self.outputs.iter_mut().zip(&step.outputs) {
            mine.copy_from_slice(theirs);
        }
        step.outcome.replace(Ok(())).unwrap_or(Ok(()))
    }

    fn output(&self, index: usize) -> &[u8] {
        &self.outputs[index]
    }

    fn memory(&self) -> MemoryBytes {
        lock(&self.step).run.memory()
    }
}
