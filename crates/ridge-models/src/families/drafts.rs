//! The graph by which a model's prediction module drafts tokens (`prediction.rs`), for rows whose next token is known and not in
//! the cache. The module is applied once for each draft, from its own hidden state and draft after the first; each application adds
//! an entry to the module's cache, if the sequence has a block there, which the steps that compute these tokens write again.

use ridge_graph::{Builder, DType, Dim, Graph, GraphError, Result as GraphResult, Shape, Type, Var};

use super::decoder::{DecoderFamily, Layers, embedding_table, head};
use super::decoder_layer::LayerInputs;
use super::prediction::PredictionScopes;
use super::tensors::TensorTable;
use crate::model::{BuildOptions, DRAFTS, LAST_HIDDEN, StepInputs, symbols};
use crate::sampled::sample;

/// The output with the logits that drafts are sampled from, f32 `[seqs, drafts, vocab]`.
const DRAFT_LOGITS: &str = "draft_logits";

/// Builds the drafting graph; see [`DRAFTS`].
///
/// # Errors
/// When the model has no module that predicts tokens, or one that the engine cannot run.
pub(super) fn build(tensors: &TensorTable, family: &dyn DecoderFamily, options: &BuildOptions) -> GraphResult<Graph> {
    let refused = |why: &str| GraphError::Use { at: "drafts".into(), why: why.into() };
    let scopes = family.prediction().ok_or_else(|| refused("the model has no module that predicts further tokens"))?;
    let index = family.decoder().num_hidden_layers;
    if family.window(index).is_some() || !family.states(index, options).fixed.is_empty() {
        return Err(refused("a prediction module whose attention is not over all tokens is not supported"));
    }
    let (seqs, vocab) = (Dim::sym(symbols::SEQS), family.decoder().vocab_size);
    let mut g = Builder::new();
    let step = StepInputs::ask(&mut g)?;
    let hidden = [seqs.clone(), family.decoder().hidden_size.into()];
    let hidden = g.step_input(LAST_HIDDEN, Type::tensor(options.activations, Shape(hidden.to_vec())))?;
    let inputs = LayerInputs::new(step.token_ids, step.seq_ids);
    let mut drafting = Drafting {
        layers: Layers::new(tensors, family, options, inputs),
        tensors,
        family,
        options,
        scopes: &scopes,
        step,
        token_ids: step.token_ids,
        hidden,
    };
    let (mut drafts, mut logits) = (Vec::new(), Vec::new());
    for nth in 0..options.drafts {
        let (logits_of_draft, draft) = drafting.next(&mut g, nth)?;
        drafts.push(g.reshape(draft, Shape(vec![seqs.clone(), 1.into()]))?);
        logits.push(g.reshape(logits_of_draft, Shape(vec![seqs.clone(), 1.into(), vocab.into()]))?);
    }
    let drafts = g.concat(&drafts, 1)?;
    let logits = g.concat(&logits, 1)?;
    g.finish(vec![(DRAFTS.into(), drafts), (DRAFT_LOGITS.into(), logits)])
}

/// The module between two applications.
struct Drafting<'a> {
    layers: Layers<'a>,
    tensors: &'a TensorTable,
    family: &'a dyn DecoderFamily,
    options: &'a BuildOptions,
    scopes: &'a PredictionScopes,
    step: StepInputs,
    /// The latest tokens, i32 `[tokens]`.
    token_ids: Var,
    /// Hidden states of the tokens before them, `[seqs, hidden]`.
    hidden: Var,
}

impl Drafting<'_> {
    /// Application `nth`: the logits of the token that follows the latest, and that token by each row's keys of sampling, as the
    /// model will sample it at its position.
    fn next(&mut self, g: &mut Builder, nth: usize) -> GraphResult<(Var, Var)> {
        let (step, options, norm) = (self.step, self.options, self.family.norm());
        // An entry stands at the position of the hidden state, before the token that follows it.
        let before = g.constant(DType::I32, nth as f64 - 1.0)?;
        let lengths = g.add(step.lengths, before)?;
        let (positions, slots) =
            g.token_layout(step.seq_ids, step.query_start, lengths, step.block_table, options.block_size)?;
        self.layers.inputs.positions = positions;
        let table = embedding_table(g, self.tensors, self.family.decoder())?;
        let embedded = g.embedding(table, self.token_ids, options.activations)?;
        let hidden = g.gather(self.hidden, step.seq_ids, 0)?;
        let x = self.scopes.join(g, norm, [embedded, hidden])?;
        let x = self.layers.predict(g, &self.scopes.layer, x, slots)?;
        let x = norm.apply(g, &self.scopes.norm, x)?;
        let starts = g.slice(step.query_start, 0, 0, Dim::sym(symbols::SEQS))?;
        self.hidden = g.gather(x, starts, 0)?;
        let logits = head(g, self.tensors, self.family, self.hidden)?;
        let two = g.constant(DType::I32, 2.0)?;
        let position = g.add(lengths, two)?;
        let draft = g.scoped("sample", |g| sample(g, logits, position))?;
        self.token_ids = g.gather(draft, step.seq_ids, 0)?;
        Ok((logits, draft))
    }
}
