//! Assignment of collectives and of copies between memories to the communication lane, and the launches that wait for them.
//!
//! Launches keep the order of the plan. One of these that can overlap with computation starts at its position and continues on the
//! communication lane, whose launches run one after another. A launch that reads its results, or overwrites memory that it reads or
//! writes, waits for it. Memory is planned as if nothing overlapped; the remaining dependencies follow from the operands' offsets.

use ridge_graph::{Bindings, CollectiveKind, Graph, Op, Prim, Type};

use crate::error::Result;
use crate::launches::{Place, Plan, Region, component_offsets};

/// Bytes of a block of memory.
#[derive(Clone, Copy)]
struct Span {
    region: Region,
    start: usize,
    end: usize,
}

impl Span {
    fn touches(self, other: Self) -> bool {
        self.region == other.region && self.start < other.end && other.start < self.end
    }
}

struct Operands {
    reads: Vec<Span>,
    writes: Vec<Span>,
}

/// Does the node communicate with other ranks, or copy between the memories of device and host?
pub(crate) fn runs_beside(op: &Op) -> bool {
    matches!(op, Op::Prim(Prim::Move(_) | Prim::Fetch(_)))
        || matches!(op, Op::Prim(Prim::Collective { kind, ranks, .. }) if *ranks > 1 && !matches!(kind, CollectiveKind::Split(_)))
}

/// Puts the collectives of `plan` in the lane of communication, if anything can be computed beside one of them. Else they stay
/// among the others: handing them over would only cost time.
pub(crate) fn assign(plan: &mut Plan, graph: &Graph, bindings: &Bindings) -> Result<()> {
    let op = |plan: &Plan, launch: usize| {
        let kernel = &plan.kernels[plan.launches[launch].kernel];
        runs_beside(&graph.function(kernel.func).nodes[kernel.node].op)
    };
    let collectives: Vec<bool> = (0..plan.launches.len()).map(|launch| op(plan, launch)).collect();
    if !collectives.contains(&true) {
        return Ok(());
    }
    let operands = (0..plan.launches.len()).map(|launch| spans(plan, graph, bindings, launch));
    let operands = operands.collect::<Result<Vec<_>>>()?;
    // How many collectives must be complete before each launch. They complete in their order.
    let mut after = vec![0; plan.launches.len()];
    let mut overlaps = false;
    let mut begun: Vec<usize> = Vec::new();
    for launch in 0..plan.launches.len() {
        if collectives[launch] {
            begun.push(launch);
            continue;
        }
        let waits = |collective: &usize| {
            let (of, own) = (&operands[*collective], &operands[launch]);
            own.reads.iter().chain(&own.writes).any(|span| of.writes.iter().any(|given| given.touches(*span)))
                || own.writes.iter().any(|span| of.reads.iter().any(|read| read.touches(*span)))
        };
        // Those that launches before this one have waited for are complete.
        let complete = after[..launch].iter().max().copied().unwrap_or(0);
        let last = begun[complete..].iter().rposition(waits);
        after[launch] = last.map_or(0, |last| complete + last + 1);
        overlaps |= after[launch].max(complete) < begun.len();
    }
    if overlaps {
        for (launch, (communicates, after)) in plan.launches.iter_mut().zip(collectives.into_iter().zip(after)) {
            (launch.communicates, launch.after) = (communicates, after);
        }
    }
    Ok(())
}

fn spans(plan: &Plan, graph: &Graph, bindings: &Bindings, launch: usize) -> Result<Operands> {
    let launch = &plan.launches[launch];
    let kernel = &plan.kernels[launch.kernel];
    let function = graph.function(kernel.func);
    let node = &function.nodes[kernel.node];
    let span = |place: &Place, ty: &Type| -> Result<Span> {
        let end = place.offset + component_offsets(ty, bindings)?.1;
        Ok(Span { region: place.region, start: place.offset, end })
    };
    let reads = launch.inputs.iter().zip(&node.inputs).map(|(place, var)| span(place, function.ty(*var)));
    let writes = launch.outputs.iter().zip(&node.outputs).map(|(place, ty)| span(place, ty));
    Ok(Operands { reads: reads.collect::<Result<_>>()?, writes: writes.collect::<Result<_>>()? })
}
