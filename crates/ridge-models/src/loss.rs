//! What a decoder's logits say of given next tokens: the loss that it is trained with, and the scores that it is
//! evaluated by. Both are added to a finished graph.

use ridge_graph::{Builder, DType, Dim, Graph, GraphError, Result as GraphResult, Shape, Type, Var};

use crate::model::symbols;

/// `graph`, a decoder's, with two more things: the step input `targets`, i32 `[tokens]`, the token that should follow
/// each, negative where none is asked for; and the output `loss`, an f32 scalar: the mean over the targets asked for
/// of the negative log likelihood that `all_logits` gives them. 0 without targets.
///
/// # Errors
/// When the graph has no output `all_logits` of `[tokens, vocab]`.
pub fn with_loss(graph: &Graph) -> GraphResult<Graph> {
    let (mut g, mut outputs) = Builder::reopen(graph.clone());
    let logits = all_logits(&outputs, "loss")?;
    let loss = g.scoped("loss", |g| {
        let targets = targets(g)?;
        let losses = g.cross_entropy(logits, targets)?;
        let sum = g.reduce_sum(losses, 0)?;
        mean_loss(g, sum, targets)
    })?;
    outputs.push(("loss".into(), loss.mean));
    g.finish(outputs)
}

/// The loss of a step, as f32 scalars.
pub(crate) struct Loss {
    /// Over the targets asked for; 0 without any.
    pub(crate) mean: Var,
    pub(crate) sum: Var,
    /// Targets asked for.
    pub(crate) count: Var,
}

/// Of the sum of the losses of tokens, 0 where no target is asked for.
pub(crate) fn mean_loss(g: &mut Builder, sum: Var, targets: Var) -> GraphResult<Loss> {
    let zero = g.constant(DType::I32, 0.0)?;
    let asked = g.ge(targets, zero)?;
    let asked = g.cast(asked, DType::F32)?;
    let count = g.reduce_sum(asked, 0)?;
    let one = g.constant(DType::F32, 1.0)?;
    let divisor = g.max(count, one)?;
    let [sum, count, divisor] = [sum, count, divisor].map(|x| g.reshape(x, Shape::default()));
    let (sum, count, divisor) = (sum?, count?, divisor?);
    Ok(Loss { mean: g.div(sum, divisor)?, sum, count })
}

/// `graph`, a decoder's, with the step input `targets` as [`with_loss`] has it, and the output `scores`, f32
/// `[tokens]`: the natural logarithm of the probability that `all_logits` gives each target, 0 where none is asked for;
/// and `score_ids` and `score_logprobs`, i32 and f32 `[tokens, top]`: the most likely tokens that might have followed each,
/// and theirs, most likely first.
///
/// # Errors
/// When the graph has no output `all_logits` of `[tokens, vocab]`.
pub fn with_scores(graph: &Graph) -> GraphResult<Graph> {
    let (mut g, mut outputs) = Builder::reopen(graph.clone());
    let logits = all_logits(&outputs, "scores")?;
    let found = g.scoped("scores", |g| {
        let targets = targets(g)?;
        let losses = g.cross_entropy(logits, targets)?;
        let scores = g.neg(losses)?;
        let largest = g.reduce_max(logits, 1)?;
        let below = g.sub(logits, largest)?;
        let weights = g.exp(below)?;
        let total = g.reduce_sum(weights, 1)?;
        let total = g.log(total)?;
        let total = g.add(total, largest)?;
        let (top, ids) = g.sort(logits, 1, true, Dim::sym(symbols::TOP))?;
        g.sub(top, total).map(|logprobs| [scores, ids, logprobs])
    })?;
    outputs.extend(["scores", "score_ids", "score_logprobs"].map(str::to_owned).into_iter().zip(found));
    g.finish(outputs)
}

fn all_logits(outputs: &[(String, Var)], at: &str) -> GraphResult<Var> {
    let logits = outputs.iter().find(|(name, _)| name == "all_logits").map(|(_, var)| *var);
    logits.ok_or_else(|| {
        let known: Vec<&str> = outputs.iter().map(|(name, _)| name.as_str()).collect();
        let why = format!("no output `all_logits` to compare with targets; the graph has {}", known.join(", "));
        GraphError::Use { at: at.into(), why }
    })
}

/// The step input `targets`.
pub(crate) fn targets(g: &mut Builder) -> GraphResult<Var> {
    g.step_input("targets", Type::tensor(DType::I32, [Dim::sym(symbols::TOKENS)]))
}
