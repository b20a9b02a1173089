//! Fusion of what no kernel claimed: chains of elementwise ops, with reductions over the last axis, become groups that
//! a backend runs row by row or tile by tile in its fastest memory.
//!
//! A group works over one iteration space, the shape of its widest values. Each value inside is either full (of that
//! shape) or a row value (the last extent 1). Broadcasts from elsewhere are read with strides.

use super::claim::{extract, replace_by_group};
use crate::graph::{Function, Graph, Group, GroupKind, Op, Var};
use crate::prim::Prim;
use crate::shape::Shape;

/// Fuses within every function.
pub fn fuse(graph: &mut Graph) {
    for function in &mut graph.functions {
        while let Some(found) = next(function) {
            let body = extract(function, &found.nodes, &found.inputs, &found.exported);
            let group = Group { kind: GroupKind::Fused, body };
            *function =
                replace_by_group(std::mem::take(function), group, &found.removed, &found.inputs, &found.exported);
        }
    }
}

/// What a primitive can be in a group.
fn space(function: &Function, node: usize) -> Option<Shape> {
    let n = &function.nodes[node];
    let Op::Prim(prim) = &n.op else { return None };
    match prim {
        p if p.is_elementwise() => Some(n.outputs[0].shape.clone()),
        Prim::Broadcast(shape) | Prim::Iota { shape, .. } => Some(shape.clone()),
        Prim::Reduce { axis, .. } => {
            let input = &function.ty(n.inputs[0]).shape;
            (*axis + 1 == input.rank()).then(|| input.clone())
        }
        _ => None,
    }
}

/// The shape of a row value of `space`.
fn row_of(space: &Shape) -> Shape {
    let mut dims = space.0.clone();
    if let Some(last) = dims.last_mut() {
        *last = 1.into();
    }
    Shape(dims)
}

/// A set of nodes to run together.
struct Found {
    /// The nodes of the body, in order.
    nodes: Vec<usize>,
    /// Those of them that nothing else needs.
    removed: Vec<usize>,
    inputs: Vec<Var>,
    exported: Vec<usize>,
}

/// The next set of nodes to fuse: grown from its first node along uses, in program order.
fn next(function: &Function) -> Option<Found> {
    let users = users(function);
    for seed in 0..function.nodes.len() {
        let Some(space) = space(function, seed) else { continue };
        // Leaves have nothing to compute: they go into the groups that use them, and stand alone for other users.
        if is_leaf(function, seed) && users[seed].iter().any(|u| self::space(function, *u).is_some()) {
            continue;
        }
        let mut nodes = vec![seed];
        loop {
            let before = nodes.len();
            for candidate in seed..function.nodes.len() {
                let joins = !nodes.contains(&candidate)
                    && !is_leaf(function, candidate)
                    && touches(function, &nodes, candidate)
                    && fits(function, candidate, &space)
                    && stays_acyclic(function, &nodes, candidate);
                if joins {
                    nodes.push(candidate);
                    nodes.sort_unstable();
                }
            }
            if nodes.len() == before {
                break;
            }
        }
        absorb_leaves(function, &mut nodes, &space);
        return Some(finish(function, &users, seed, nodes));
    }
    None
}

/// Values that are as cheap to make as to read: every group that reads one makes its own.
fn is_leaf(function: &Function, node: usize) -> bool {
    match &function.nodes[node].op {
        Op::Prim(Prim::Const(literal)) => !literal.vector,
        Op::Prim(Prim::Iota { .. }) => true,
        // Of a row value inside a group it is an op of the group; of anything else, a way of reading.
        Op::Prim(Prim::Broadcast(_)) => {
            let input = function.nodes[node].inputs[0];
            is_leaf(function, input.index()) || !matches!(function.nodes[input.index()].op, Op::Prim(_))
        }
        _ => false,
    }
}

fn users(function: &Function) -> Vec<Vec<usize>> {
    let mut users = vec![Vec::new(); function.nodes.len()];
    for (i, node) in function.nodes.iter().enumerate() {
        for input in &node.inputs {
            users[input.index()].push(i);
        }
    }
    users
}

/// Does `candidate` read from or feed one of `nodes`?
fn touches(function: &Function, nodes: &[usize], candidate: usize) -> bool {
    function.nodes[candidate].inputs.iter().any(|v| nodes.contains(&v.index()))
        || nodes.iter().any(|n| function.nodes[*n].inputs.iter().any(|v| v.index() == candidate))
}

/// Can `candidate` run in this iteration space?
fn fits(function: &Function, candidate: usize, wanted: &Shape) -> bool {
    let Some(own) = space(function, candidate) else { return false };
    let is_reduce = matches!(function.nodes[candidate].op, Op::Prim(Prim::Reduce { .. }));
    own == *wanted || (!is_reduce && own == row_of(wanted))
}

/// Would the group with `candidate` still depend on nothing that depends on it?
fn stays_acyclic(function: &Function, nodes: &[usize], candidate: usize) -> bool {
    let mut all = nodes.to_vec();
    all.push(candidate);
    let inputs: Vec<Var> = all.iter().flat_map(|n| function.nodes[*n].inputs.iter().copied()).collect();
    !super::claim::reaches(function, &all, &inputs)
}

/// Takes the leaves that the group's ops read into its body.
fn absorb_leaves(function: &Function, nodes: &mut Vec<usize>, wanted: &Shape) {
    let mut at = 0;
    while at < nodes.len() {
        for input in &function.nodes[nodes[at]].inputs {
            let leaf = input.index();
            let scalar = matches!(function.nodes[leaf].op, Op::Prim(Prim::Const(_)));
            if is_leaf(function, leaf) && !nodes.contains(&leaf) && (scalar || fits(function, leaf, wanted)) {
                nodes.push(leaf);
            }
        }
        at += 1;
    }
    nodes.sort_unstable();
}

fn finish(function: &Function, users: &[Vec<usize>], seed: usize, nodes: Vec<usize>) -> Found {
    let mut inputs: Vec<Var> = Vec::new();
    for var in nodes.iter().flat_map(|n| &function.nodes[*n].inputs) {
        if !nodes.contains(&var.index()) && !inputs.contains(var) {
            inputs.push(*var);
        }
    }
    let used_outside = |n: &usize| {
        users[*n].iter().any(|u| !nodes.contains(u)) || function.outputs.iter().any(|o| o.var.index() == *n)
    };
    // A leaf that the group began with is all that it computes.
    let absorbed = |n: &usize| *n != seed && is_leaf(function, *n);
    // A leaf stays for its other users, and with it the leaves that it reads.
    let mut kept: Vec<usize> = Vec::new();
    for node in nodes.iter().rev().filter(|n| absorbed(n)) {
        if used_outside(node) || users[*node].iter().any(|u| kept.contains(u)) {
            kept.push(*node);
        }
    }
    // What others need is given out, others being also the leaves that stay.
    let read_by_kept = |n: &usize| users[*n].iter().any(|u| kept.contains(u));
    let exported = nodes.iter().copied().filter(|n| !absorbed(n) && (used_outside(n) || read_by_kept(n))).collect();
    let removed = nodes.iter().copied().filter(|n| !kept.contains(n)).collect();
    Found { nodes, removed, inputs, exported }
}
