//! The compile pipeline: from a model's graph to groups that a backend runs.

use std::sync::Arc;

use ridge_graph::passes::{
    Extents, Kernel, claim, decompose, fuse, fuse_views, group_linears, group_norm_gradients, prune, take_rows_early,
    tidy,
};
use ridge_graph::{Function, Graph, Node, Op, Prim, Role, Var};

use crate::alias::{alias_of, defer_late, order_reads, storage_root};
use crate::error::{Result, RuntimeError};

/// The graph restricted to `outputs` and rewritten until only arguments, calls, primitives, claimed groups and fused
/// groups are left. Each function is worked on once, however often it is called. The result serves any extents, and is the
/// same whenever graph and kernels (with their target) are.
///
/// # Errors
/// Names an output that the graph does not have.
pub fn lower(graph: &Graph, outputs: &[&str], kernels: &[Kernel]) -> Result<Graph> {
    lower_for(graph, outputs, kernels, Extents::Any)
}

/// As [`lower`], by kernels chosen for programs that compute so many rows at a time.
///
/// # Errors
/// As [`lower`].
pub fn lower_for(graph: &Graph, outputs: &[&str], kernels: &[Kernel], extents: Extents) -> Result<Graph> {
    let mut graph = graph.clone();
    prune(&mut graph, outputs)?;
    graph.functions.iter().try_for_each(states_are_named)?;
    take_rows_early(&mut graph);
    group_linears(&mut graph);
    group_norm_gradients(&mut graph, kernels);
    claim(&mut graph, kernels, extents);
    // What no kernel claims as it stands opens one level at a time, so that kernels can claim what is inside.
    while decompose(&mut graph, |_| false)? {
        tidy(&mut graph);
        claim(&mut graph, kernels, extents);
    }
    fuse(&mut graph);
    tidy(&mut graph);
    if kernels.iter().any(|kernel| kernel.target.fuses_views) {
        fuse_views(&mut graph);
    }
    for function in &mut graph.functions {
        separate_outputs(function)?;
        order_reads(function);
    }
    let main = graph.main.index();
    defer_late(&mut graph.functions[main]);
    Ok(graph)
}

/// Refuses states that go in or out as ordinary values: in place, their updates would reach who did not ask for them.
fn states_are_named(function: &Function) -> Result<()> {
    let args = function.args.iter().filter(|a| a.role == Role::Data && a.ty.state).map(|a| ("argument", &a.name));
    let outputs = function.outputs.iter().filter(|o| o.role == Role::Data && function.ty(o.var).state);
    match args.chain(outputs.map(|o| ("output", &o.name))).next() {
        None => Ok(()),
        Some((kind, name)) => Err(RuntimeError::Argument {
            kind,
            name: name.to_string(),
            why: format!(
                "of {} is a state; request it by name with `state`, and pass its value with `state_read`",
                function.name
            ),
        }),
    }
}

/// Gives each data output of a function memory of its own: a copy where it is an argument, another output, or a view
/// of one. Refuses values in formats that would have to be copied.
fn separate_outputs(function: &mut Function) -> Result<()> {
    let mut taken: Vec<Var> = Vec::new();
    for i in 0..function.outputs.len() {
        if function.outputs[i].role != Role::Data {
            continue;
        }
        let var = function.outputs[i].var;
        let root = storage_root(function, var);
        let is_arg = matches!(function.nodes[root.index()].op, Op::Arg(_));
        if is_arg || is_part(function, var) || taken.contains(&root) {
            let ty = function.ty(var).clone();
            if ty.format.is_some() {
                return Err(RuntimeError::Argument {
                    kind: "output",
                    name: function.outputs[i].name.to_string(),
                    why: format!(
                        "of {} is returned as {ty} without being computed; return its decoded value",
                        function.name
                    ),
                });
            }
            let copy = Node {
                op: Op::Prim(Prim::Cast(ty.dtype)),
                inputs: vec![var],
                outputs: vec![ty],
                scope: Arc::from(&*function.outputs[i].name),
            };
            function.nodes.push(copy);
            function.outputs[i].var = function.var(function.nodes.len() - 1, 0);
        }
        taken.push(storage_root(function, function.outputs[i].var));
    }
    Ok(())
}

/// Is `var` a component of a value, or a view of one?
fn is_part(function: &Function, mut var: Var) -> bool {
    while let Some(source) = alias_of(function, var) {
        if matches!(function.nodes[var.index()].op, Op::Prim(Prim::Component(_))) {
            return true;
        }
        var = source;
    }
    false
}
