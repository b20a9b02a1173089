//! What a model is made of and what one token of it costs, read off its graph: the figures behind `ridge inspect`.

use ridge_graph::{Bindings, Cost, Graph, Poly, Result, Role, passes};
use serde::Serialize;

use crate::model::{
    DRAFTS, Encoder, ImageClassifier, Model, symbols, with_attended, with_blocks, with_pairs_of_text, with_reached,
};
use crate::module::Module;

/// The parameters of a network, exact for the graph at hand.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModuleSummary {
    /// Family, such as `llama`.
    pub family: &'static str,
    /// Elements of all weights; a weight that is used twice counts once.
    pub parameters: u64,
    /// Bytes of all weights as they are stored.
    pub weight_bytes: u64,
    /// The weights by how they are stored, in the order in which the graph first uses each.
    pub storage: Vec<Storage>,
    /// The weights by scope.
    pub tree: Vec<Scope>,
}

/// A decoder in numbers. Costs follow from the graph by the formulas that each op states.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// Its parameters.
    #[serde(flatten)]
    pub module: ModuleSummary,
    /// Rows of its output.
    pub vocab_size: usize,
    /// Longest context it was made for, in tokens.
    pub max_context: usize,
    /// Bytes that one token takes in the cache, over all layers.
    pub kv_bytes_per_token: u64,
    /// Bytes that one sequence takes in states of a fixed size, over all layers: those of recurrences.
    pub state_bytes_per_sequence: u64,
    /// The cost of generating one token.
    pub token: TokenCost,
}

/// The module of a decoder that drafts further tokens, in numbers. Embedding and output projection are the model's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PredictionSummary {
    /// Its parameters.
    pub parameters: u64,
    /// Their bytes as they are stored.
    pub weight_bytes: u64,
    /// Bytes that one token takes in its cache.
    pub kv_bytes_per_token: u64,
    /// Tokens in its cache that a draft attends to, its own included.
    pub context: usize,
    /// The cost of drafting one token behind one sequence.
    pub draft: StepCost,
}

/// An encoder in numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EncoderSummary {
    /// Its parameters.
    #[serde(flatten)]
    pub module: ModuleSummary,
    /// Rows of its embedding.
    pub vocab_size: usize,
    /// Tokens of a text at most.
    pub max_context: usize,
    /// Elements of a vector.
    pub hidden_size: usize,
    /// Tokens of the text whose cost follows.
    pub tokens: usize,
    /// The cost of one text.
    pub text: StepCost,
}

/// A classifier of images in numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ImageClassifierSummary {
    /// Its parameters.
    #[serde(flatten)]
    pub module: ModuleSummary,
    /// Channels, height and width of an image.
    pub image: [usize; 3],
    /// Positions of an image: its patches and the class token.
    pub positions: usize,
    /// Classes.
    pub labels: usize,
    /// The cost of one image.
    pub cost: StepCost,
}

/// The weights that are stored in one way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Storage {
    /// A dtype, or the name of a format.
    pub name: String,
    /// Elements of these weights.
    pub parameters: u64,
    /// Bytes of these weights, scales and the like included.
    pub bytes: u64,
}

/// One step that appends one token to one sequence and samples the next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TokenCost {
    /// Tokens in the cache that the token attends to, its own included.
    pub context: usize,
    /// What the step costs.
    #[serde(flatten)]
    pub step: StepCost,
    /// Bytes of the cache for `context` tokens.
    pub kv_bytes: u64,
}

/// What a step costs. Amounts beyond a `u64` saturate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StepCost {
    /// Multiplies and adds of matrix products, 2 a pair.
    pub matrix_flops: u64,
    /// Elementwise and reduction arithmetic.
    pub vector_flops: u64,
    /// Exponentials, roots, divisions and trigonometry.
    pub special_flops: u64,
    /// Bytes read if every op reads each of its inputs once.
    pub bytes_read: u64,
    /// Bytes written if every op writes each of its outputs once.
    pub bytes_written: u64,
    /// What `matrix_flops` is of any step, in its tokens, sequences (`seqs`), images and (query, key) pairs.
    pub matrix_formula: String,
}

/// Weights under a common name, or one weight. Siblings with consecutive numbers and the same weights below them are
/// one scope.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Scope {
    /// The part of the name below the parent's, such as `self_attn` or `layers.0..31`.
    pub name: String,
    /// How many scopes this stands for.
    pub repeats: usize,
    /// Elements, over all repeats.
    pub parameters: u64,
    /// Bytes as stored, over all repeats.
    pub bytes: u64,
    /// The type, if this is a weight, such as `bf16[4096, 4096]`.
    #[serde(rename = "type")]
    pub ty: Option<String>,
    /// What one of the repeats holds.
    pub children: Vec<Self>,
}

impl ModuleSummary {
    /// Reads `module`, whose graph has its weights as they are to be stored.
    pub fn new(module: &Module) -> Self {
        let mut storage: Vec<Storage> = Vec::new();
        for arg in module.parameters() {
            let name = arg.ty.format.as_ref().map_or(arg.ty.dtype.name(), |f| f.name());
            let at = storage.iter().position(|s| s.name == name).unwrap_or_else(|| {
                storage.push(Storage { name: name.to_owned(), parameters: 0, bytes: 0 });
                storage.len() - 1
            });
            storage[at].parameters += number(&arg.ty.shape.elements());
            storage[at].bytes += number(&arg.ty.bytes());
        }
        Self {
            family: module.family,
            parameters: storage.iter().map(|s| s.parameters).sum(),
            weight_bytes: storage.iter().map(|s| s.bytes).sum(),
            storage,
            tree: tree(&module.graph),
        }
    }
}

impl Summary {
    /// Reads `model`, whose graph has its weights as they are to be stored, with `context` tokens in the cache.
    ///
    /// # Errors
    /// A mistake of ours: when the graph has no output `next`, or costs in symbols that no step has.
    pub fn new(model: &Model, context: usize) -> Result<Self> {
        let kv_bytes_per_token = model.state_bytes_per_token();
        Ok(Self {
            module: ModuleSummary::new(model),
            vocab_size: model.vocab_size,
            max_context: model.max_context,
            kv_bytes_per_token,
            state_bytes_per_sequence: model.state_bytes_per_sequence(),
            token: TokenCost {
                context,
                step: cost_of_token(&model.graph, "next", model.block_size, context)?,
                kv_bytes: kv_bytes_per_token.saturating_mul(context as u64),
            },
        })
    }
}

impl PredictionSummary {
    /// Reads what `drafting`, `model` built with one draft, has besides, with `context` tokens in the cache. `None` where it drafts
    /// nothing.
    ///
    /// # Errors
    /// A mistake of ours: as for [`Summary::new`].
    pub fn new(model: &Model, drafting: &Model, context: usize) -> Result<Option<Self>> {
        let Some(graph) = &drafting.drafts else { return Ok(None) };
        Ok(Some(Self {
            parameters: drafting.parameter_count() - model.parameter_count(),
            weight_bytes: drafting.weight_bytes() - model.weight_bytes(),
            kv_bytes_per_token: drafting.state_bytes_per_token() - model.state_bytes_per_token(),
            context,
            draft: cost_of_token(graph, DRAFTS, model.block_size, context)?,
        }))
    }
}

impl EncoderSummary {
    /// Reads `encoder`, whose graph has its weights as they are to be stored, for a text of `tokens` tokens.
    ///
    /// # Errors
    /// A mistake of ours: as for [`Summary::new`].
    pub fn new(encoder: &Encoder, tokens: usize) -> Result<Self> {
        let step = Bindings::new().with(symbols::TOKENS, tokens).with(symbols::SEQS, 1);
        Ok(Self {
            module: ModuleSummary::new(encoder),
            vocab_size: encoder.vocab_size,
            max_context: encoder.max_context,
            hidden_size: encoder.hidden_size,
            tokens,
            text: step_cost(&encoder.graph, "hidden", |cost| {
                with_pairs_of_text(cost, with_reached(cost, step, tokens), tokens, encoder.causal)
            })?,
        })
    }
}

impl ImageClassifierSummary {
    /// Reads `classifier`, whose graph has its weights as they are to be stored.
    ///
    /// # Errors
    /// A mistake of ours: as for [`Summary::new`].
    pub fn new(classifier: &ImageClassifier) -> Result<Self> {
        let pairs = classifier.positions.saturating_mul(classifier.positions);
        let step = Bindings::new().with(symbols::IMAGES, 1).with(symbols::PAIRS, pairs);
        let [height, width] = classifier.size;
        Ok(Self {
            module: ModuleSummary::new(classifier),
            image: [classifier.channels, height, width],
            positions: classifier.positions,
            labels: classifier.labels.len(),
            cost: step_cost(&classifier.graph, "logits", |_| step)?,
        })
    }
}

fn number(poly: &Poly) -> u64 {
    // Weights have extents that are numbers.
    poly.as_const().map_or(0, saturate)
}

fn saturate(amount: i128) -> u64 {
    u64::try_from(amount.max(0)).unwrap_or(u64::MAX)
}

/// What a step costs that computes `output`, with the extents that `step` gives for its cost.
fn step_cost(graph: &Graph, output: &str, step: impl FnOnce(&Cost) -> Bindings) -> Result<StepCost> {
    let mut graph = graph.clone();
    passes::prune(&mut graph, &[output])?;
    let cost = graph.cost();
    let step = step(&cost);
    let amount = |poly: &Poly| Ok::<_, ridge_graph::GraphError>(saturate(poly.eval(&step)?));
    Ok(StepCost {
        matrix_flops: amount(&cost.matrix_flops)?,
        vector_flops: amount(&cost.vector_flops)?,
        special_flops: amount(&cost.special_flops)?,
        bytes_read: amount(&cost.bytes_read)?,
        bytes_written: amount(&cost.bytes_written)?,
        matrix_formula: cost.matrix_flops.to_string(),
    })
}

/// The cost of `output` in a step of one token of one sequence that sees `context`.
fn cost_of_token(graph: &Graph, output: &str, block_size: usize, context: usize) -> Result<StepCost> {
    step_cost(graph, output, |cost| {
        let blocks = context.div_ceil(block_size);
        let step = Bindings::new().with(symbols::TOKENS, 1).with(symbols::SEQS, 1).with(symbols::TABLE, blocks);
        with_attended(cost, with_reached(cost, with_blocks(graph, step, blocks), 1), context)
    })
}

fn tree(graph: &Graph) -> Vec<Scope> {
    let mut roots = Vec::new();
    for arg in graph.args(Role::Weight) {
        let (parameters, bytes) = (number(&arg.ty.shape.elements()), number(&arg.ty.bytes()));
        let mut level = &mut roots;
        let mut parts = arg.name.split('.').peekable();
        while let Some(part) = parts.next() {
            // Weights of one scope mostly follow each other.
            let at = level.iter().rposition(|s: &Scope| s.name == part).unwrap_or_else(|| {
                let (name, ty) = (part.to_owned(), parts.peek().is_none().then(|| arg.ty.to_string()));
                level.push(Scope { name, repeats: 1, parameters: 0, bytes: 0, ty, children: Vec::new() });
                level.len() - 1
            });
            level[at].parameters += parameters;
            level[at].bytes += bytes;
            level = &mut level[at].children;
        }
    }
    fold(roots)
}

/// Makes one scope of siblings that differ in consecutive numbers alone, and of a scope with its only child.
fn fold(scopes: Vec<Scope>) -> Vec<Scope> {
    let mut folded: Vec<Scope> = Vec::new();
    for mut scope in scopes {
        scope.children = fold(std::mem::take(&mut scope.children));
        let repeated = |last: &&mut Scope| {
            let (Ok(first), Ok(number)) = (first_number(&last.name).parse::<usize>(), scope.name.parse::<usize>())
            else {
                return false;
            };
            let one = last.repeats as u64;
            first + last.repeats == number
                && last.parameters / one == scope.parameters
                && last.bytes / one == scope.bytes
                && last.children == scope.children
        };
        match folded.last_mut().filter(repeated) {
            Some(last) => {
                last.name = format!("{}..{}", first_number(&last.name), scope.name);
                last.repeats += 1;
                last.parameters += scope.parameters;
                last.bytes += scope.bytes;
            }
            None => folded.push(scope),
        }
    }
    for scope in &mut folded {
        if scope.repeats == 1
            && let [_] = scope.children[..]
            && let Some(only) = scope.children.pop()
        {
            *scope = Scope { name: format!("{}.{}", scope.name, only.name), ..only };
        }
    }
    folded
}

/// The first number of `0` or `0..31`.
fn first_number(name: &str) -> &str {
    name.split_once("..").map_or(name, |(first, _)| first)
}
