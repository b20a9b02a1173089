//! What training adds to the routing of tokens to experts in a finished graph: losses that balance experts, limits to
//! the tokens that one takes, and counts of the tokens that each was sent. The graph that is trained stays the one that
//! is served.

use crate::dtype::DType;
use crate::error::{GraphError, Result};
use crate::graph::{Builder, Function, Graph, Node, Op, Role, Var};
use crate::ops::{ExpertPermutation, MoeRouter};
use crate::shape::Shape;

/// How tokens are sent to experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dispatch {
    /// Each expert takes every token that chose it.
    Dropless,
    /// An expert takes the first tokens of a step that chose it, up to this number; the others do without it and keep what
    /// their other experts give (Fedus et al. 2022, "Switch Transformers", section 2.2).
    Capacity(usize),
    /// As [`Dispatch::Capacity`], and each expert's tokens are padded to this number, so that all experts multiply equal shapes.
    Padded(usize),
    /// Each expert takes this number of tokens, those that score highest for it (Zhou et al. 2022, "Mixture-of-Experts with
    /// Expert Choice Routing", section 3.2). At most the tokens of a step.
    ExpertChoice(usize),
}

/// What [`with_routing`] adds. Let `N` be the tokens of a step, without padding, times the layers with experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutingTerms {
    /// Factor of `E * sum over experts e of f_e * p_e`, where `E` is the number of experts, `f_e` the pairs of a token and a
    /// chosen expert that are of `e` over `N`, and `p_e` the mean over `N` of its probability (Fedus et al. 2022, equation 4;
    /// transformers' `load_balancing_loss_func`). Probabilities are the softmax of the logits; of routers with sigmoids,
    /// those over their sum (DeepSeek-AI 2024, "DeepSeek-V3", equation 19).
    pub balance: f64,
    /// Factor of the mean over `N` of the squared logarithm of the sum of the exponentials of a token's logits (Zoph et al.
    /// 2022, "ST-MoE", equation 5).
    pub z: f64,
    /// How tokens are sent.
    pub dispatch: Dispatch,
}

/// A layer with experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutedLayer {
    /// The scope of its call in main, such as `model.layers.3`.
    pub scope: String,
    /// Number of experts.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// The weight that is added to scores for the choice alone, f32 `[experts]`, where it has one.
    pub bias: Option<String>,
}

/// Tokens that chose each expert of each layer, before any are dropped: f32 `[layers, experts]`.
pub const EXPERT_LOAD: &str = "expert_load";
/// Choices of each layer that were dropped, and with [`Dispatch::ExpertChoice`] tokens that no expert took: f32 `[layers]`.
pub const EXPERT_DROPPED: &str = "expert_dropped";

/// The layers of `graph` that send tokens to experts, in order.
///
/// # Errors
/// When a router is not in a function that main calls, or layers have different numbers of experts.
pub fn routed_layers(graph: &Graph) -> Result<Vec<RoutedLayer>> {
    let main = graph.main();
    let routers: Vec<Option<Router>> = graph.functions.iter().map(Router::of).collect();
    let misplaced = |name: &str| GraphError::usage(name, "has a router that is not in a function which main calls");
    if routers[graph.main.index()].is_some() {
        return Err(misplaced(&main.name));
    }
    for function in graph.functions.iter().filter(|f| f.name != main.name) {
        let calls = |node: &Node| matches!(node.op, Op::Call(of) if routers[of.index()].is_some());
        if function.nodes.iter().any(calls) {
            return Err(misplaced(&function.name));
        }
    }
    let mut layers: Vec<RoutedLayer> = Vec::new();
    for node in &main.nodes {
        let Op::Call(callee) = node.op else { continue };
        let Some(router) = &routers[callee.index()] else { continue };
        let argument = |at: usize| match main.nodes[node.inputs[at].index()].op {
            Op::Arg(index) => Some(main.args[index].name.to_string()),
            _ => None,
        };
        let bias = router.bias.and_then(argument);
        layers.push(RoutedLayer {
            scope: node.scope.to_string(),
            experts: router.experts,
            top_k: router.op.top_k,
            bias,
        });
    }
    if let Some(other) = layers.iter().find(|layer| layer.experts != layers[0].experts) {
        let why = format!("has {} experts, where {} has {}", other.experts, layers[0].scope, layers[0].experts);
        return Err(GraphError::usage(&other.scope, why));
    }
    Ok(layers)
}

/// `graph`, a training graph with the outputs `loss_sum` and `target_count`, with `terms`: what they add to the mean loss of
/// the targets is in `loss_sum`, times `target_count`. Outputs are those it had, [`EXPERT_LOAD`] and [`EXPERT_DROPPED`].
///
/// # Errors
/// When it has no layers with experts, or states, or its experts are not in the order that `terms` ask for.
pub fn with_routing(graph: &Graph, terms: &RoutingTerms) -> Result<Graph> {
    let layers = routed_layers(graph)?;
    let Some(first) = layers.first() else { return Err(GraphError::usage("routing", "no layer has experts")) };
    let mut g = Builder::new();
    for (index, function) in graph.functions.iter().enumerate() {
        // Main is the last and is made below.
        if index != graph.main.index() {
            g.function(&function.name, |g| rebuilt_function(g, function, terms))?;
        }
    }
    let main = graph.main();
    let mut of_layers: Vec<Vec<Var>> = Vec::new();
    let values = rebuilt(&mut g, main, &mut |g, at, inputs| {
        let op = &main.nodes[at].op;
        let made = g.emit(op.clone(), &inputs)?;
        if let Op::Call(callee) = *op
            && Router::of(graph.function(callee)).is_some()
        {
            let before = graph.function(callee).outputs.iter().filter(|o| o.role == Role::Data).count();
            of_layers.push(made[before..].to_vec());
        }
        Ok(made)
    })?;
    let mut outputs: Vec<(String, Var)> = named_outputs(main, &values);
    g.set_scope("routing");
    let each = |at: usize| of_layers.iter().map(|of| of[at]).collect::<Vec<Var>>();
    let load = g.concat(&each(LOAD), 0)?;
    let dropped = g.concat(&each(DROPPED), 0)?;
    let added = loss_terms(&mut g, terms, first.experts, load, [&each(PROBABILITIES), &each(Z), &each(TOKENS)])?;
    if let Some(added) = added {
        let of = |name: &str| outputs.iter().position(|(known, _)| known == name);
        let missing = || GraphError::usage("routing", "the graph has no outputs `loss_sum` and `target_count`");
        let (sum, count) = of("loss_sum").zip(of("target_count")).ok_or_else(missing)?;
        let added = g.mul(added, outputs[count].1)?;
        outputs[sum].1 = g.add(outputs[sum].1, added)?;
    }
    g.set_scope("");
    outputs.extend([(EXPERT_LOAD.to_owned(), load), (EXPERT_DROPPED.to_owned(), dropped)]);
    g.finish(outputs)
}

/// What a function with a router gives behind its outputs: f32 `[1, experts]`, `[1]`, `[1, experts]`, `[1, 1]` and `[1, 1]`.
const LOAD: usize = 0;
const DROPPED: usize = 1;
const PROBABILITIES: usize = 2;
const Z: usize = 3;
const TOKENS: usize = 4;

/// The terms of the mean loss, an f32 scalar; `None` if there are none.
fn loss_terms(
    g: &mut Builder,
    terms: &RoutingTerms,
    experts: usize,
    load: Var,
    [probabilities, z, tokens]: [&[Var]; 3],
) -> Result<Option<Var>> {
    if terms.balance == 0.0 && terms.z == 0.0 {
        return Ok(None);
    }
    let total = |g: &mut Builder, parts: &[Var]| {
        let all = g.concat(parts, 0)?;
        g.reduce_sum(all, 0)
    };
    let one = g.constant(DType::F32, 1.0)?;
    let tokens = total(g, tokens)?;
    let tokens = g.max(tokens, one)?;
    let mut sum = g.constant(DType::F32, 0.0)?;
    if terms.balance > 0.0 {
        let chosen = g.reduce_sum(load, 0)?;
        let chosen = g.div(chosen, tokens)?;
        let probability = total(g, probabilities)?;
        let probability = g.div(probability, tokens)?;
        let each = g.mul(chosen, probability)?;
        let each = g.reduce_sum(each, 1)?;
        let factor = g.constant(DType::F32, terms.balance * experts as f64)?;
        let balance = g.mul(each, factor)?;
        let balance = g.reshape(balance, Shape::default())?;
        sum = g.add(sum, balance)?;
    }
    if terms.z > 0.0 {
        let squares = total(g, z)?;
        let mean = g.div(squares, tokens)?;
        let factor = g.constant(DType::F32, terms.z)?;
        let z = g.mul(mean, factor)?;
        let z = g.reshape(z, Shape::default())?;
        sum = g.add(sum, z)?;
    }
    Ok(Some(sum))
}

/// The router of a function.
struct Router {
    op: MoeRouter,
    /// The router's node and that of the permutation by what it chose.
    nodes: [usize; 2],
    experts: usize,
    /// The function's argument that is its bias.
    bias: Option<usize>,
}

impl Router {
    fn of(function: &Function) -> Option<Self> {
        let permutation = function.nodes.iter().position(|node| node.op_name() == "expert_permutation")?;
        let at = function.nodes[permutation].inputs[0].index();
        let (Op::Composite(permuted), Op::Composite(op)) = (&function.nodes[permutation].op, &function.nodes[at].op)
        else {
            return None;
        };
        let (op, experts) = (*op.downcast::<MoeRouter>()?, permuted.downcast::<ExpertPermutation>()?.experts);
        let bias = op.bias.then(|| function.nodes[at].inputs[1]).and_then(|mut bias| {
            loop {
                let node = &function.nodes[bias.index()];
                match (&node.op, &node.inputs[..]) {
                    (Op::Arg(index), _) => break Some(*index),
                    (_, [of]) => bias = *of,
                    _ => break None,
                }
            }
        });
        Some(Self { op, nodes: [at, permutation], experts, bias })
    }
}

/// Makes the outputs of the node of this index from its inputs.
type MakeNode<'a> = &'a mut dyn FnMut(&mut Builder, usize, Vec<Var>) -> Result<Vec<Var>>;

/// The nodes of `function` once more, each made by `make` from its index and its inputs.
fn rebuilt(g: &mut Builder, function: &Function, make: MakeNode<'_>) -> Result<Vec<Vec<Var>>> {
    if let Some(state) = function.args.iter().find(|arg| arg.role == Role::State) {
        return Err(GraphError::usage(&state.name, "is a state; routing is changed in graphs without any"));
    }
    let args: Vec<Var> = function.args.iter().map(|arg| g.push_arg(arg.clone())).collect();
    let mut values: Vec<Vec<Var>> = Vec::with_capacity(function.nodes.len());
    for (at, node) in function.nodes.iter().enumerate() {
        g.set_scope(&node.scope);
        let inputs: Vec<Var> = node.inputs.iter().map(|v| values[v.index()][v.out as usize]).collect();
        values.push(match node.op {
            Op::Arg(index) => vec![args[index]],
            _ => make(g, at, inputs)?,
        });
    }
    g.set_scope("");
    Ok(values)
}

fn named_outputs(function: &Function, values: &[Vec<Var>]) -> Vec<(String, Var)> {
    let data = function.outputs.iter().filter(|output| output.role == Role::Data);
    data.map(|o| (o.name.to_string(), values[o.var.index()][o.var.out as usize])).collect()
}

/// `function`, and what it gives behind its outputs if it has a router.
fn rebuilt_function(g: &mut Builder, function: &Function, terms: &RoutingTerms) -> Result<Vec<Var>> {
    let router = Router::of(function);
    let (mut logits, mut given) = (None, Vec::new());
    let values = rebuilt(g, function, &mut |g, at, inputs| {
        let made = g.emit(function.nodes[at].op.clone(), &inputs)?;
        let Some(router) = &router else { return Ok(made) };
        if at == router.nodes[0] {
            let wide = g.cast(inputs[0], DType::F32)?;
            logits = Some(wide);
            return match terms.dispatch {
                Dispatch::ExpertChoice(_) => Ok(vec![made[0], weights_of_all(g, function, router, wide)?]),
                _ => Ok(made),
            };
        }
        let (true, Some(logits)) = (at == router.nodes[1], logits) else { return Ok(made) };
        let (made, load, dropped) = dispatched(g, router, logits, [inputs[0], inputs[1]], made, terms.dispatch)?;
        given = vec![load, dropped];
        given.extend(layer_terms(g, &router.op, logits, inputs[1])?);
        Ok(made)
    })?;
    Ok(named_outputs(function, &values).into_iter().map(|(_, var)| var).chain(given).collect())
}

/// The scores of all experts, f32 `[tokens, experts]`.
fn scores(g: &mut Builder, op: &MoeRouter, logits: Var) -> Result<Var> {
    if op.sigmoid { g.sigmoid(logits) } else { g.softmax(logits) }
}

/// What each expert's output of each token is multiplied by, if it takes the token: f32 `[tokens, experts]`.
fn weights_of_all(g: &mut Builder, function: &Function, router: &Router, logits: Var) -> Result<Var> {
    let uses_weights = |node: &&Node| node.inputs.iter().any(|v| v.index() == router.nodes[0] && v.out == 1);
    if let Some(user) = function.nodes.iter().filter(uses_weights).find(|node| node.op_name() != "expert_combine") {
        let why = format!("its {} takes a weight for each choice of a token, so experts cannot choose", user.op_name());
        return Err(GraphError::usage(&function.name, why));
    }
    let scores = scores(g, &router.op, logits)?;
    let scale = g.constant(DType::F32, router.op.scale)?;
    g.mul(scores, scale)
}

/// `[tokens, 1]`: is it a token, rather than padding?
fn is_token(g: &mut Builder, seq_ids: Var) -> Result<Var> {
    let tokens = g.ty(seq_ids)?.shape.0[0].clone();
    let zero = g.constant(DType::I32, 0.0)?;
    let is_token = g.ge(seq_ids, zero)?;
    g.reshape(is_token, Shape(vec![tokens, 1.into()]))
}

/// Rows of each expert by `offsets`, i32 `[experts + 1]`: f32 `[1, experts]`.
fn rows_of_experts(g: &mut Builder, offsets: Var, experts: usize) -> Result<Var> {
    let (begin, end) = (g.slice(offsets, 0, 0, experts)?, g.slice(offsets, 0, 1, experts)?);
    let rows = g.sub(end, begin)?;
    let rows = g.cast(rows, DType::F32)?;
    g.reshape(rows, [1, experts])
}

/// Where experts begin that have `size` rows each: i32 `[experts + 1]`.
fn equal_offsets(g: &mut Builder, experts: usize, size: usize) -> Result<Var> {
    let size = g.constant(DType::I32, size as f64)?;
    let expert = g.iota([experts + 1], 0, DType::I32)?;
    g.mul(expert, size)
}

/// What the permutation gives, made from that of all choices, `made`; the load; and what was dropped.
fn dispatched(
    g: &mut Builder,
    router: &Router,
    logits: Var,
    [ids, seq_ids]: [Var; 2],
    made: Vec<Var>,
    dispatch: Dispatch,
) -> Result<(Vec<Var>, Var, Var)> {
    let experts = router.experts;
    let sum = |g: &mut Builder, x: Var| {
        let sum = g.reduce_sum(x, 1)?;
        g.reshape(sum, [1])
    };
    match dispatch {
        Dispatch::Dropless => {
            let load = rows_of_experts(g, made[2], experts)?;
            let none = g.constant(DType::F32, 0.0)?;
            let none = g.broadcast(none, [1])?;
            Ok((made, load, none))
        }
        Dispatch::Capacity(capacity) => {
            let load = rows_of_experts(g, made[2], experts)?;
            // Rows of an expert are in the order of tokens.
            let first = g.gather(made[2], ids, 0)?;
            let rank = g.sub(made[1], first)?;
            let capacity = g.constant(DType::I32, capacity as f64)?;
            let fits = g.lt(rank, capacity)?;
            let nowhere = g.constant(DType::I32, -1.0)?;
            let kept = g.select(fits, ids, nowhere)?;
            let (rows, places, offsets) = g.expert_permutation(kept, seq_ids, experts)?;
            let left = rows_of_experts(g, offsets, experts)?;
            let dropped = g.sub(load, left)?;
            let dropped = sum(g, dropped)?;
            Ok((vec![rows, places, offsets], load, dropped))
        }
        Dispatch::Padded(size) => {
            let load = rows_of_experts(g, made[2], experts)?;
            let column = |g: &mut Builder, first: usize| {
                let part = g.slice(made[2], 0, first, experts)?;
                g.reshape(part, [experts, 1])
            };
            let (begin, end) = (column(g, 0)?, column(g, 1)?);
            let nowhere = g.constant(DType::I32, -1.0)?;
            let count = g.constant(DType::I32, size as f64)?;
            let rank = g.iota([experts, size], 1, DType::I32)?;
            let from = g.add(begin, rank)?;
            let is_row = g.lt(from, end)?;
            let rows = g.gather(made[0], from, 0)?;
            let rows = g.select(is_row, rows, nowhere)?;
            let rows = g.reshape(rows, [experts * size])?;
            let first = g.gather(made[2], ids, 0)?;
            let rank = g.sub(made[1], first)?;
            let zero = g.constant(DType::I32, 0.0)?;
            let (is_pair, fits) = (g.ge(made[1], zero)?, g.lt(rank, count)?);
            let fits = g.and(is_pair, fits)?;
            let padded = g.mul(ids, count)?;
            let padded = g.add(padded, rank)?;
            let places = g.select(fits, padded, nowhere)?;
            let offsets = equal_offsets(g, experts, size)?;
            let taken = g.cast(fits, DType::F32)?;
            let taken = g.reduce_sum(taken, 0)?;
            let (all, taken) = (sum(g, load)?, sum(g, taken)?);
            let dropped = g.sub(all, taken)?;
            Ok((vec![rows, places, offsets], load, dropped))
        }
        Dispatch::ExpertChoice(taken) => {
            let tokens = g.ty(seq_ids)?.shape.0[0].clone();
            let scores = scores(g, &router.op, logits)?;
            // Padding is taken last.
            let (is_token, below) = (is_token(g, seq_ids)?, g.constant(DType::F32, -1.0)?);
            let scores = g.select(is_token, scores, below)?;
            let of_experts = g.transpose(scores, &[1, 0])?;
            let (_, chosen) = g.sort(of_experts, 1, true, taken)?;
            let rows = g.reshape(chosen, [experts * taken])?;
            // The place of each pair of a token and an expert.
            let flat = tokens.clone() * experts as i64;
            let count = g.constant(DType::I32, experts as f64)?;
            let expert = g.iota([experts, taken], 0, DType::I32)?;
            let pair = g.mul(chosen, count)?;
            let pair = g.add(pair, expert)?;
            let pair = g.reshape(pair, [experts * taken])?;
            let place = g.iota([experts * taken], 0, DType::I32)?;
            let nowhere = g.constant(DType::I32, -1.0)?;
            let places = g.broadcast(nowhere, Shape(vec![flat]))?;
            let places = g.scatter(places, pair, place, 0)?;
            let places = g.reshape(places, Shape(vec![tokens, experts.into()]))?;
            let places = g.select(is_token, places, nowhere)?;
            let offsets = equal_offsets(g, experts, taken)?;
            let zero = g.constant(DType::I32, 0.0)?;
            let used = g.ge(places, zero)?;
            let used = g.cast(used, DType::F32)?;
            let load = g.reduce_sum(used, 0)?;
            let uses = g.reduce_max(used, 1)?;
            let is_token = g.cast(is_token, DType::F32)?;
            let left = g.sub(is_token, uses)?;
            let left = g.transpose(left, &[1, 0])?;
            let dropped = sum(g, left)?;
            Ok((vec![rows, places, offsets], load, dropped))
        }
    }
}

/// What the loss terms need of a layer: sums over tokens of probabilities, of squared logarithms, and of ones.
fn layer_terms(g: &mut Builder, op: &MoeRouter, logits: Var, seq_ids: Var) -> Result<[Var; 3]> {
    let is_token = is_token(g, seq_ids)?;
    let zero = g.constant(DType::F32, 0.0)?;
    let mut probabilities = scores(g, op, logits)?;
    if op.sigmoid {
        let all = g.reduce_sum(probabilities, 1)?;
        probabilities = g.div(probabilities, all)?;
    }
    let probabilities = g.select(is_token, probabilities, zero)?;
    let most = g.reduce_max(logits, 1)?;
    let above = g.sub(logits, most)?;
    let above = g.exp(above)?;
    let total = g.reduce_sum(above, 1)?;
    let total = g.log(total)?;
    let total = g.add(total, most)?;
    let square = g.mul(total, total)?;
    let square = g.select(is_token, square, zero)?;
    let ones = g.cast(is_token, DType::F32)?;
    Ok([g.reduce_sum(probabilities, 0)?, g.reduce_sum(square, 0)?, g.reduce_sum(ones, 0)?])
}
