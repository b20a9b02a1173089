//! Parameters that are cut over data-parallel ranks and gathered where they are used (Rajbhandari et al. 2020, "ZeRO: Memory
//! Optimizations Toward Training Trillion Parameter Models", section 5.3; Zhao et al. 2023, "PyTorch FSDP").
//!
//! [`gather_weights`] makes a loss of whole weights one of shares. Its gradient then sums and scatters the gradients of
//! shares by itself, since that is what a gather's transpose does. [`gather_again`] moves the gathers to the nodes that use
//! them, each with one of its own, so that a whole weight lives only around a call.

use std::collections::HashMap;

use super::local::local_type;
use super::placement::{MeshAxis, Placement};
use crate::error::{GraphError, Result};
use crate::graph::{Builder, Function, Graph, Op, Role, Var};
use crate::prim::{CollectiveKind, Prim};

/// Where `gather_weights` cuts a weight: the first axis that divides over the ranks. `None` where none does.
fn cut_axis(ty: &crate::types::Type, axis: &MeshAxis) -> Option<usize> {
    (0..ty.shape.rank()).find(|dim| local_type(ty, Placement::shard(*dim), axis).is_ok())
}

/// `graph`, the program of one of the data-parallel ranks of `axis`, with each weight of main cut over them along the first
/// axis that divides, and gathered before it is used. What the ranks compute otherwise is their own: each has its inputs
/// and outputs, and what all of them lose together is the sum of their losses.
///
/// # Errors
/// When a weight has no axis that divides over the ranks, or is stored in a format.
pub fn gather_weights(graph: &Graph, axis: &MeshAxis) -> Result<Graph> {
    let main = graph.main();
    let mut g = Builder::resume(graph.functions.clone(), &main.name);
    let mut args = Vec::with_capacity(main.args.len());
    let mut whole = HashMap::new();
    for (index, arg) in main.args.iter().enumerate() {
        if arg.role != Role::Weight || axis.ranks == 1 {
            args.push(g.push_arg(arg.clone()));
            continue;
        }
        if !arg.ty.is_plain() {
            let why = format!("is {}; only weights in plain storage are gathered", arg.ty);
            return Err(GraphError::usage(&arg.name, why));
        }
        let Some(dim) = cut_axis(&arg.ty, axis) else {
            let why = format!("{}: no axis divides over the {} ranks of `{}`", arg.ty, axis.ranks, axis.name);
            return Err(GraphError::usage(&arg.name, why));
        };
        let ty = local_type(&arg.ty, Placement::shard(dim), axis).map_err(|why| GraphError::usage(&arg.name, why))?;
        let mut local = arg.clone();
        local.ty = ty;
        args.push(g.push_arg(local));
        whole.insert(index, dim);
    }
    rebuilt(g, main, |g, node, map| match &node.op {
        Op::Arg(index) => match whole.get(index) {
            Some(dim) => {
                g.set_scope(&main.args[*index].name);
                let kind = CollectiveKind::AllGather(*dim);
                g.prim(Prim::Collective { kind, mesh: axis.name.clone(), ranks: axis.ranks }, &[args[*index]])
            }
            None => Ok(vec![args[*index]]),
        },
        op => g.emit(op.clone(), map),
    })
}

/// `graph` with every gather of a parameter of main made again for each node that uses it, before the node that uses
/// parameters ahead of that one: the weights of a layer are on their way while the layer before it is computed, and given
/// up behind it. What is gathered twice costs communication and no memory.
///
/// # Errors
/// None of a graph that is consistent.
pub fn gather_again(graph: &Graph) -> Result<Graph> {
    let main = graph.main();
    let is_gather = |index: usize| gathers_parameter(main, index);
    // The nodes that use gathered parameters, in order, with these parameters.
    let users: Vec<(usize, Vec<usize>)> = (0..main.nodes.len())
        .map(|index| {
            let mut used: Vec<usize> = main.nodes[index].inputs.iter().map(|v| v.index()).collect();
            used.retain(|input| is_gather(*input));
            used.sort_unstable();
            used.dedup();
            (index, used)
        })
        .filter(|(_, used)| !used.is_empty())
        .collect();
    let outputs = main.outputs.iter().any(|output| is_gather(output.var.index()));
    if users.is_empty() || outputs {
        return Ok(graph.clone());
    }
    let mut g = Builder::resume(graph.functions.clone(), &main.name);
    let args: Vec<Var> = main.args.iter().map(|arg| g.push_arg(arg.clone())).collect();
    // Of the user that comes next: its parameters, gathered already.
    let mut ready: HashMap<usize, Var> = HashMap::new();
    let mut next = 0;
    let mut map: Vec<Vec<Var>> = Vec::with_capacity(main.nodes.len());
    for (index, node) in main.nodes.iter().enumerate() {
        if is_gather(index) {
            // Made where it is used; this stands for its place.
            map.push(Vec::new());
            continue;
        }
        let gather = |g: &mut Builder, map: &[Vec<Var>], used: &[usize]| -> Result<HashMap<usize, Var>> {
            let again = |gather: &usize| {
                let node = &main.nodes[*gather];
                let from = node.inputs[0];
                g.set_scope(&node.scope);
                Ok((*gather, g.emit(node.op.clone(), &[map[from.index()][from.out as usize]])?[0]))
            };
            used.iter().map(again).collect()
        };
        let uses = users.get(next).is_some_and(|(user, _)| *user == index);
        let mut own = HashMap::new();
        if uses {
            own = if next == 0 { gather(&mut g, &map, &users[0].1)? } else { std::mem::take(&mut ready) };
            next += 1;
            if let Some((_, used)) = users.get(next) {
                ready = gather(&mut g, &map, used)?;
            }
        }
        let input = |v: &Var| own.get(&v.index()).copied().unwrap_or_else(|| map[v.index()][v.out as usize]);
        let inputs: Vec<Var> = node.inputs.iter().map(input).collect();
        g.set_scope(&node.scope);
        map.push(match &node.op {
            Op::Arg(index) => vec![args[*index]],
            op => g.emit(op.clone(), &inputs)?,
        });
    }
    finished(g, main, &map)
}

/// Is node `index` of main a gather of what a weight or a state holds?
fn gathers_parameter(main: &Function, index: usize) -> bool {
    let node = &main.nodes[index];
    if !matches!(node.op, Op::Prim(Prim::Collective { kind: CollectiveKind::AllGather(_), .. })) {
        return false;
    }
    let mut from = &main.nodes[node.inputs[0].index()];
    if matches!(from.op, Op::Prim(Prim::StateRead)) {
        from = &main.nodes[from.inputs[0].index()];
    }
    matches!(from.op, Op::Arg(arg) if matches!(main.args[arg].role, Role::Weight | Role::State))
}

/// Main again in `g`, each node as `emit` has it of its inputs there.
fn rebuilt(
    mut g: Builder,
    main: &Function,
    emit: impl Fn(&mut Builder, &crate::graph::Node, &[Var]) -> Result<Vec<Var>>,
) -> Result<Graph> {
    let mut map: Vec<Vec<Var>> = Vec::with_capacity(main.nodes.len());
    for node in &main.nodes {
        let inputs: Vec<Var> = node.inputs.iter().map(|v| map[v.index()][v.out as usize]).collect();
        g.set_scope(&node.scope);
        map.push(emit(&mut g, node, &inputs)?);
    }
    finished(g, main, &map)
}

fn finished(g: Builder, main: &Function, map: &[Vec<Var>]) -> Result<Graph> {
    let outputs = main.outputs.iter().filter(|output| output.role == Role::Data);
    let outputs = outputs.map(|o| (o.name.to_string(), map[o.var.index()][o.var.out as usize])).collect();
    let mut graph = g.finish(outputs)?;
    graph.drop_uncalled();
    Ok(graph)
}
