//! Dropout added to a finished graph, so that the graph that is trained is the one that is served.

use crate::error::{GraphError, Result};
use crate::graph::{Builder, Function, Graph, Node, Op, Role, Var};
use crate::ops::RaggedAttention;

/// Where [`with_dropout`] drops elements, and with which probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DropoutPlaces<'a> {
    /// Behind each `linear` whose scope is one of `scopes`, and on the first argument of the first call in main of a function
    /// that has one: the residual branches of a decoder and its embedding. See [`Dropout`](crate::ops::Dropout).
    pub residual: f64,
    /// The shares of each `ragged_attention` in a function. See [`RaggedAttention::dropout`].
    pub attention: f64,
    /// Scopes within their functions.
    pub scopes: &'a [&'a str],
}

/// `graph` with dropout at `places` in the functions that main calls.
///
/// # Errors
/// When the graph has states, or lacks a place whose rate is above 0.
pub fn with_dropout(graph: &Graph, places: &DropoutPlaces<'_>) -> Result<Graph> {
    let mut g = Builder::new();
    let mut called: Vec<Dropping> = Vec::with_capacity(graph.functions.len());
    for (index, function) in graph.functions.iter().enumerate() {
        if index == graph.main.index() {
            // Main is the last and is made below.
            called.push(Dropping::default());
            continue;
        }
        let has = |is: &dyn Fn(&Node) -> bool| function.nodes.iter().any(is);
        let of = |node: &Node| match node.op {
            Op::Call(callee) => called[callee.index()],
            _ => Dropping::default(),
        };
        let dropping = Dropping {
            residual: has(&|node| places.is_branch(node) || of(node).residual),
            attention: has(&|node| places.attention_of(node).is_some() || of(node).attention),
        };
        g.function(&function.name, |g| rebuilt(g, function, places, &called, false))?;
        called.push(dropping);
    }
    if places.residual > 0.0 && !called.iter().any(|dropping| dropping.residual) {
        let why = format!("no function has a linear in one of the scopes {}", places.scopes.join(", "));
        return Err(GraphError::usage("dropout", why));
    }
    if places.attention > 0.0 && !called.iter().any(|dropping| dropping.attention) {
        return Err(GraphError::usage("dropout", "no function has attention whose shares can be dropped"));
    }
    let main = graph.main();
    let values = rebuilt(&mut g, main, places, &called, true)?;
    let names = main.outputs.iter().filter(|output| output.role == Role::Data).map(|output| output.name.to_string());
    g.finish(names.zip(values).collect())
}

/// What a function drops, in itself or in what it calls.
#[derive(Clone, Copy, Debug, Default)]
struct Dropping {
    residual: bool,
    attention: bool,
}

impl DropoutPlaces<'_> {
    fn is_branch(&self, node: &Node) -> bool {
        self.residual > 0.0 && node.op_name() == "linear" && self.scopes.contains(&&*node.scope)
    }

    /// The op of `node` with dropout, if it is attention.
    fn attention_of(&self, node: &Node) -> Option<RaggedAttention> {
        match &node.op {
            Op::Composite(op) if self.attention > 0.0 => {
                let op = op.downcast::<RaggedAttention>()?;
                Some(RaggedAttention { dropout: self.attention, ..op.clone() })
            }
            _ => None,
        }
    }
}

/// The nodes of `function` once more; gives its data outputs.
fn rebuilt(
    g: &mut Builder,
    function: &Function,
    places: &DropoutPlaces<'_>,
    called: &[Dropping],
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
                let Dropping { residual, attention } = called[callee.index()];
                if residual && !std::mem::replace(&mut embedded, true) {
                    inputs[0] = g.scoped("embedding_dropout", |g| g.dropout(inputs[0], places.residual))?;
                }
                if residual || attention {
                    inputs.push(g.random_key()?);
                }
                g.emit(Op::Call(*callee), &inputs)?
            }
            op => match (places.attention_of(node), &inputs[..]) {
                (Some(op), [q, k, v, ids]) if !is_main => vec![g.ragged_attention([*q, *k, *v], *ids, op)?],
                _ => g.emit(op.clone(), &inputs)?,
            },
        };
        let made = match made[..] {
            [y] if !is_main && places.is_branch(node) => vec![g.dropout(y, places.residual)?],
            _ => made,
        };
        values.push(made);
    }
    g.set_scope("");
    let data = function.outputs.iter().filter(|output| output.role == Role::Data);
    Ok(data.map(|output| values[output.var.index()][output.var.out as usize]).collect())
}
