//! Kernels claim the parts of a graph that match their patterns.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use super::offer::{Extents, Kernel, Numerics, Offer, OfferRequest};
use super::order::Draft;
use super::pattern::{Match, outputs_of};
use crate::graph::{Arg, Function, Graph, Group, GroupKind, Node, Op, Output, Role, Var};

/// Lets `kernels` claim nodes in every function of a program that computes so many rows at a time. Where several match, the
/// one that saves the most predicted time wins; of equals, the first.
///
/// What a kernel saves is the time of its nodes apart, each by the cheapest kernel that offers to compute it alone or at
/// the roofline where there is none, less the time of its offer. For a deterministic target, a kernel is chosen for
/// any number of rows first; for a narrower range, only kernels that claim the same nodes in the same numerics class
/// replace it.
pub fn claim(graph: &mut Graph, kernels: &[Kernel], extents: Extents) {
    for function in &mut graph.functions {
        // From the outputs back, so that a kernel sees the whole chain that leads to its root.
        let mut root = function.nodes.len();
        while root > 0 {
            root -= 1;
            if !matches!(function.nodes[root].op, Op::Prim(_) | Op::Composite(_)) {
                continue;
            }
            if let Some((kernel, found)) = best(function, root, kernels, extents) {
                let before = function.nodes.len();
                *function = group(std::mem::take(function), GroupKind::Kernel(Arc::clone(&kernel.name)), &found);
                // The group is here or before, when what lay between its nodes reads it: look at this place again.
                root = root + 1 - (before - function.nodes.len());
            }
        }
    }
}

/// A kernel that offers to compute what it matched.
struct Candidate<'k> {
    kernel: &'k Kernel,
    found: Match,
    offer: Offer,
}

/// Predictions that differ by less than this part of the time saved from are equal.
const RESOLUTION: f64 = 1e-9;

fn best<'k>(function: &Function, root: usize, kernels: &'k [Kernel], extents: Extents) -> Option<(&'k Kernel, Match)> {
    let all = |extents| candidates(function, root, kernels, extents, |_| true);
    let any = fastest(function, kernels, all(Extents::Any), Extents::Any);
    let deterministic = kernels.iter().any(|k| k.target.deterministic);
    let chosen = match extents {
        Extents::Any => any,
        _ if deterministic => {
            let any = any?;
            let mut here = all(extents);
            here.retain(|c| c.found.nodes == any.found.nodes && c.offer.numerics == any.offer.numerics);
            fastest(function, kernels, here, extents).or(Some(any))
        }
        _ => fastest(function, kernels, all(extents), extents),
    };
    chosen.map(|c| (c.kernel, c.found))
}

/// The kernels whose matches at `root` are `wanted` and that make an offer which the target admits, in the order of their
/// registration.
fn candidates<'k>(
    function: &Function,
    root: usize,
    kernels: &'k [Kernel],
    extents: Extents,
    wanted: impl Fn(&Match) -> bool,
) -> Vec<Candidate<'k>> {
    let mut all = Vec::new();
    for kernel in kernels {
        for found in kernel.pattern.find(function, root) {
            if !wanted(&found) || !is_closed(function, &found) {
                continue;
            }
            let body = body(function, &found);
            let request = OfferRequest { body: &body, target: &kernel.target, extents };
            let Some(offer) = (kernel.offer)(&request) else { continue };
            let admitted = offer.seconds.is_finite()
                && offer.workspace_bytes <= kernel.target.workspace_bytes
                && !(kernel.target.deterministic && offer.numerics == Numerics::ByExtents);
            if admitted {
                all.push(Candidate { kernel, found, offer });
            }
        }
    }
    all
}

/// The candidate that saves the most time; of equals, the first.
fn fastest<'k>(
    function: &Function,
    kernels: &[Kernel],
    candidates: Vec<Candidate<'k>>,
    extents: Extents,
) -> Option<Candidate<'k>> {
    if candidates.len() < 2 {
        return candidates.into_iter().next();
    }
    let mut best: Option<(f64, Candidate<'_>)> = None;
    for candidate in candidates {
        let apart: f64 = candidate.found.nodes.iter().map(|n| seconds_alone(function, *n, kernels, extents)).sum();
        let saved = apart - candidate.offer.seconds;
        if best.as_ref().is_none_or(|(most, _)| saved > most + RESOLUTION * apart) {
            best = Some((saved, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

/// The time of one node: by the cheapest kernel that offers to compute it alone, else at the roofline of the target.
fn seconds_alone(function: &Function, node: usize, kernels: &[Kernel], extents: Extents) -> f64 {
    let offers = candidates(function, node, kernels, extents, |found| found.nodes == [node]);
    let cheapest = offers.iter().map(|c| c.offer.seconds).min_by(f64::total_cmp);
    cheapest.unwrap_or_else(|| {
        let inputs = &function.nodes[node].inputs;
        let body = extract(function, &[node], inputs, &outputs_of(function, [node]));
        let target = kernels.first().map(|k| Arc::clone(&k.target)).unwrap_or_default();
        OfferRequest { body: &body, target: &target, extents }.roofline()
    })
}

/// Is every use of an inner value within the match, or the value a result; and does nothing that the match reads
/// come of the match itself?
fn is_closed(function: &Function, found: &Match) -> bool {
    let inside = |node: usize| found.nodes.contains(&node);
    let hidden = |v: &Var| inside(v.index()) && !found.results.contains(v);
    let leaks = function.nodes.iter().enumerate().any(|(i, n)| !inside(i) && n.inputs.iter().any(hidden))
        || function.outputs.iter().any(|o| hidden(&o.var));
    // `add(%m, %m)` with `%m` a product fits `a * b + c` with `c` the product itself, which would no longer be there.
    let own = found.inputs.iter().any(|v| inside(v.index()));
    !leaks && !own && !reaches(function, &found.nodes, &found.inputs)
}

/// Does one of `targets` depend on one of `nodes` by a path outside of them?
pub(super) fn reaches(function: &Function, nodes: &[usize], targets: &[Var]) -> bool {
    let Some(first) = nodes.iter().min() else { return false };
    let mut stack: Vec<usize> = targets.iter().map(|v| v.index()).filter(|n| !nodes.contains(n)).collect();
    // What updates a state comes after every reader of the version that it replaces.
    let readers = |updater: usize| {
        let node = &function.nodes[updater];
        let states: Vec<Var> = if node.outputs.iter().any(|t| t.state) {
            node.inputs.iter().copied().filter(|v| function.ty(*v).state).collect()
        } else {
            Vec::new()
        };
        let reads = move |n: &usize| *n != updater && function.nodes[*n].inputs.iter().any(|v| states.contains(v));
        (0..updater).filter(reads).collect::<Vec<_>>()
    };
    for node in nodes {
        stack.extend(readers(*node).into_iter().filter(|n| !nodes.contains(n)));
    }
    let mut seen = vec![false; function.nodes.len()];
    while let Some(node) = stack.pop() {
        if nodes.contains(&node) {
            return true;
        }
        // Inputs and readers come before, so nothing before the first node depends on it.
        if node > *first && !std::mem::replace(&mut seen[node], true) {
            stack.extend(function.nodes[node].inputs.iter().map(|v| v.index()));
            stack.extend(readers(node));
        }
    }
    false
}

/// The matched nodes as a function of what they read.
fn body(function: &Function, found: &Match) -> Function {
    let order: Vec<usize> = {
        let mut nodes = found.nodes.clone();
        nodes.sort_unstable();
        nodes
    };
    extract(function, &order, &found.inputs, &found.results)
}

/// `nodes` (in order) as a function of `inputs` that gives `results` of theirs.
pub(super) fn extract(function: &Function, nodes: &[usize], inputs: &[Var], results: &[Var]) -> Function {
    let mut body = Function { name: "".into(), owner: function.owner, ..Function::default() };
    let mut map = std::collections::HashMap::new();
    for (i, var) in inputs.iter().enumerate() {
        let ty = function.ty(*var).clone();
        body.args.push(Arg::new(i.to_string(), ty.clone(), Role::Data));
        body.nodes.push(Node { op: Op::Arg(i), inputs: Vec::new(), outputs: vec![ty], scope: "".into() });
        map.entry(*var).or_insert_with(|| body.var(i, 0));
    }
    for old in nodes {
        let mut node = function.nodes[*old].clone();
        node.inputs = node.inputs.iter().map(|v| map[v]).collect();
        let index = body.nodes.len();
        for out in 0..node.outputs.len() {
            map.insert(function.var(*old, out), body.var(index, out));
        }
        body.nodes.push(node);
    }
    for (i, old) in results.iter().enumerate() {
        body.outputs.push(Output { name: i.to_string().into(), var: map[old], role: Role::Data });
    }
    body
}

fn group(function: Function, kind: GroupKind, found: &Match) -> Function {
    let body = body(&function, found);
    replace_by_group(function, Group { kind, body }, &found.nodes, &found.inputs, &found.results)
}

/// Puts `group` in the place of `nodes`; its outputs are those of `results`, in order.
pub(super) fn replace_by_group(
    function: Function,
    group: Group,
    nodes: &[usize],
    inputs: &[Var],
    results: &[Var],
) -> Function {
    let place = nodes.iter().copied().max().unwrap_or_default();
    let last = function.nodes.len();
    let outputs = group.body.outputs.iter().map(|o| group.body.ty(o.var).clone()).collect();
    // The scope of the group is that of its largest op: the first that gives a result, its root.
    let scope = results.first().map_or_else(|| "".into(), |v| function.nodes[v.index()].scope.clone());
    let mut draft = Draft::new(function);
    for node in nodes {
        draft.nodes[*node] = None;
    }
    let new = draft.push(Node { op: Op::Group(group.into()), inputs: inputs.to_vec(), outputs, scope });
    for (old, new) in results.iter().zip(new) {
        draft.replace(*old, new);
    }
    draft.finish(|i| if i == last { place } else { i })
}
