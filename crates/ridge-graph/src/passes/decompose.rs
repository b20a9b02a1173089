//! Replaces composites that no kernel claimed by their decompositions.

use crate::error::Result;
use crate::graph::{Builder, Function, Graph, Node, Op, Var};

/// Decomposes every composite for which `stays` does not hold, one level deep, in every function. Returns whether
/// anything changed: what a decomposition is made of may be claimed before it is decomposed in turn.
///
/// # Errors
/// Those of a decomposition, which are bugs of its op.
pub fn decompose(graph: &mut Graph, stays: impl Fn(&Node) -> bool) -> Result<bool> {
    let mut changed = false;
    for index in 0..graph.functions.len() {
        let opens = |n: &Node| matches!(n.op, Op::Composite(_)) && !stays(n);
        if !graph.functions[index].nodes.iter().any(opens) {
            continue;
        }
        changed = true;
        let old = graph.functions[index].clone();
        // Callees stay visible, so that calls keep their types.
        let mut g = Builder::resume(std::mem::take(&mut graph.functions), &old.name);
        let rewritten = rewrite(&mut g, &old, opens);
        graph.functions = g.into_functions();
        graph.functions[index] = rewritten?;
    }
    Ok(changed)
}

fn rewrite(g: &mut Builder, old: &Function, opens: impl Fn(&Node) -> bool) -> Result<Function> {
    let mut map: Vec<Vec<Var>> = Vec::with_capacity(old.nodes.len());
    for node in &old.nodes {
        g.set_scope(&node.scope);
        let inputs: Vec<Var> = node.inputs.iter().map(|v| map[v.index()][v.out as usize]).collect();
        map.push(match &node.op {
            Op::Arg(i) => vec![g.push_arg(old.args[*i].clone())],
            Op::Composite(op) if opens(node) => op.decompose(g, &inputs)?,
            op => g.emit(op.clone(), &inputs)?,
        });
    }
    let mut outputs = old.outputs.clone();
    for output in &mut outputs {
        output.var = map[output.var.index()][output.var.out as usize];
    }
    Ok(g.end(outputs))
}
