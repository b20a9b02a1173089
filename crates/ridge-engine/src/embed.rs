//! Text embeddings: batches of whole texts through an encoder, or through a decoder whose cache is reused for each batch.

use std::ops::Range;

use ridge_graph::{Bindings, DType, Graph, Tensor};
use ridge_models::{
    Encoder, Model, STATE_LINES, SentenceConfig, block_table_name, symbols, windows, with_blocks, with_pooling,
};
use ridge_runtime::{Bucket, Compiled, RuntimeError, Session};

use crate::error::{EngineError, Result};

/// How texts become vectors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbedOptions {
    /// How the vectors of a text's tokens become one, and what that goes through.
    pub sentence: SentenceConfig,
    /// Tokens of a step at most, unless one text alone has more.
    pub tokens: usize,
    /// Of a model that is a classifier, give a text's score for each label instead of a vector.
    pub scores: bool,
}

impl EmbedOptions {
    /// Vectors as `sentence` says, in steps of `tokens` tokens.
    pub fn new(sentence: SentenceConfig, tokens: usize) -> Self {
        Self { sentence, tokens, scores: false }
    }
}

/// A text of tokens, each of a segment; those of one text alone are of segment 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextTokens {
    /// The tokens.
    pub ids: Vec<u32>,
    /// The segment of each.
    pub segments: Vec<u32>,
}

impl From<Vec<u32>> for TextTokens {
    fn from(ids: Vec<u32>) -> Self {
        Self { segments: vec![0; ids.len()], ids }
    }
}

impl TextTokens {
    fn len(&self) -> usize {
        self.ids.len()
    }
}

/// Runs one model over texts.
pub struct Embedder {
    session: Session,
    graph: Graph,
    compiled: Option<Compiled>,
    output: String,
    vocab: usize,
    /// Tokens of a text at most.
    most: usize,
    tokens: usize,
    /// Tokens of a cache block, of a decoder.
    block_size: Option<usize>,
    /// Blocks that the cache has.
    blocks: usize,
    /// Labels of a classifier; 0 where vectors are embeddings.
    labels: usize,
}

impl Embedder {
    /// For an encoder, whose weights `session` has.
    ///
    /// # Errors
    /// When the device cannot run the model.
    pub fn of_encoder(session: Session, encoder: &Encoder, options: EmbedOptions) -> Result<Self> {
        let scores = options.scores && encoder.labels > 0;
        let mut made = Self::new(session, encoder.graph.clone(), (encoder.vocab_size, encoder.max_context), options)?;
        if scores {
            made.output = "scores".to_owned();
            made.labels = encoder.labels;
        }
        made.compile()?;
        Ok(made)
    }

    /// For a decoder, whose weights `session` has. Each token sees those before it alone.
    ///
    /// # Errors
    /// When the device cannot run the model.
    pub fn of_decoder(session: Session, model: &Model, options: EmbedOptions) -> Result<Self> {
        let graph = with_pooling(&model.graph, &[]).map_err(ridge_runtime::RuntimeError::from)?;
        let mut made = Self::new(session, graph, (model.vocab_size, model.max_context), options)?;
        made.block_size = Some(model.block_size);
        Ok(made)
    }

    fn new(session: Session, graph: Graph, (vocab, most): (usize, usize), options: EmbedOptions) -> Result<Self> {
        if options.tokens == 0 {
            return Err(EngineError::Setting { name: "tokens", value: "0".into(), why: "must be at least 1".into() });
        }
        let output = options.sentence.pooling.output(options.sentence.normalize);
        let most = options.sentence.max_tokens.unwrap_or(usize::MAX).min(most);
        let (tokens, blocks) = (options.tokens, 0);
        Ok(Self { session, graph, compiled: None, output, vocab, most, tokens, block_size: None, blocks, labels: 0 })
    }

    /// Labels of a classifier, whose vectors are scores; 0 where vectors are embeddings.
    pub fn labels(&self) -> usize {
        self.labels
    }

    /// Tokens of a text at most: as the model and the options say.
    pub fn max_tokens(&self) -> usize {
        self.most
    }

    /// A vector for each text of tokens, in order.
    ///
    /// # Errors
    /// When a text has no tokens, too many, or one that is not of the vocabulary, before anything runs; when the device
    /// fails, or a vector is not finite.
    pub fn embed(&mut self, texts: &[Vec<u32>]) -> Result<Vec<Vec<f32>>> {
        let texts: Vec<TextTokens> = texts.iter().map(|ids| TextTokens::from(ids.clone())).collect();
        self.embed_texts(&texts)
    }

    /// As [`Embedder::embed`], of texts whose tokens have segments.
    ///
    /// # Errors
    /// As there, and when a text has another number of segments than tokens.
    pub fn embed_texts(&mut self, texts: &[TextTokens]) -> Result<Vec<Vec<f32>>> {
        for TextTokens { ids: text, segments } in texts {
            if segments.len() != text.len() {
                let why = format!("must be one for each of the {} tokens", text.len());
                return Err(EngineError::Setting { name: "segments", value: segments.len().to_string(), why });
            }
            if text.is_empty() {
                return Err(EngineError::EmptyPrompt);
            }
            if text.len() > self.most {
                return Err(EngineError::PromptTooLong { prompt: text.len(), context: self.most });
            }
            if let Some(token) = text.iter().find(|t| **t as usize >= self.vocab) {
                return Err(EngineError::UnknownToken { token: *token, vocab: self.vocab });
            }
        }
        let mut vectors = Vec::with_capacity(texts.len());
        for batch in batches(texts, self.tokens) {
            self.step(&texts[batch], &mut vectors)?;
        }
        Ok(vectors)
    }

    fn step(&mut self, texts: &[TextTokens], vectors: &mut Vec<Vec<f32>>) -> Result<()> {
        let tokens: usize = texts.iter().map(TextTokens::len).sum();
        let of_table = |block_size: usize| texts.iter().map(|t| t.len().div_ceil(block_size)).max().unwrap_or(0);
        let table = self.block_size.map_or(0, of_table);
        self.make_room(table * texts.len())?;
        let bindings =
            Bindings::new().with(symbols::TOKENS, tokens).with(symbols::SEQS, texts.len()).with(symbols::TABLE, table);
        let bindings = room(&self.graph, bindings, self.blocks);
        self.compile()?;
        let compiled = self.compiled.as_ref().expect("compiled just now");
        let mut bucket = compiled.bucket(&bindings)?;
        let ints = |shape: &[usize], values: Vec<i64>| Tensor::int(DType::I32, shape, values);
        let rows = texts.iter().enumerate();
        let mut start = 0;
        let ends = texts.iter().map(|text| {
            start += text.len() as i64;
            start
        });
        let blocks = ints(&[texts.len(), table], (0..(texts.len() * table) as i64).collect());
        let mut tables: Vec<(String, Tensor)> = [
            ("token_ids", ints(&[tokens], texts.iter().flat_map(|t| &t.ids).map(|t| i64::from(*t)).collect())),
            (
                "token_type_ids",
                ints(&[tokens], texts.iter().flat_map(|t| &t.segments).map(|s| i64::from(*s)).collect()),
            ),
            ("seq_ids", ints(&[tokens], rows.flat_map(|(i, t)| std::iter::repeat_n(i as i64, t.len())).collect())),
            ("query_start", ints(&[texts.len() + 1], std::iter::once(0).chain(ends).collect())),
            ("lengths", ints(&[texts.len()], vec![0; texts.len()])),
            // Texts begin without a state and leave none.
            (STATE_LINES, ints(&[texts.len(), 2], vec![-1; 2 * texts.len()])),
        ]
        .map(|(name, tensor)| (name.to_owned(), tensor))
        .into();
        // The blocks of a text have the same numbers in all pools.
        let pools = [None].into_iter().chain(windows(&self.graph).into_iter().map(Some));
        tables.extend(pools.map(|window| (block_table_name(window), blocks.clone())));
        // Families read some of them each.
        let wanted: Vec<String> = bucket.input_names().map(str::to_owned).collect();
        for name in wanted {
            let (_, tensor) =
                tables.iter().find(|(known, _)| *known == name).ok_or_else(|| RuntimeError::Argument {
                    kind: "input",
                    why: format!(
                        "the embedder does not provide it; it provides {}",
                        tables.iter().map(|(n, _)| n.as_str()).collect::<Vec<_>>().join(", ")
                    ),
                    name: name.clone(),
                })?;
            bucket.set(&name, tensor)?;
        }
        run(&mut bucket)?;
        let output = bucket.tensor(&self.output)?;
        let width = output.shape[1];
        for (text, row) in texts.iter().zip(output.floats().chunks(width.max(1))) {
            if !row.iter().all(|x| x.is_finite()) {
                return Err(EngineError::NotFinite { position: text.len() });
            }
            vectors.push(row.iter().map(|x| *x as f32).collect());
        }
        Ok(())
    }

    /// Makes the cache of a decoder have `blocks` blocks or more.
    fn make_room(&mut self, blocks: usize) -> Result<()> {
        if self.block_size.is_some() && blocks > self.blocks {
            self.session.allocate_states(&self.graph, &room(&self.graph, Bindings::new(), blocks))?;
            self.blocks = blocks;
            // Programs hold the states that they were compiled for.
            self.compiled = None;
        }
        Ok(())
    }

    fn compile(&mut self) -> Result<()> {
        if self.compiled.is_none() {
            self.compiled = Some(self.session.compile(&self.graph, &[&self.output])?);
        }
        Ok(())
    }
}

/// `bindings` with `blocks` blocks of each pool, and of states of a fixed size the line that tables have at least.
fn room(graph: &Graph, bindings: Bindings, blocks: usize) -> Bindings {
    with_blocks(graph, bindings.with(symbols::STATE_LINES, 1), blocks)
}

fn run(bucket: &mut Bucket) -> Result<()> {
    bucket.submit()?;
    bucket.wait()?;
    Ok(())
}

/// Ranges of texts of at most `tokens` tokens together, or of one.
fn batches(texts: &[TextTokens], tokens: usize) -> Vec<Range<usize>> {
    let mut batches: Vec<Range<usize>> = Vec::new();
    let mut sum = 0;
    for (i, text) in texts.iter().enumerate() {
        match batches.last_mut() {
            Some(batch) if sum + text.len() <= tokens => {
                batch.end = i + 1;
                sum += text.len();
            }
            _ => {
                batches.push(i..i + 1);
                sum = text.len();
            }
        }
    }
    batches
}

/// The cosine of the angle between each two vectors.
pub fn similarities(vectors: &[Vec<f32>]) -> Vec<Vec<f64>> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let cosine = |a: &[f32], b: &[f32]| dot(a, b) / (dot(a, a) * dot(b, b)).sqrt().max(f64::MIN_POSITIVE);
    vectors.iter().map(|a| vectors.iter().map(|b| cosine(a, b)).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_as_full_as_they_may_be() {
        let texts: Vec<TextTokens> = [3, 4, 9, 1, 1].map(|n| TextTokens::from(vec![0; n])).into();
        assert_eq!(batches(&texts, 7), [0..2, 2..3, 3..5]);
        assert_eq!(batches(&texts, 1), [0..1, 1..2, 2..3, 3..4, 4..5]);
        assert_eq!(batches(&texts, 100).len(), 1);
        assert!(batches(&[], 5).is_empty());
    }
}
