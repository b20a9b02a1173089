//! Launches of a bucket, queued one by one in their lanes.

use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;

use ridge_runtime::{LaunchTime, Result, Staged};

use super::CudaRun;
use crate::args;
use crate::communicator::Parts;
use crate::cublaslt::GemmOperands;
use crate::device::StreamQueue;
use crate::error::device as failed;
use crate::kernel::{CollectiveAction, SlotOffset};
use crate::program::actions::BoundWork;
use crate::program::lanes::LaneWalk;

impl CudaRun {
    /// Queues launches, and does `after` each of their actions. All lanes have come to the end of what is computed then.
    pub(super) fn queue_all(
        &mut self,
        actions: Range<usize>,
        mut after: impl FnMut(usize, &StreamQueue<'_>) -> Result<()>,
    ) -> Result<()> {
        let device = Arc::clone(&self.device);
        let lanes = [device.queue()?, device.side_queue()?];
        let mut walk = LaneWalk::default();
        for index in actions {
            let launch = self.actions[index].launch;
            self.lanes.come_to(launch, &mut walk, &lanes)?;
            let queue = &lanes[usize::from(self.plan.launches[launch].communicates)];
            let mut outcome = self.queue_one(queue, index);
            if outcome.is_ok() && self.options.check_launches {
                outcome = self.device.synchronize();
            }
            outcome.map_err(|error| failed(format!("{} failed: {error}", self.described(index))))?;
            after(index, queue)?;
        }
        self.lanes.join(&mut walk, &lanes)
    }

    /// Runs a step with a timed event behind each launch.
    pub(super) fn queue_timed(&mut self, slot: usize, staged: &[Staged]) -> Result<Vec<LaunchTime>> {
        let device = Arc::clone(&self.device);
        let events = (0..=self.actions.len()).map(|_| device.timed_event()).collect::<Result<Vec<_>>>()?;
        let queue = device.queue()?;
        self.ranks.agree()?;
        self.lease_arena()?;
        (self.slots[slot].arena, self.slots[slot].host_arena) = (self.arena.take(), self.host_arena.take());
        self.poison(&queue, slot)?;
        self.queue_inputs(&queue, slot, staged)?;
        events[0].record()?;
        self.queue_all(0..self.actions.len(), |index, lane| lane.record(&events[index + 1]))?;
        self.queue_outputs(&queue, slot)?;
        self.slots[slot].done.record()?;
        self.slots[slot].done.wait()?;
        let mut times: Vec<LaunchTime> = Vec::with_capacity(self.plan.launches.len());
        // When the action before ended, of those that compute and of those that communicate beside them.
        let mut lanes = [0.0f64; 2];
        let mut actions = self.actions.iter().zip(&events[1..]).peekable();
        for (launch, planned) in self.plan.launches.iter().enumerate() {
            let of = &self.plan.kernels[planned.kernel];
            // Communication begins when what is before it has been computed, and communicated.
            let lane = usize::from(planned.communicates);
            let before = lanes[0].max(lanes[lane]);
            let mut end = before;
            while let Some((_, event)) = actions.next_if(|(action, _)| action.launch == launch) {
                end = before.max(event.since(&events[0])?);
            }
            lanes[lane] = end;
            let (path, seconds) = (planned.path.clone(), end - before);
            times.push(LaunchTime { func: of.func, node: of.node, path, end, seconds });
        }
        Ok(times)
    }

    fn queue_one(&mut self, queue: &StreamQueue<'_>, index: usize) -> Result<()> {
        let action = &self.actions[index];
        match &action.work {
            BoundWork::Launch { kernel, grid, threads, shared, early, first, args } => {
                args::point(args, &mut self.words[*first..], &mut self.params);
                // SAFETY: the arguments are what the kernel's text declares, in its order; operands are as large as the
                // plan says, and this bucket holds them until the step is done.
                unsafe { queue.launch(kernel, *grid, *threads, *shared, *early, &mut self.params) }
            }
            BoundWork::Product { product, operands } => {
                let (library, workspace) = self.device.products().expect("made by it");
                let [x, w, r, y, bias, aux, xs, ws] =
                    operands.map(|(slot, offset)| self.address(action.launch, slot) + offset as u64);
                let scales = [xs, ws];
                let of = GemmOperands { x, w, r, y, bias, aux, scales, workspace: workspace.address() };
                // SAFETY: operands are as large as the plan says and aligned as it aligns, and this bucket holds them
                // until the step is done; products of one stream take turns with the workspace.
                unsafe { product.queue(library, of, queue.stream()) }
            }
            BoundWork::Collective { communicator, action: of } => {
                if self.options.check_launches {
                    communicator.agree(&of.what)?;
                }
                let at = |(slot, offset): SlotOffset| self.address(action.launch, slot) + offset as u64;
                let CollectiveAction { transfer, count, elements, bytes, .. } = *of;
                let parts = Parts { from: at(of.from), to: at(of.to), count, elements, bytes };
                // SAFETY: operands and scratch memory are as large as the plan and the kernel say, and this bucket holds
                // them until the step is done.
                unsafe { communicator.queue(transfer, parts, queue) }
            }
            BoundWork::Copy { from, to, to_offset, bytes } => {
                let to = self.address(action.launch, *to) + *to_offset as u64;
                // SAFETY: operands are as large as the plan says, and an output overlaps no input.
                unsafe { queue.copy(to, self.address(action.launch, *from), *bytes) }
            }
            BoundWork::Constant { at, to, bytes } => {
                let (to, from) = (self.address(action.launch, *to), self.constants.address() + *at as u64);
                // SAFETY: as above; the constants were uploaded to where they are copied from.
                unsafe { queue.copy(to, from, *bytes) }
            }
        }
    }

    /// The op of a step with its operands, and where in the model it is.
    fn described(&self, index: usize) -> String {
        let launch = &self.plan.launches[self.actions[index].launch];
        let of = &self.plan.kernels[launch.kernel];
        let function = self.graph.function(of.func);
        let node = &function.nodes[of.node];
        let typed = |types: Vec<ridge_graph::DType>, shapes: &[Vec<usize>]| -> String {
            let texts = types.iter().zip(shapes).map(|(t, s)| format!("{t}{s:?}"));
            texts.collect::<Vec<_>>().join(", ")
        };
        let inputs = typed(node.inputs.iter().map(|v| function.ty(*v).dtype).collect(), &of.inputs);
        let outputs = typed(node.outputs.iter().map(|t| t.dtype).collect(), &of.outputs);
        let mut text = format!("{}({inputs}) -> {outputs}", node.op_name());
        let at: Vec<&str> = launch.path.iter().map(|s| &**s).chain([&*node.scope]).filter(|s| !s.is_empty()).collect();
        if !at.is_empty() {
            let _ = write!(text, " at {}", at.join("."));
        }
        text
    }
}
