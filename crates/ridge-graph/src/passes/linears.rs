//! Horizontal fusion: linears that share their input become one op, which a backend runs as one matrix product.

use std::collections::BTreeMap;

use super::order::Draft;
use crate::graph::{CompositeRef, Function, Graph, Node, Op, Var};
use crate::ops::{Linear, LinearGroup, MoeRouter, Swiglu};

/// Joins linears of one input whose weights are arguments, within each function.
pub fn group_linears(graph: &mut Graph) {
    for function in &mut graph.functions {
        let groups = candidates(function);
        if groups.is_empty() {
            continue;
        }
        let place: BTreeMap<usize, usize> = (function.nodes.len()..).zip(groups.iter().map(|(_, g)| g[0])).collect();
        let mut draft = Draft::new(std::mem::take(function));
        for (linear, members) in groups {
            join(&mut draft, linear, &members);
        }
        *function = draft.finish(|i| place.get(&i).copied().unwrap_or(i));
    }
}

/// The linears that [`group_linears`] would join, those of each input.
pub(super) fn of_one_input(function: &Function) -> Vec<Vec<usize>> {
    candidates(function).into_iter().map(|(_, members)| members).collect()
}

/// Nodes that can be joined, in groups of two or more. What kernels compute together with what comes after, a gate with what it
/// opens and the logits of a router, is not joined with other linears.
fn candidates(function: &Function) -> Vec<(Linear, Vec<usize>)> {
    let is_arg = |v: &Var| matches!(function.nodes[v.index()].op, Op::Arg(_));
    let ends: BTreeMap<usize, usize> = (0..function.nodes.len())
        .filter(|reader| ends_linears(&function.nodes[*reader].op))
        .flat_map(|reader| function.nodes[reader].inputs.iter().map(move |v| (v.index(), reader)))
        .collect();
    let mut by_input: BTreeMap<(Var, Linear, Option<usize>), Vec<usize>> = BTreeMap::new();
    for (i, node) in function.nodes.iter().enumerate() {
        let Op::Composite(op) = &node.op else { continue };
        if let Some(linear) = op.downcast::<Linear>()
            && node.inputs[1..].iter().all(is_arg)
        {
            by_input.entry((node.inputs[0], *linear, ends.get(&i).copied())).or_default().push(i);
        }
    }
    let alike = by_input.into_iter().map(|((_, linear, _), members)| (linear, members));
    alike.filter(|(_, members)| members.len() > 1).collect()
}

/// Is it computed together with the linears that it reads?
fn ends_linears(op: &Op) -> bool {
    let Op::Composite(op) = op else { return false };
    op.downcast::<Swiglu>().is_some() || op.downcast::<MoeRouter>().is_some()
}

fn join(draft: &mut Draft, Linear { bias: biases }: Linear, members: &[usize]) {
    let nodes: Vec<Node> = members.iter().filter_map(|m| draft.nodes[*m].take()).collect();
    let mut inputs = vec![nodes[0].inputs[0]];
    inputs.extend(nodes.iter().map(|n| n.inputs[1]));
    if biases {
        inputs.extend(nodes.iter().map(|n| n.inputs[2]));
    }
    let outputs = nodes.iter().map(|n| n.outputs[0].clone()).collect();
    let scopes: Vec<&str> = nodes.iter().map(|n| &*n.scope).collect();
    let op = Op::Composite(CompositeRef::new(LinearGroup { count: nodes.len(), biases }));
    let joined = draft.push(Node { op, inputs, outputs, scope: common_scope(&scopes).into() });
    for (member, new) in members.iter().zip(joined) {
        let old = Var { node: *member as u32, out: 0, ..new };
        draft.replace(old, new);
    }
}

/// `self_attn.q_proj` and `self_attn.k_proj` as `self_attn.{q_proj,k_proj}`.
fn common_scope(scopes: &[&str]) -> String {
    let split = |s: &str| s.rsplit_once('.').map_or((String::new(), s.to_owned()), |(a, b)| (a.into(), b.into()));
    let parts: Vec<(String, String)> = scopes.iter().map(|s| split(s)).collect();
    let leaves: Vec<&str> = parts.iter().map(|(_, leaf)| leaf.as_str()).collect();
    match parts.iter().all(|(parent, _)| *parent == parts[0].0) {
        true if parts[0].0.is_empty() => format!("{{{}}}", leaves.join(",")),
        true => format!("{}.{{{}}}", parts[0].0, leaves.join(",")),
        false => format!("{{{}}}", scopes.join(",")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::graph::Builder;
    use crate::types::Type;

    #[test]
    fn a_gate_with_what_it_opens_and_a_router_stay_by_themselves() {
        let mut g = Builder::new();
        let matrix = || Type::tensor(DType::F32, [4usize, 4]);
        let x = g.arg("x", matrix());
        let linear = |g: &mut Builder, name: &str| {
            let w = g.weight(name, matrix()).expect("fresh");
            g.linear(x, w).expect("multiplies")
        };
        let [q, gate, router, up, k] = ["q", "gate", "router", "up", "k"].map(|name| linear(&mut g, name));
        let open = g.swiglu(gate, up).expect("gates");
        let op = MoeRouter { top_k: 1, sigmoid: false, normalise: true, scale: 1.0, bias: false, groups: None };
        let (ids, _) = g.moe_router(router, None, op).expect("routes");
        let outputs = [("q", q), ("k", k), ("open", open), ("ids", ids)];
        let outputs = outputs.into_iter().map(|(name, var)| (name.to_owned(), var)).collect();
        let mut graph = g.finish(outputs).expect("finishes");
        group_linears(&mut graph);
        let mut scopes = Vec::new();
        for node in &graph.main().nodes {
            if matches!(&node.op, Op::Composite(op) if op.downcast::<LinearGroup>().is_some()) {
                let weight = |v: &Var| match graph.main().nodes[v.index()].op {
                    Op::Arg(i) => graph.main().args[i].name.to_string(),
                    _ => "a value".into(),
                };
                scopes.push(node.inputs[1..].iter().map(weight).collect::<Vec<_>>().join(" "));
            }
        }
        scopes.sort();
        assert_eq!(scopes, ["gate up", "q k"]);
    }
}
