//! A backend for tests that completes as late as the contract allows: a step runs only after it was polled several times or is
//! waited for, and staging memory is poisoned while the device owns it. Callers that rely on earlier completion fail.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use ridge_graph::passes::Kernel;
use ridge_graph::{Bindings, Graph, Type};

use crate::backend::{Backend, Buffer, Program, Run, SLOTS, Staged, WeightData};
use crate::error::{Result, RuntimeError};
use crate::memory::{MemoryBytes, MemoryUse};
use crate::order::StepOrder;
use crate::plan::plan;

/// Wraps another backend.
pub struct Late {
    inner: Arc<dyn Backend>,
    queue: Arc<StepQueue>,
    polls: usize,
}

/// Steps that were submitted and have not run.
#[derive(Default)]
struct StepQueue {
    order: StepOrder,
    /// In the order of submission. Locked while steps are submitted, so nothing else is locked while this is.
    steps: Mutex<VecDeque<Arc<Mutex<LateStep>>>>,
    /// Whoever runs steps.
    runs: Mutex<()>,
}

/// A bucket of the other backend, which runs one step at a time.
type InnerRun = Arc<Mutex<Box<dyn Run>>>;

/// The step of a slot.
struct LateStep {
    run: InnerRun,
    number: u64,
    held: bool,
    inputs: Vec<Vec<u8>>,
    staged: Vec<Staged>,
    outputs: Vec<Vec<u8>>,
    /// `None` while the step is queued.
    outcome: Option<Result<(), String>>,
}

impl LateStep {
    fn run(&mut self, order: &StepOrder) {
        self.outcome = Some(match order.failed_before(self.number) {
            Some(why) => Err(why),
            None => self.run_inner().map_err(|error| {
                let why = error.to_string();
                order.failed(self.number, &why);
                why
            }),
        });
    }

    fn run_inner(&mut self) -> Result<()> {
        let run = &mut *lock(&self.run);
        for Staged { input, bytes } in &self.staged {
            run.input(0, *input)[..*bytes].copy_from_slice(&self.inputs[*input][..*bytes]);
        }
        run.submit(0, &self.staged, false)?;
        run.wait(0)?;
        for (i, bytes) in self.outputs.iter_mut().enumerate() {
            bytes.copy_from_slice(run.output(0, i));
        }
        Ok(())
    }
}

impl Late {
    /// Steps of `inner` complete after `polls` polls, or when waited for.
    pub fn new(inner: Arc<dyn Backend>, polls: usize) -> Self {
        Self { inner, queue: Arc::default(), polls }
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs queued steps, in order, until `until` is done; all of them without it. A held step is the last in the queue, and
/// stays there. One thread at a time runs steps, so that whoever finds none knows that every step has run.
fn drain(queue: &StepQueue, until: Option<&Arc<Mutex<LateStep>>>) {
    let _alone = lock(&queue.runs);
    loop {
        let Some(step) = lock(&queue.steps).front().cloned() else { return };
        {
            let step = &mut *lock(&step);
            if step.held {
                return;
            }
            step.run(&queue.order);
        }
        lock(&queue.steps).pop_front();
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

    fn allocate_on_host(&self, bytes: usize) -> Result<Buffer> {
        self.inner.allocate_on_host(bytes)
    }

    fn is_writable(&self, buffer: &Buffer) -> bool {
        self.inner.is_writable(buffer)
    }

    fn read(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        self.queue.order.wait_released()?;
        drain(&self.queue, None);
        self.inner.read(buffer)
    }

    fn write(&self, buffer: &Buffer, bytes: &[u8]) -> Result<()> {
        self.queue.order.wait_released()?;
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
        let run = Arc::new(Mutex::new(self.inner.bind(bindings, weights, states)?));
        let sizes = plan(&self.graph, bindings)?;
        let poisoned = |sizes: &[usize]| sizes.iter().map(|n| vec![POISON; *n]).collect::<Vec<_>>();
        let (inputs, outputs) = (poisoned(&sizes.input_bytes), poisoned(&sizes.output_bytes));
        let slot = || {
            let step = LateStep {
                run: Arc::clone(&run),
                number: 0,
                held: false,
                inputs: inputs.clone(),
                staged: Vec::new(),
                outputs: outputs.clone(),
                outcome: Some(Ok(())),
            };
            LateSlot { step: Arc::new(Mutex::new(step)), inputs: inputs.clone(), outputs: outputs.clone(), polled: 0 }
        };
        let slots = std::array::from_fn(|_| slot());
        Ok(Box::new(LateRun { run, slots, queue: Arc::clone(&self.queue), polls: self.polls }))
    }

    fn memory(&self, bindings: &Bindings) -> Result<MemoryBytes> {
        self.inner.memory(bindings)
    }
}

/// What staging memory holds while it belongs to the device.
const POISON: u8 = 0xa5;

struct LateRun {
    run: InnerRun,
    slots: [LateSlot; SLOTS],
    queue: Arc<StepQueue>,
    polls: usize,
}

/// A slot as its user sees it.
struct LateSlot {
    step: Arc<Mutex<LateStep>>,
    inputs: Vec<Vec<u8>>,
    outputs: Vec<Vec<u8>>,
    polled: usize,
}

impl LateSlot {
    /// The step takes over what was staged.
    fn take(&mut self, staged: &[Staged]) {
        let step = &mut *lock(&self.step);
        for Staged { input, .. } in staged {
            step.inputs[*input].copy_from_slice(&self.inputs[*input]);
            self.inputs[*input].fill(POISON);
        }
        step.staged.extend_from_slice(staged);
    }
}

impl Run for LateRun {
    fn input(&mut self, slot: usize, index: usize) -> &mut [u8] {
        &mut self.slots[slot].inputs[index]
    }

    fn submit(&mut self, slot: usize, staged: &[Staged], held: bool) -> Result<()> {
        let (queue, slot) = (&*self.queue, &mut self.slots[slot]);
        queue.order.submit(held, |number| {
            {
                let step = &mut *lock(&slot.step);
                (step.number, step.held, step.outcome) = (number, held, None);
                step.staged.clear();
            }
            slot.take(staged);
            lock(&queue.steps).push_back(Arc::clone(&slot.step));
            Ok(())
        })?;
        slot.outputs.iter_mut().for_each(|bytes| bytes.fill(POISON));
        slot.polled = 0;
        Ok(())
    }

    fn release(&mut self, slot: usize, staged: &[Staged]) -> Result<()> {
        let slot = &mut self.slots[slot];
        slot.take(staged);
        let number = lock(&slot.step).number;
        self.queue.order.release(number, || {
            lock(&slot.step).held = false;
            Ok(())
        })
    }

    fn poll(&mut self, slot: usize) -> Result<bool> {
        let polled = &mut self.slots[slot].polled;
        *polled += 1;
        if *polled <= self.polls {
            return Ok(false);
        }
        self.wait(slot).map(|()| true)
    }

    fn wait(&mut self, slot: usize) -> Result<()> {
        let slot = &mut self.slots[slot];
        let queued = lock(&slot.step).outcome.is_none();
        if queued {
            drain(&self.queue, Some(&slot.step));
        }
        let step = &mut *lock(&slot.step);
        for (mine, theirs) in slot.outputs.iter_mut().zip(&step.outputs) {
            mine.copy_from_slice(theirs);
        }
        match &step.outcome {
            Some(Err(why)) => {
                self.queue.order.reported(step.number);
                Err(RuntimeError::Device { backend: "late", why: why.clone() })
            }
            Some(Ok(())) => Ok(()),
            None => Err(RuntimeError::Device { backend: "late", why: "the step waits for its late inputs".into() }),
        }
    }

    fn output(&self, slot: usize, index: usize) -> &[u8] {
        &self.slots[slot].outputs[index]
    }

    fn memory(&self) -> MemoryBytes {
        lock(&self.run).memory()
    }
}
