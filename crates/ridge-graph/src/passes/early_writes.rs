//! States of main are written as soon as their values are there. A gradient that is kept in a state then takes memory of the step
//! only from the call that gives it to its write, rather than to the end of the backward pass.

use super::order::Draft;
use crate::graph::{Graph, Op, Role};
use crate::prim::Prim;

/// Moves the nodes of main that nothing but writes of states depends on to behind the last node that they depend on.
pub fn write_early(graph: &mut Graph) {
    let main = graph.main();
    let mut only_written = vec![true; main.nodes.len()];
    for output in main.outputs.iter().filter(|output| output.role == Role::Data) {
        only_written[output.var.index()] = false;
    }
    let mut has_users = vec![false; main.nodes.len()];
    for (index, node) in main.nodes.iter().enumerate().rev() {
        let is_write = matches!(node.op, Op::Prim(Prim::StateWrite));
        // What is used by nobody is no update, and what a call computes stays where the calls are.
        only_written[index] &= is_write || has_users[index] && !matches!(node.op, Op::Call(_) | Op::Arg(_));
        for input in &node.inputs {
            has_users[input.index()] = true;
            only_written[input.index()] &= only_written[index];
        }
    }
    // What depends on arguments alone, such as a read of the state, comes where it is first used.
    let mut places: Vec<Option<usize>> = Vec::with_capacity(main.nodes.len());
    for (index, node) in main.nodes.iter().enumerate() {
        places.push(match (&node.op, only_written[index]) {
            (Op::Arg(_), _) => None,
            (_, true) => node.inputs.iter().filter_map(|input| places[input.index()]).max(),
            (_, false) => Some(index),
        });
    }
    let index = graph.main.index();
    graph.functions[index] = Draft::new(graph.functions[index].clone()).finish(|node| places[node].unwrap_or(node));
}
