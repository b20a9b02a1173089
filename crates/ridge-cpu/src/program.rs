//! Programs: kernels made for the fixed shapes of a bucket, and the bucket's memory.

use std::sync::Arc;

use ridge_graph::{Bindings, FuncId, Function, Graph, GroupKind, Op, Type};
use ridge_runtime::{Buffer, MemoryBytes, MemoryOwner, Plan, Program, Result, Run, RuntimeError, SLOTS, plan};

use crate::bucket::{BoundBucket, BucketMemory, arena_bytes};
use crate::device::CpuDevice;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec, OperandType};
use crate::memory::{AlignedMemory, padded};
use crate::repack::in_panels;
use crate::run::CpuRun;
use crate::slot::SlotMemory;
use crate::storage::{CpuStorage, hold, storage};
use crate::weight::BoundWeight;
use crate::{fused, prims};

pub(crate) struct CpuProgram {
    device: Arc<CpuDevice>,
    /// The kernels whose patterns the graph's groups were claimed by.
    registry: Arc<[KernelEntry]>,
    graph: Arc<Graph>,
}

impl CpuProgram {
    pub(crate) fn new(device: Arc<CpuDevice>, registry: Arc<[KernelEntry]>, graph: Arc<Graph>) -> Self {
        Self { device, registry, graph }
    }

    /// `weights` are what it is bound to, once it is. Before, they are taken to be in the layouts that its kernels want.
    fn kernels(&self, plan: &Plan, bindings: &Bindings, weights: &[Buffer]) -> Result<BucketKernels> {
        let made = plan.kernels.iter().map(|k| self.kernel(k.func, k.node, bindings, false).map(Arc::from));
        let mut made: Vec<Arc<dyn CpuKernel>> = made.collect::<Result<_>>()?;
        let has_panels = |weight: usize, inner: usize| match weights.get(weight).map(|b| storage(b).map(|s| &**s)) {
            Some(Ok(CpuStorage::Weight(weight))) => weight.is_in_panels(inner),
            Some(_) => false,
            None => true,
        };
        let (by_panels, inner) = in_panels(plan, &made, has_panels);
        for (kernel, of) in made.iter_mut().zip(&plan.kernels).zip(by_panels).filter_map(|(k, by)| by.then_some(k)) {
            *kernel = Arc::from(self.kernel(of.func, of.node, bindings, true)?);
        }
        Ok(BucketKernels { made, inner })
    }

    /// The kernel of node `node` of function `func`, with its weights in panels if `by_panels`.
    fn kernel(&self, func: FuncId, node: usize, bindings: &Bindings, by_panels: bool) -> Result<Box<dyn CpuKernel>> {
        let function = self.graph.function(func);
        let node = &function.nodes[node];
        let operands =
            |types: Vec<&Type>| types.into_iter().map(|t| operand(t, bindings, by_panels)).collect::<Result<_>>();
        let single;
        let body = match &node.op {
            Op::Group(group) => &group.body,
            _ => {
                single = Function::default();
                &single
            }
        };
        let spec = KernelSpec {
            body,
            inputs: operands(node.inputs.iter().map(|v| function.ty(*v)).collect())?,
            outputs: operands(node.outputs.iter().collect())?,
            bindings,
        };
        let made = match &node.op {
            Op::Prim(prim) => prims::make(prim, &spec, &self.device.mesh),
            Op::Group(group) => match &group.kind {
                GroupKind::Fused => fused::make(&spec),
                GroupKind::Kernel(name) => match self.registry.iter().find(|e| e.name() == &**name) {
                    Some(entry) => entry.make(&spec),
                    None => Err(format!("the backend has no kernel `{name}`; lower the graph with its own kernels")),
                },
            },
            Op::Arg(_) | Op::Composite(_) | Op::Call(_) => Err("the graph is not lowered".into()),
        };
        made.map_err(|why| RuntimeError::Unsupported {
            backend: "cpu",
            op: node.op_name().into(),
            at: if node.scope.is_empty() { function.name.to_string() } else { node.scope.to_string() },
            why,
        })
    }
}

/// What runs a plan's launches.
struct BucketKernels {
    made: Vec<Arc<dyn CpuKernel>>,
    /// Of each weight the elements of a row, if it is wanted in panels.
    inner: Vec<Option<usize>>,
}

fn operand(ty: &Type, bindings: &Bindings, panels: bool) -> Result<OperandType> {
    Ok(OperandType { dtype: ty.dtype, format: ty.format.clone(), shape: ty.shape.eval(bindings)?, panels })
}

impl Program for CpuProgram {
    fn bind(&self, bindings: &Bindings, weights: &[Buffer], states: &[Buffer]) -> Result<Box<dyn Run>> {
        let plan = plan(&self.graph, bindings)?;
        let BucketKernels { made: kernels, inner } = self.kernels(&plan, bindings, weights)?;
        let check = |kind: &'static str, buffers: &[Buffer], wanted: &[usize]| -> Result<()> {
            if buffers.len() != wanted.len() || buffers.iter().zip(wanted).any(|(b, w)| b.bytes() < *w) {
                let given: Vec<usize> = buffers.iter().map(Buffer::bytes).collect();
                let why = format!("needs buffers of {wanted:?} bytes, given are {given:?}");
                return Err(RuntimeError::Argument { kind, name: "all".into(), why });
            }
            Ok(())
        };
        check("weight", weights, &plan.weight_bytes)?;
        check("state", states, &plan.state_bytes)?;
        let weights: Vec<BoundWeight> = weights.iter().zip(inner).map(|(b, i)| hold(b, i)).collect::<Result<_>>()?;
        let states: Vec<Arc<AlignedMemory>> = states.iter().map(hold_state).collect::<Result<_>>()?;
        // Steps write states in place: nothing else may be the same memory.
        for (i, state) in states.iter().enumerate() {
            let is_weight = weights.iter().any(|w| matches!(w, BoundWeight::Rows(other) if Arc::ptr_eq(other, state)));
            if is_weight || states[..i].iter().any(|other| Arc::ptr_eq(other, state)) {
                let why = "is also another state or a weight".into();
                return Err(RuntimeError::Argument { kind: "state", name: i.to_string(), why });
            }
        }
        let zeroed = |owner: MemoryOwner, sizes: &[usize]| {
            let zeroed = sizes.iter().map(|n| AlignedMemory::zeroed(&self.device.ledger, owner, *n));
            zeroed.collect::<Result<Vec<_>>>()
        };
        let slots = (0..SLOTS).map(|_| {
            let staging = zeroed(MemoryOwner::Inputs, &plan.input_bytes)?;
            Ok(SlotMemory { staging, outputs: zeroed(MemoryOwner::Outputs, &plan.output_bytes)? })
        });
        let slots = slots.collect::<Result<Vec<_>>>()?;
        let memory = BucketMemory { weights, states, inputs: zeroed(MemoryOwner::Inputs, &plan.input_bytes)? };
        let arena_bytes = arena_bytes(&plan, &kernels);
        // Allocated here, so that no step has to.
        self.device.arena(arena_bytes)?;
        let bound = BoundBucket::new(&self.graph, &plan, bindings, kernels, (memory, slots), &self.device)?;
        Ok(Box::new(CpuRun::new(Arc::clone(&self.device), bound, arena_bytes, staging_bytes(&plan))))
    }

    fn memory(&self, bindings: &Bindings) -> Result<MemoryBytes> {
        let plan = plan(&self.graph, bindings)?;
        let [arena, host] = arena_bytes(&plan, &self.kernels(&plan, bindings, &[])?.made);
        let host = if host > 0 { padded(host) } else { 0 };
        Ok(staging_bytes(&plan).with(MemoryOwner::Workspace, padded(arena)).with(MemoryOwner::HostWorkspace, host))
    }
}

/// What a bucket has of its own: each input in memory by itself, as steps read it and staged in each slot, and each output
/// in each slot.
fn staging_bytes(plan: &Plan) -> MemoryBytes {
    let sum = |sizes: &[usize]| sizes.iter().map(|bytes| padded(*bytes)).sum::<usize>();
    MemoryBytes::default()
        .with(MemoryOwner::Inputs, (1 + SLOTS) * sum(&plan.input_bytes))
        .with(MemoryOwner::Outputs, SLOTS * sum(&plan.output_bytes))
}

/// A state is written in place, so it must be ours to write.
fn hold_state(buffer: &Buffer) -> Result<Arc<AlignedMemory>> {
    match &**storage(buffer)? {
        CpuStorage::Own(memory) => Ok(Arc::clone(memory)),
        CpuStorage::Weight(_) => Err(RuntimeError::Argument {
            kind: "state",
            name: "one of them".into(),
            why: "is a weight, which is read-only".into(),
        }),
    }
}
