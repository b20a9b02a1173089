//! Kernels claim the parts of a graph that match their patterns.

use std::sync::Arc;

use super::order::Draft;
use super::pattern::{Match, Pattern};
use crate::dim::{Bindings, Sym};
use crate::graph::{Arg, Function, Graph, Group, GroupKind, Node, Op, Output, Role, Var};
use crate::poly::Poly;

/// A backend's kernel, as far as compilation needs to know it.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Its name, unique within the backend.
    pub name: Arc<str>,
    /// What it computes as one.
    pub pattern: Pattern,
    /// Does it support these ops with these types and attributes? The function has one argument for each place of
    /// the pattern's text that names a value, in that order; its outputs are the root's, then the exported ones.
    pub supports: fn(&Function) -> bool,
}

/// Lets `kernels` claim nodes in every function. Where several match, the one that leaves the least memory traffic
/// wins; of equals, the first.
pub fn claim(graph: &mut Graph, kernels: &[Kernel]) {
    for function in &mut graph.functions {
        // From the outputs back, so that a kernel sees the whole chain that leads to its root.
        let mut root = function.nodes.len();
        while root > 0 {
            root -= 1;
            if !matches!(function.nodes[root].op, Op::Prim(_) | Op::Composite(_)) {
                continue;
            }
            if let Some((kernel, found)) = best(function, root, kernels) {
                let before = function.nodes.len();
                *function = group(std::mem::take(function), GroupKind::Kernel(Arc::clone(&kernel.name)), &found);
                // The group is here or before, when what lay between its nodes reads it: look at this place again.
                root = root + 1 - (before - function.nodes.len());
            }
        }
    }
}

fn best<'k>(function: &Function, root: usize, kernels: &'k [Kernel]) -> Option<(&'k Kernel, Match)> {
    let mut best: Option<(i128, &Kernel, Match)> = None;
    for kernel in kernels {
        for found in kernel.pattern.find(function, root) {
            if !is_closed(function, &found) {
                continue;
            }
            let body = body(function, &found);
            if !(kernel.supports)(&body) {
                continue;
            }
            let kind = GroupKind::Kernel(Arc::clone(&kernel.name));
            let saved = saved_bytes(function, &found, &Group { kind, body });
            if best.as_ref().is_none_or(|(most, ..)| saved > *most) {
                best = Some((saved, kernel, found));
            }
        }
    }
    best.map(|(_, kernel, found)| (kernel, found))
}

/// Is every use of an inner value within the match, or the value exported; and does nothing that the match reads
/// come of the match itself?
fn is_closed(function: &Function, found: &Match) -> bool {
    let inside = |node: usize| found.nodes.contains(&node);
    let hidden = |node: usize| found.nodes.iter().position(|n| *n == node).is_some_and(|i| !found.exported[i]);
    let leaks =
        function.nodes.iter().enumerate().any(|(i, n)| !inside(i) && n.inputs.iter().any(|v| hidden(v.index())))
            || function.outputs.iter().any(|o| hidden(o.var.index()));
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
    // The root's outputs come first.
    let outputs: Vec<usize> =
        (0..found.nodes.len()).rev().filter(|i| found.exported[*i]).map(|i| found.nodes[i]).collect();
    extract(function, &order, &found.inputs, &outputs)
}

/// `nodes` (in order) as a function of `inputs`, with all outputs of the nodes in `exported`.
pub(super) fn extract(function: &Function, nodes: &[usize], inputs: &[Var], exported: &[usize]) -> Function {
    let mut body = Function { name: "".into(), owner: function.owner, ..Function::default() };
    let mut map = std::collections::HashMap::new();
    for (i, var) in inputs.iter().enumerate() {
        let ty = function.ty(*var).clone();
        body.args.push(Arg { name: i.to_string().as_str().into(), ty: ty.clone(), role: Role::Data });
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
    for old in exported {
        for out in 0..function.nodes[*old].outputs.len() {
            let name = body.outputs.len().to_string();
            body.outputs.push(Output {
                name: name.as_str().into(),
                var: map[&function.var(*old, out)],
                role: Role::Data,
            });
        }
    }
    body
}

fn group(function: Function, kind: GroupKind, found: &Match) -> Function {
    let body = body(&function, found);
    let exported: Vec<usize> =
        (0..found.nodes.len()).rev().filter(|i| found.exported[*i]).map(|i| found.nodes[i]).collect();
    replace_by_group(function, Group { kind, body }, &found.nodes, &found.inputs, &exported)
}

/// Puts `group` in the place of `nodes`; its outputs are those of `exported`, in order.
pub(super) fn replace_by_group(
    function: Function,
    group: Group,
    nodes: &[usize],
    inputs: &[Var],
    exported: &[usize],
) -> Function {
    let place = nodes.iter().copied().max().unwrap_or_default();
    let last = function.nodes.len();
    let outputs = group.body.outputs.iter().map(|o| group.body.ty(o.var).clone()).collect();
    // The scope of the group is that of its largest op: the first exported one, its root.
    let scope = exported.first().map_or_else(|| "".into(), |n| function.nodes[*n].scope.clone());
    let old: Vec<Var> = exported
        .iter()
        .flat_map(|n| (0..function.nodes[*n].outputs.len()).map(|out| function.var(*n, out)).collect::<Vec<_>>())
        .collect();
    let mut draft = Draft::new(function);
    for node in nodes {
        draft.nodes[*node] = None;
    }
    let new = draft.push(Node { op: Op::Group(group.into()), inputs: inputs.to_vec(), outputs, scope });
    for (old, new) in old.into_iter().zip(new) {
        draft.replace(old, new);
    }
    draft.finish(|i| if i == last { place } else { i })
}

/// Memory traffic of the nodes apart less that of the group, for steps of nominal size.
fn saved_bytes(function: &Function, found: &Match, group: &Group) -> i128 {
    let outputs: Vec<_> = group.body.outputs.iter().map(|o| group.body.ty(o.var).clone()).collect();
    let together = group.cost(&function.types(&found.inputs), &outputs).bytes();
    let apart = found.nodes.iter().fold(Poly::zero(), |sum, n| {
        let node = &function.nodes[*n];
        let types = function.types(&node.inputs);
        sum + &match &node.op {
            Op::Prim(p) => p.cost(&types, &node.outputs),
            Op::Composite(c) => c.cost(&types, &node.outputs),
            _ => crate::Cost::default(),
        }
        .bytes()
    });
    nominal(&(apart + &(together * -1)))
}

/// A polynomial's value when every symbol is 64.
fn nominal(poly: &Poly) -> i128 {
    let bindings = poly.symbols().fold(Bindings::new(), |b, s: &Sym| b.with(s.name(), 64));
    poly.eval(&bindings).unwrap_or(0)
}
