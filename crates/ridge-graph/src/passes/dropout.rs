//! Dropout added to a finished graph, so that the graph that is trained is the one that is served.

use crate::error::{GraphError, Result};
use crate::graph::{Builder, Function, Graph, Op, Role, Var};

/// `graph` with dropout at `rate` behind each `linear` of a function whose scope is one of `scopes`, and on the first
/// argument of the first call of such a function in main: the residual branches of a decoder and its embedding. See
/// [`Dropout`](crate::ops::Dropout).
///
/// # Errors
/// When the graph has states, or no function has such a scope.
pub fn with_dropout(graph: &Graph, rate: f64, scopes: &[&str]) -> Result<Graph> {
    let mut g = Builder::new();
    let mut dropping = Vec::with_capacity(graph.functions.len());
    for (index, function) in graph.functions.iter().enumerate() {
        if index == graph.main.index() {
            // Main is the last and is made below.
            dropping.push(false);
            continue;
        }
        let drops = function.nodes.iter().any(|node| is_place(node.op_name(), &node.scope, scopes));
        let calls = function.nodes.iter().any(|node| matches!(node.op, Op::Call(f) if dropping[f.index()]));
        let places = if drops { scopes } else { &[] };
        g.function(&function.name, |g| rebuilt(g, function, places, rate, &dropping, false))?;
        dropping.push(drops || calls);
    }
    if !dropping.contains(&true) {
        let why = format!("no function has a linear in one of the scopes {}", scopes.join(", "));
        return Err(GraphError::usage("dropout", why));
    }
    let main = graph.main();
    let values = rebuilt(&mut g, main, &[], rate, &dropping, true)?;
    let names = main.outputs.iter().filter(|output| output.role == Role::Data).map(|output| output.name.to_string());
    g.finish(names.zip(values).collect())
}

fn is_place(op: &str, scope: &str, scopes: &[&str]) -> bool {
    op == "linear" && scopes.contains(&scope)
}

/// The nodes of `function` once more; gives its data outputs.
fn rebuilt(
    g: &mut Builder,
    function: &Function,
    scopes: &[&str],
    rate: f64,
    dropping: &[bool],
    is_main: bool,
) -> Result<Vec<Var>> {
    if let Some(state) = function.args.iter().find(|arg| arg.role == Role::State) {
        return Err(GraphError::usage(&state.name, "is a state; dropout is added to graphs without any"));
    }
    let args: Vec<Var> = function.args.iter().map(|arg| g.push_arg(arg.clone())).collect();
    let mut values: Vec<Vec<Var>> = Vec::with_capacity(function.nodes.len());
    let mut embedded = !is_main;
    for node in &function.nodes {
        g.set_scope(&node.scope);
        let mut inputs: Vec<Var> = node.inputs.iter().map(|v| values[v.index()][v.out as usize]).collect();
        let made = match &node.op {
            Op::Arg(index) => vec![args[*index]],
            Op::Call(callee) => {
                if dropping[callee.index()] {
                    if !std::mem::replace(&mut embedded, true) {
                        inputs[0] = g.scoped("embedding_dropout", |g| g.dropout(inputs[0], rate))?;
                    }
                    inputs.push(g.random_key()?);
                }
                g.emit(Op::Call(*callee), &inputs)?
            }
            op => g.emit(op.clone(), &inputs)?,
        };
        let made = match made[..] {
            [y] if is_place(node.op_name(), &node.scope, scopes) => vec![g.dropout(y, rate)?],
            _ => made,
        };
        values.push(made);
    }
    g.set_scope("");
    let data = function.outputs.iter().filter(|output| output.role == Role::Data);
    Ok(data.map(|output| values[output.var.index()][output.var.out as usize]).collect())
}
