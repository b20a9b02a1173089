//! What a model is made of and what one token of it costs, read off its graph: the figures behind `ridge inspect`.

use ridge_graph::{Bindings, Graph, Poly, Result, Role, passes};
use serde::Serialize;

use crate::model::{Model, attention_symbols, symbols, with_blocks, with_reached};

/// A model in numbers. Parameters and bytes of storage are exact for the graph at hand; costs follow from the graph
/// by the formulas that each op states.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// Family, such as `llama`.
    pub family: &'static str,
    /// Rows of its output.
    pub vocab_size: usize,
    /// Longest context it was made for, in tokens.
    pub max_context: usize,
    /// Elements of all weights; a weight that is used twice counts once.
    pub parameters: u64,
    /// Bytes of all weights as they are stored.
    pub weight_bytes: u64,
    /// The weights by how they are stored, in the order in which the graph first uses each.
    pub storage: Vec<Storage>,
    /// Bytes that one token takes in the cache, over all layers.
    pub kv_bytes_per_token: u64,
    /// The cost of generating one token.
    pub token: TokenCost,
    /// The weights by scope.
    pub tree: Vec<Scope>,
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

/// One step that appends one token to one sequence and samples the next. Amounts beyond a `u64` saturate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TokenCost {
    /// Tokens in the cache that the token attends to, its own included.
    pub context: usize,
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
    /// Bytes of the cache for `context` tokens.
    pub kv_bytes: u64,
    /// What `matrix_flops` is of any step, in its tokens, sequences (`seqs`) and (query, key) pairs.
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

impl Summary {
    /// Reads `model`, whose graph has its weights as they are to be stored, with `context` tokens in the cache.
    ///
    /// # Errors
    /// A mistake of ours: when the graph has no output `next`, or costs in symbols that no step has.
    pub fn new(model: &Model, context: usize) -> Result<Self> {
        let kv_bytes_per_token = model.state_groups.iter().map(|g| g.bytes_per_token as u64).sum();
        let mut storage: Vec<Storage> = Vec::new();
        for arg in model.graph.args(Role::Weight) {
            let name = arg.ty.format.as_ref().map_or(arg.ty.dtype.name(), |f| f.name());
            let at = storage.iter().position(|s| s.name == name).unwrap_or_else(|| {
                storage.push(Storage { name: name.to_owned(), parameters: 0, bytes: 0 });
                storage.len() - 1
            });
            storage[at].parameters += number(&arg.ty.shape.elements());
            storage[at].bytes += number(&arg.ty.bytes());
        }
        Ok(Self {
            family: model.family,
            vocab_size: model.vocab_size,
            max_context: model.max_context,
            parameters: storage.iter().map(|s| s.parameters).sum(),
            weight_bytes: storage.iter().map(|s| s.bytes).sum(),
            storage,
            kv_bytes_per_token,
            token: token_cost(model, context, kv_bytes_per_token)?,
            tree: tree(&model.graph),
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

fn token_cost(model: &Model, context: usize, kv_bytes_per_token: u64) -> Result<TokenCost> {
    let mut graph = model.graph.clone();
    passes::prune(&mut graph, &["next"])?;
    let cost = graph.cost();
    let blocks = context.div_ceil(model.block_size);
    let step = Bindings::new().with(symbols::TOKENS, 1).with(symbols::SEQS, 1).with(symbols::TABLE, blocks);
    let mut step = with_reached(&cost, with_blocks(&graph, step, blocks), 1);
    for window in model.state_groups.iter().map(|group| group.window) {
        let seen = window.map_or(context, |window| window.min(context));
        let (pairs, cached) = attention_symbols(window);
        step = step.with(pairs.name(), seen).with(cached.name(), seen);
    }
    let amount = |poly: &Poly| Ok::<_, ridge_graph::GraphError>(saturate(poly.eval(&step)?));
    Ok(TokenCost {
        context,
        matrix_flops: amount(&cost.matrix_flops)?,
        vector_flops: amount(&cost.vector_flops)?,
        special_flops: amount(&cost.special_flops)?,
        bytes_read: amount(&cost.bytes_read)?,
        bytes_written: amount(&cost.bytes_written)?,
        kv_bytes: kv_bytes_per_token.saturating_mul(context as u64),
        matrix_formula: cost.matrix_flops.to_string(),
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
