//! Groups in their parts: what takes the place of a kernel that is for few rows where there are many. What is between the parts is in
//! scratch memory, which the plan of a bucket does not share with values: its largest is added to the workspace.

use std::collections::HashMap;

use ridge_graph::passes::{Extents, Kernel, claim, decompose, fuse, fuse_views, tidy};
use ridge_graph::{FuncId, Function, Graph, GroupKind, Node, Op, Prim, Var};

use crate::communicator::MeshRanks;
use crate::kernel::{CudaKernel, CudaKernelSpec, CudaOperand, OperandSlot, SlotOffset};
use crate::{fused, prims};

/// Values between the parts begin at a multiple of this many bytes.
const ALIGN: usize = 256;

/// Makes the kernel of this name.
type MakePart<'a> = &'a dyn Fn(&str, &CudaKernelSpec<'_>) -> Result<CudaKernel, String>;

/// The ops of the group `spec` by `kernels`, which are for any number of rows and which `make_part` makes, one after another, with what
/// is between them in scratch memory.
///
/// # Errors
/// When one of the ops has no such kernel, or not for these shapes.
pub(super) fn make(
    kernels: &[Kernel],
    make_part: MakePart<'_>,
    spec: &CudaKernelSpec<'_>,
) -> Result<CudaKernel, String> {
    let mut graph = Graph { functions: vec![spec.body.clone()], main: FuncId(0) };
    claim(&mut graph, kernels, Extents::Any);
    // As the whole graph is lowered.
    while decompose(&mut graph, |_| false).map_err(|e| e.to_string())? {
        tidy(&mut graph);
        claim(&mut graph, kernels, Extents::Any);
    }
    fuse(&mut graph);
    tidy(&mut graph);
    fuse_views(&mut graph);
    let function = graph.main();
    let mut places: HashMap<Var, SlotOffset> = HashMap::new();
    for (i, output) in function.outputs.iter().enumerate() {
        places.insert(output.var, (OperandSlot::Output(i), 0));
    }
    // What a result is a view of is made in its place, unless that is a result or an argument itself.
    for output in &function.outputs {
        let mut var = output.var;
        while let Node { op: Op::Prim(Prim::Reshape(_)), inputs, .. } = &function.nodes[var.index()]
            && !places.contains_key(&inputs[0])
            && !matches!(function.nodes[inputs[0].index()].op, Op::Arg(_))
        {
            places.insert(inputs[0], places[&output.var]);
            var = inputs[0];
        }
    }
    let (mut parts, mut between) = (Vec::new(), 0usize);
    for (i, node) in function.nodes.iter().enumerate() {
        // Another view of its input, unless it is a result in another place.
        if let Op::Prim(Prim::Reshape(_)) = &node.op {
            let of_input = places[&node.inputs[0]];
            if *places.entry(function.var(i, 0)).or_insert(of_input) == of_input {
                continue;
            }
        }
        let operand = |ty| CudaOperand::new(ty, spec.bindings);
        let outputs: Vec<CudaOperand> = node.outputs.iter().map(operand).collect::<Result<_, _>>()?;
        if let Op::Arg(of) = &node.op {
            places.insert(function.var(i, 0), (OperandSlot::Input(*of), 0));
            continue;
        }
        for (out, operand) in outputs.iter().enumerate() {
            places.entry(function.var(i, out)).or_insert_with(|| {
                let at = between;
                between = (between + operand.bytes).next_multiple_of(ALIGN);
                (OperandSlot::Scratch, at)
            });
        }
        let inputs = node.inputs.iter().map(|v| operand(function.ty(*v))).collect::<Result<_, _>>()?;
        let none = Function::default();
        let body = if let Op::Group(group) = &node.op { &group.body } else { &none };
        let part = CudaKernelSpec { body, inputs, outputs, ..*spec };
        let kernel = match &node.op {
            Op::Group(group) => match &group.kind {
                GroupKind::Kernel(name) => make_part(name, &part)?,
                GroupKind::Fused => fused::make(&part)?,
            },
            Op::Prim(prim) => prims::make(prim, &part, &MeshRanks::new())?,
            op => return Err(format!("the part {op:?} has no kernel")),
        };
        parts.push((i, kernel));
    }
    let mut all = CudaKernel { actions: Vec::new(), scratch: between };
    for (i, part) in parts {
        let node = &function.nodes[i];
        let place = |slot: OperandSlot| match slot {
            OperandSlot::Input(of) => places[&node.inputs[of]],
            OperandSlot::Output(out) => places[&function.var(i, out)],
            OperandSlot::Scratch => (OperandSlot::Scratch, between),
            OperandSlot::Zeros => (OperandSlot::Zeros, 0),
        };
        all.scratch = all.scratch.max(between + part.scratch);
        for action in part.actions {
            all.actions.push(action.placed(&place)?);
        }
    }
    Ok(all)
}
