//! Common subexpressions, dead code and constant folding, and the choice of outputs.

use std::collections::HashMap;

use super::order::Draft;
use crate::error::{GraphError, Result};
use crate::graph::{Function, Graph, Op, Role, Var};
use crate::prim::{Literal, Prim};

/// Keeps only the main outputs named (states always stay), and drops what only the others needed: nodes, and step
/// inputs and weights of the main function.
///
/// # Errors
/// Names an output that the graph does not have, and those it has.
pub fn prune(graph: &mut Graph, outputs: &[&str]) -> Result<()> {
    let main = &mut graph.functions[graph.main.index()];
    for wanted in outputs {
        if !main.outputs.iter().any(|o| o.role == Role::Data && &*o.name == *wanted) {
            let known: Vec<&str> = main.outputs.iter().filter(|o| o.role == Role::Data).map(|o| &*o.name).collect();
            return Err(GraphError::usage("", format!("no output `{wanted}`; the graph has {}", known.join(", "))));
        }
    }
    main.outputs.retain(|o| o.role == Role::State || outputs.contains(&&*o.name));
    tidy(graph);
    drop_unused_args(&mut graph.functions[graph.main.index()]);
    graph.drop_uncalled();
    Ok(())
}

/// Merges equal nodes, folds constants and removes what no output needs, in every function.
pub fn tidy(graph: &mut Graph) {
    for function in &mut graph.functions {
        let live = live(function);
        let mut draft = Draft::new(std::mem::take(function));
        let mut seen: HashMap<(String, Vec<Var>), Vec<usize>> = HashMap::new();
        for (i, live) in live.iter().enumerate() {
            let Some(mut node) = draft.nodes[i].take() else { continue };
            if !live && !matches!(node.op, Op::Arg(_)) {
                continue;
            }
            node.inputs = node.inputs.iter().map(|v| draft.resolve(*v)).collect();
            if let Op::Prim(Prim::Binary(op)) = &node.op
                && op.commutes()
            {
                node.inputs.sort();
            }
            if let Some(literal) = folded(&draft, &node) {
                node.op = Op::Prim(Prim::Const(literal));
                node.inputs.clear();
            }
            if let Some(source) = identity(&draft, &node) {
                draft.replace(draft.var(i, 0), source);
                continue;
            }
            let key = (node.op_name().to_owned(), node.inputs.clone());
            let same = seen.get(&key).and_then(|candidates| {
                candidates
                    .iter()
                    .copied()
                    .find(|c| draft.nodes[*c].as_ref().is_some_and(|n| n.op == node.op && n.outputs == node.outputs))
            });
            match same {
                // What is communicated or moved twice is a choice of memory against time, which is not for this pass to undo.
                Some(first)
                    if !matches!(
                        node.op,
                        Op::Arg(_) | Op::Prim(Prim::Collective { .. } | Prim::Move(_) | Prim::Fetch(_))
                    ) =>
                {
                    for out in 0..node.outputs.len() {
                        draft.replace(draft.var(i, out), draft.var(first, out));
                    }
                }
                _ => {
                    seen.entry(key).or_default().push(i);
                    draft.nodes[i] = Some(node);
                }
            }
        }
        *function = draft.finish(|i| i);
        remove_dead(function);
    }
}

/// Which nodes an output needs.
fn live(function: &Function) -> Vec<bool> {
    let mut live = vec![false; function.nodes.len()];
    for output in &function.outputs {
        live[output.var.index()] = true;
    }
    for i in (0..function.nodes.len()).rev() {
        if live[i] {
            for input in &function.nodes[i].inputs {
                live[input.index()] = true;
            }
        }
    }
    live
}

fn remove_dead(function: &mut Function) {
    let live = live(function);
    let mut draft = Draft::new(std::mem::take(function));
    for (i, live) in live.iter().enumerate() {
        if !live && draft.nodes[i].as_ref().is_some_and(|n| !matches!(n.op, Op::Arg(_))) {
            draft.nodes[i] = None;
        }
    }
    *function = draft.finish(|i| i);
}

/// The value of a primitive whose inputs are all scalar constants.
fn folded(draft: &Draft, node: &crate::Node) -> Option<Literal> {
    let Op::Prim(prim @ (Prim::Unary(_) | Prim::Binary(_) | Prim::Compare(_) | Prim::Select | Prim::Cast(_))) =
        &node.op
    else {
        return None;
    };
    let inputs: Option<Vec<&Literal>> = node
        .inputs
        .iter()
        .map(|v| match &draft.nodes[v.index()].as_ref()?.op {
            Op::Prim(Prim::Const(literal)) if !literal.vector => Some(literal),
            _ => None,
        })
        .collect();
    crate::eval::fold(prim, &inputs?, node.outputs[0].dtype)
}

/// The value that a node merely passes on: a view of the shape that its input has already, or of another view.
fn identity(draft: &Draft, node: &crate::Node) -> Option<Var> {
    let input = *node.inputs.first()?;
    let source = draft.nodes[input.index()].as_ref()?;
    let unchanged = source.outputs[input.out as usize] == node.outputs[0];
    match &node.op {
        Op::Prim(Prim::Reshape(_) | Prim::Broadcast(_) | Prim::Cast(_)) if unchanged => Some(input),
        _ => None,
    }
}

fn drop_unused_args(function: &mut Function) {
    let uses = function.uses();
    let unused: Vec<bool> = function
        .nodes
        .iter()
        .enumerate()
        .filter_map(|(i, n)| match n.op {
            Op::Arg(arg) => Some((arg, uses[i][0] == 0 && function.args[arg].role != Role::State)),
            _ => None,
        })
        .fold(vec![false; function.args.len()], |mut all, (arg, unused)| {
            all[arg] = unused;
            all
        });
    let mut kept = 0;
    let renumbered: Vec<usize> = unused
        .iter()
        .map(|unused| {
            kept += usize::from(!unused);
            kept - usize::from(!unused)
        })
        .collect();
    let mut index = 0..;
    function.args.retain(|_| !unused[index.next().unwrap_or_default()]);
    let mut draft = Draft::new(std::mem::take(function));
    for slot in &mut draft.nodes {
        if let Some(node) = slot
            && let Op::Arg(arg) = &mut node.op
        {
            if unused[*arg] {
                *slot = None;
            } else {
                *arg = renumbered[*arg];
            }
        }
    }
    *function = draft.finish(|i| i);
}
