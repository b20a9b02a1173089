//! Fusion that rebuilds the function for each group, to compare [`fuse`] with.

use super::fuse;
use super::state::space;
use crate::dtype::DType;
use crate::graph::{Builder, Function, Graph, Group, GroupKind, Op, Var};
use crate::passes::claim::{extract, reaches, replace_by_group};
use crate::passes::pattern::outputs_of;
use crate::prim::Prim;
use crate::sample::Rng;
use crate::shape::Shape;
use crate::types::Type;

/// Fuses within every function.
fn fuse_one_by_one(graph: &mut Graph) {
    for function in &mut graph.functions {
        while let Some(found) = next(function) {
            let results = outputs_of(function, found.exported.iter().copied());
            let body = extract(function, &found.nodes, &found.inputs, &results);
            let group = Group { kind: GroupKind::Fused, body };
            *function = replace_by_group(std::mem::take(function), group, &found.removed, &found.inputs, &results);
        }
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
struct OneFound {
    /// The nodes of the body, in order.
    nodes: Vec<usize>,
    /// Those of them that nothing else needs.
    removed: Vec<usize>,
    inputs: Vec<Var>,
    exported: Vec<usize>,
}

/// The next set of nodes to fuse: grown from its first node along uses, in program order.
fn next(function: &Function) -> Option<OneFound> {
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
    !reaches(function, &all, &inputs)
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

fn finish(function: &Function, users: &[Vec<usize>], seed: usize, nodes: Vec<usize>) -> OneFound {
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
    OneFound { nodes, removed, inputs, exported }
}

/// A random function of elementwise ops, broadcasts, reductions and products over a few values, with a state.
fn random_graph(rng: &mut Rng) -> Graph {
    const ROWS: usize = 4;
    let shapes = [[ROWS, 8], [ROWS, 1], [ROWS, ROWS]];
    let mut g = Builder::new();
    let mut values: Vec<Var> =
        shapes.iter().enumerate().map(|(i, s)| g.arg(&format!("x{i}"), Type::tensor(DType::F32, *s))).collect();
    let mut outputs = Vec::new();
    for step in 0..5 + rng.below(40) {
        // Mostly recent values, so that chains are long.
        let recent = |rng: &mut Rng| {
            let back = if rng.below(3) == 0 { values.len() } else { values.len().min(6) };
            values[values.len() - 1 - rng.below(back)]
        };
        let (a, b) = (recent(rng), recent(rng));
        let shape = shapes[rng.below(3)];
        let of = |g: &Builder, v: Var| g.ty(v).unwrap().shape.as_const().unwrap();
        let fits = |g: &Builder, v: Var, to: &[usize]| of(g, v).iter().zip(to).all(|(n, to)| n == to || *n == 1);
        let made = match rng.below(12) {
            0 => g.constant(DType::F32, step as f64).and_then(|c| g.broadcast(c, shape)),
            1 => g.iota(shape, rng.below(2), DType::F32),
            2 => g.reduce_sum(a, rng.below(2)),
            3 => g.reduce_max(a, 1),
            4 if fits(&g, a, &shape) => g.broadcast(a, shape),
            5 if of(&g, a)[0] == of(&g, b)[0] => g.matmul(a, b, true, false, DType::F32),
            6 => {
                let state = g.state("state", Type::state(DType::F32, shapes[0])).unwrap();
                if of(&g, a) == shapes[0] && rng.below(2) == 0 {
                    let next = g.state_write(state, a).unwrap();
                    g.state_read(next)
                } else {
                    g.state_read(state)
                }
            }
            7 => {
                let two = g.constant(DType::F32, 2.0).unwrap();
                g.mul(a, two)
            }
            8 => g.exp(a),
            _ if fits(&g, a, &of(&g, b)) || fits(&g, b, &of(&g, a)) => g.add(a, b),
            _ => g.neg(a),
        };
        let made = made.unwrap();
        values.push(made);
        if rng.below(8) == 0 {
            outputs.push((step.to_string(), made));
        }
    }
    outputs.push(("last".into(), values[values.len() - 1]));
    let mut graph = g.finish(outputs).unwrap();
    if rng.below(2) == 0 {
        crate::passes::tidy(&mut graph);
    }
    graph
}

#[test]
fn one_rebuild_gives_the_program_of_a_rebuild_for_each_group() {
    let mut groups = 0;
    for seed in 0..2000 {
        let graph = random_graph(&mut Rng::new(seed));
        let (mut once, mut one_by_one) = (graph.clone(), graph.clone());
        fuse(&mut once);
        fuse_one_by_one(&mut one_by_one);
        assert_eq!(once.to_string(), one_by_one.to_string(), "seed {seed}, of\n{graph}");
        groups += once.main().nodes.iter().filter(|n| matches!(n.op, Op::Group(_))).count();
    }
    assert!(groups > 2000, "{groups} groups");
}
