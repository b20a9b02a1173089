//! Which weights only the products of layers read.

use std::collections::BTreeSet;

use crate::graph::{Function, Graph, Node, Op, Role};
use crate::ops::{Linear, LinearGroup};

/// Names of the weights of `graph` that linears of called functions read, and nothing else does: the matrices of layers, but
/// neither an embedding nor an output projection, which main reads itself.
pub fn layer_weights(graph: &Graph) -> BTreeSet<String> {
    let main = graph.main();
    let of_layers = |i: usize| {
        let mut readers = readers(main, i).peekable();
        readers.peek().is_some()
            && readers.all(|(node, at)| matches!(node.op, Op::Call(_)) && multiplies(graph, node, at))
    };
    let weights = main.args.iter().enumerate().filter(|(i, arg)| arg.role == Role::Weight && of_layers(*i));
    weights.map(|(_, arg)| arg.name.to_string()).collect()
}

/// The nodes that read argument `i`, and as which input.
fn readers(function: &Function, i: usize) -> impl Iterator<Item = (&Node, usize)> {
    let is_argument = move |node: usize| matches!(function.nodes[node].op, Op::Arg(of) if of == i);
    function.nodes.iter().flat_map(move |node| {
        node.inputs.iter().enumerate().filter(move |(_, var)| is_argument(var.index())).map(move |(at, _)| (node, at))
    })
}

/// Does `node` take input `at` as the weight of a linear, or call what takes it so alone?
fn multiplies(graph: &Graph, node: &Node, at: usize) -> bool {
    match &node.op {
        Op::Call(callee) => {
            let callee = &graph.functions[callee.index()];
            readers(callee, at).all(|(node, at)| multiplies(graph, node, at))
        }
        Op::Composite(op) => match (op.downcast::<Linear>(), op.downcast::<LinearGroup>()) {
            (Some(_), _) => at == 1,
            (_, Some(group)) => (1..=group.count).contains(&at),
            _ => false,
        },
        _ => false,
    }
}
