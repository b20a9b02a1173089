//! The end of every decoder's graph: logits, sampling and the probabilities of tokens.

use ridge_graph::ops::SampleToken;
use ridge_graph::{Builder, DType, Dim, Graph, Result as GraphResult, Shape, Type, Var};

use crate::model::{BuildOptions, HISTORY, LAST_HIDDEN, PROMPT_LENGTHS, StepInputs, history_type, symbols};

/// Ends a decoder's graph from its last hidden states `[tokens, hidden]`, with the outputs that compilation chooses
/// from:
/// - `hidden`: f32 `[tokens, hidden]`;
/// - `all_logits`: f32 `[tokens, vocab]`;
/// - `logits`: f32 `[seqs, vocab]`, of each row's last token; unspecified where a row has none;
/// - `next`: i32 `[seqs]`, sampled from `logits` by each row's keys ([`SampleToken::KEYS`] but for the position, which is
///   that which the token will have); -1 where it cannot be;
/// - `next_adjusted`: the same after each row's biases (`bias_ids`, `bias_values`), penalties (`prompt_lengths`,
///   `repetition_penalty`, `frequency_penalty`, `presence_penalty`) and those of DRY (`dry_multiplier`, `dry_base`,
///   `dry_allowed_length`, `dry_range`, `dry_breakers`), in that order, of the tokens that are not `forbidden`; rows that
///   ask for none get the same token;
/// - `logprob`, `adjusted_logprob`: f32 `[seqs]`, the natural logarithm of `next`'s or `next_adjusted`'s probability by
///   `logits` as they are;
/// - `top_ids`, `top_logprobs`: i32 and f32 `[seqs, top]`, the most likely tokens by `logits` as they are;
/// - with drafts [`LAST_HIDDEN`].
///
/// Tokens of the step are written to the state [`HISTORY`] at `slots`, i32 `[tokens]`.
///
/// # Errors
/// Those of `head`, which maps hidden states to logits.
pub fn finish_decoder(
    mut g: Builder,
    hidden: Var,
    step: &StepInputs,
    [positions, slots]: [Var; 2],
    options: &BuildOptions,
    head: impl Fn(&mut Builder, Var) -> GraphResult<Var>,
) -> GraphResult<Graph> {
    let seqs = Dim::sym(symbols::SEQS);
    let history = g.state(HISTORY, history_type(options))?;
    let history = g.history_write(history, step.token_ids, slots)?;
    let all_logits = head(&mut g, hidden)?;
    let all_logits = g.cast(all_logits, DType::F32)?;

    // A row without tokens, such as padding, has no last one.
    let [starts, ends] = [0, 1].map(|at| g.slice(step.query_start, 0, at, &seqs));
    let (starts, ends) = (starts?, ends?);
    let (one, nowhere) = (g.constant(DType::I32, 1.0)?, g.constant(DType::I32, -1.0)?);
    let (last, has_tokens) = (g.sub(ends, one)?, g.lt(starts, ends)?);
    let last = g.select(has_tokens, last, nowhere)?;
    let last_hidden = g.take_rows(hidden, last, 0)?;
    let logits = head(&mut g, last_hidden)?;
    let logits = g.cast(logits, DType::F32)?;

    let position = g.take_rows(positions, last, 0)?;
    let lengths = g.add(position, one)?;
    let next = g.scoped("sample", |g| sample(g, logits, lengths))?;
    let adjusted = g.scoped("adjust", |g| adjust(g, logits, [history, step.block_table, lengths]))?;
    let next_adjusted = g.scoped("sample", |g| sample(g, adjusted, lengths))?;
    let logarithms = g.scoped("logprobs", |g| logprobs(g, logits, [next, next_adjusted]))?;
    let wide = g.cast(hidden, DType::F32)?;
    let mut outputs = vec![("hidden".into(), wide), ("all_logits".into(), all_logits), ("logits".into(), logits)];
    outputs.extend([("next".into(), next), ("next_adjusted".into(), next_adjusted)]);
    outputs.extend(
        ["logprob", "adjusted_logprob", "top_ids", "top_logprobs"].map(str::to_owned).into_iter().zip(logarithms),
    );
    outputs.extend((options.drafts > 0).then(|| (LAST_HIDDEN.to_owned(), last_hidden)));
    g.finish(outputs)
}

/// The token that follows `lengths` others, of each row of `logits`.
pub(crate) fn sample(g: &mut Builder, logits: Var, lengths: Var) -> GraphResult<Var> {
    let mut keys = [lengths; SampleToken::KEYS.len()];
    for (key, (name, dtype)) in keys.iter_mut().zip(SampleToken::KEYS) {
        *key = match name {
            "position" => g.cast(lengths, dtype)?,
            name => g.step_input(name, Type::tensor(dtype, [&Dim::sym(symbols::SEQS)]))?,
        };
    }
    g.sample_token(logits, keys)
}

/// Logits after what the rows ask for, of which `said` is history, block table and lengths.
fn adjust(g: &mut Builder, logits: Var, said: [Var; 3]) -> GraphResult<Var> {
    let seqs = Dim::sym(symbols::SEQS);
    let mut row = |name: &str, dtype| g.step_input(name, Type::tensor(dtype, [&seqs]));
    let prompts = row(PROMPT_LENGTHS, DType::I32)?;
    let penalties = [
        row("repetition_penalty", DType::F32)?,
        row("frequency_penalty", DType::F32)?,
        row("presence_penalty", DType::F32)?,
    ];
    let dry = [
        row("dry_multiplier", DType::F32)?,
        row("dry_base", DType::F32)?,
        row("dry_allowed_length", DType::I32)?,
        row("dry_range", DType::I32)?,
    ];
    let mut table = |name: &str, dtype, of: &str| g.step_input(name, Type::tensor(dtype, [&seqs, &Dim::sym(of)]));
    let breakers = table("dry_breakers", DType::I32, symbols::BREAKERS)?;
    let ids = table("bias_ids", DType::I32, symbols::BIASES)?;
    let values = table("bias_values", DType::F32, symbols::BIASES)?;
    let words = Shape(vec![seqs.clone(), Dim::sym(symbols::FORBIDDEN)]);
    let forbidden = g.late_input("forbidden", Type::tensor(DType::I32, words))?;
    let logits = g.logit_bias(logits, ids, values)?;
    let [history, blocks, lengths] = said;
    let logits = g.penalties(logits, [history, blocks, lengths, prompts], penalties)?;
    let logits = g.dry(logits, said, dry, breakers)?;
    g.forbid_tokens(logits, forbidden)
}

/// The logarithms of the probabilities of `chosen` tokens, and the most likely tokens with theirs.
fn logprobs(g: &mut Builder, logits: Var, chosen: [Var; 2]) -> GraphResult<[Var; 4]> {
    let shape = g.ty(logits)?.shape.clone();
    let (seqs, vocab) = (shape.0[0].clone(), shape.last());
    let vector = Shape(vec![seqs.clone()]);
    let rows = vocab.as_const().map_or_else(|| seqs.clone(), |vocab| seqs.clone() * vocab as i64);
    let largest = g.reduce_max(logits, 1)?;
    let below = g.sub(logits, largest)?;
    let weights = g.exp(below)?;
    let total = g.reduce_sum(weights, 1)?;
    let total = g.log(total)?;
    let normal = g.sub(below, total)?;
    let flat = g.reshape(normal, Shape(vec![rows]))?;
    let width = g.dim_value(&vocab)?;
    let width = g.cast(width, DType::I32)?;
    let row = g.iota(vector.clone(), 0, DType::I32)?;
    let begin = g.mul(row, width)?;
    let mut found = [logits; 2];
    for (found, token) in found.iter_mut().zip(chosen) {
        let place = g.add(begin, token)?;
        *found = g.gather(flat, place, 0)?;
    }
    let (top, ids) = g.sort(normal, 1, true, Dim::sym(symbols::TOP))?;
    Ok([found[0], found[1], ids, top])
}
