//! What a model's graph says to a planner: for each kind of layer its ops with FLOPs and bytes for a token and for a
//! (query, key) pair, how tensor parallelism cuts each, and what a backward pass needs to keep.
//!
//! Kinds of work and costs are the ops' own, and where values are over tensor parallelism follows from `ridge_graph::shard`;
//! what the software does that runs a model, or trains it, is data (`habits`).
//!
//! The graph is walked once. Degrees of parallelism, lengths and batches are symbols until then: everything here is a
//! coefficient of one of them, so any configuration is a short sum.

mod habits;
mod own;
mod prediction;

use std::collections::{BTreeMap, HashMap, HashSet};

use ridge_graph::shard::{Placement, placements};
use ridge_graph::{Arg, Bindings, DType, Function, Op, Poly, Role, Var, Work};
use ridge_models::parallel;
use ridge_models::{BuildOptions, Model, ModelConfig, PlannedConfig, StateGroup, symbols};

use crate::error::PlanError;

pub use own::OwnSaved;

/// Bytes of an activation: plans are made for 16-bit activations.
pub const ACTIVATION: f64 = 2.0;

/// What limits an op and which efficiency it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// A product with one weight.
    Matmul,
    /// Products with the weights of each token's experts.
    Experts,
    /// Attention over a cache or a sequence.
    Attention,
    /// Norms, activations, rotations, residual sums and scans: limited by memory.
    Memory,
}

/// One op of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct OpWork {
    /// What it is, such as `linear`.
    pub name: String,
    /// Where in the layer, such as `self_attn.q_proj`.
    pub scope: String,
    /// Its class.
    pub class: Class,
    /// Is its work divided over the ranks of tensor parallelism?
    pub cut: bool,
    /// Does it end in a sum over those ranks?
    pub reduced: bool,
    /// Matrix FLOPs for each token.
    pub flops_token: f64,
    /// Matrix FLOPs for each (query, key) pair.
    pub flops_pair: f64,
    /// FLOPs outside products for each token.
    pub vector_token: f64,
    /// The same of latent attention when keys and values are made of its cache first, at `flops_token` for each token in
    /// it; 0 if there is no such way. Prompts and training take it, answers fold the weights into their queries.
    pub expanded_pair: f64,
    /// Bytes of activations read and written for each token.
    pub bytes_token: f64,
    /// Bytes of states read and written for each sequence.
    pub bytes_seq: f64,
    /// Bytes of the cache read for each token in it, in the reading's dtype of caches.
    pub bytes_cached: f64,
    /// Query heads, of attention.
    pub heads: usize,
    /// How far back it sees; all if `None`.
    pub window: Option<usize>,
    /// Rows and columns of its weight (of one expert), 0 without.
    pub n: usize,
    /// See `n`.
    pub k: usize,
    /// Elements of its weights.
    pub weight: f64,
    /// Experts that its weight has, 0 if it is no such.
    pub experts: usize,
    /// Experts that a token takes.
    pub top_k: usize,
}

/// What a backward pass keeps of a token of a layer, in elements.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Saved {
    /// Values that are whole on each rank of tensor parallelism.
    pub whole: f64,
    /// Values that are cut.
    pub cut: f64,
    /// Outputs of every second matrix product and of attention: what is kept when the others are computed again.
    pub products_whole: f64,
    /// See `products_whole`.
    pub products_cut: f64,
    /// Sums of residuals, each behind a dropout in models that have it.
    pub residuals: f64,
    /// Heads whose scores an attention that is not fused keeps.
    pub score_heads: f64,
}

/// A kind of layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerWork {
    /// Name of its function.
    pub name: String,
    /// Its ops in order.
    pub ops: Vec<OpWork>,
    /// What a backward pass keeps.
    pub saved: Saved,
    /// Parameters that tensor parallelism cuts, experts left out.
    pub cut: f64,
    /// Parameters that are whole on every rank.
    pub whole: f64,
    /// Parameters of experts, which expert parallelism cuts.
    pub experts: f64,
    /// What Ridge's own training keeps, where that is what is planned.
    pub own: Option<OwnSaved>,
}

impl LayerWork {
    /// A layer of these weights, without ops.
    fn of_weights<'a>(name: &str, weights: impl Iterator<Item = &'a Arg>) -> Self {
        let (name, ops, saved) = (name.to_owned(), Vec::new(), Saved::default());
        let mut layer = Self { name, ops, saved, cut: 0.0, whole: 0.0, experts: 0.0, own: None };
        for arg in weights {
            let size = elements(&arg.ty.shape.elements());
            if arg.ty.shape.rank() == 3 {
                layer.experts += size;
            } else if matches!(parallel::placement(arg), Placement::Shard { .. }) {
                layer.cut += size;
            } else {
                layer.whole += size;
            }
        }
        layer
    }
}

/// A model as a planner sees it.
#[derive(Clone, Debug)]
pub struct Reading {
    /// Family.
    pub family: &'static str,
    /// Elements of all weights.
    pub parameters: u64,
    /// Kinds of layers.
    pub kinds: Vec<LayerWork>,
    /// The kind of each layer.
    pub layers: Vec<usize>,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Rows of the output.
    pub vocab: usize,
    /// Longest context.
    pub max_context: usize,
    /// Parameters of embeddings.
    pub embedding: f64,
    /// Parameters of an output projection of its own.
    pub head: f64,
    /// What it keeps between steps, with caches of `cache`.
    pub states: Vec<StateGroup>,
    /// Dtype of caches: where it is one of codes, their scales are counted.
    pub cache: DType,
    /// Query heads, or 0 without attention.
    pub heads: usize,
    /// Experts of a layer, 0 without.
    pub experts: usize,
    /// The module that drafts further tokens, where it is planned: its layer with what joins its inputs. Embedding and output
    /// projection are the model's.
    pub prediction: Option<Box<Self>>,
}

impl Reading {
    /// Reads the config.json `text`, of a family that Ridge runs or one that it plans. `file` names it in errors. How the published
    /// weights are quantised is not read: [`Quantisation`](crate::ledger::Quantisation) has it, and a plan may store them otherwise.
    ///
    /// # Errors
    /// [`PlanError::Model`] with what is wrong in it.
    pub fn from_json(file: &str, text: &str) -> Result<Self, PlanError> {
        Self::with_cache(file, text, DType::BF16)
    }

    /// As [`Reading::from_json`], with caches as the engine stores them in `cache`: an 8-bit dtype has an f32 scale for each key
    /// and value of each head.
    ///
    /// # Errors
    /// As there.
    pub fn with_cache(file: &str, text: &str, cache: DType) -> Result<Self, PlanError> {
        Self::new(&build(file, text, cache)?)
    }

    /// As [`Reading::from_json`], for training by Ridge itself: what a backward pass needs is what the gradient of the
    /// graph that Ridge trains takes.
    ///
    /// # Errors
    /// As there, and of families that Ridge does not run.
    pub fn trained_by_ridge(file: &str, text: &str) -> Result<Self, PlanError> {
        let refused = |why: String| {
            let remedy = "leave it out to plan as other programs train it";
            PlanError::setting("--software", "ridge", format!("does not train this family: {why}"), remedy)
        };
        let mut reading = Self::from_json(file, text)?;
        let training = ModelConfig::unquantised(file, text)?.build_training(&options(DType::BF16));
        let training = training.map_err(|error| refused(error.to_string()))?;
        let mut saved = own::saved_by_gradient(training.graph).map_err(|error| refused(error.to_string()))?;
        for kind in &mut reading.kinds {
            kind.own = saved.remove(&kind.name);
        }
        Ok(reading)
    }

    /// Is it for training by Ridge itself?
    pub fn is_of_ridge(&self) -> bool {
        self.kinds.iter().any(|kind| kind.own.is_some())
    }

    /// Reads `model`, which is built with 16-bit activations.
    ///
    /// # Errors
    /// A mistake of ours: when the graph is not a decoder's.
    pub fn new(model: &Model) -> Result<Self, PlanError> {
        let graph = &model.graph;
        let places = placements(graph, &parallel::placement).map_err(|e| PlanError::Graph(e.to_string()))?;
        let mut kinds: Vec<LayerWork> = Vec::new();
        let mut known = BTreeMap::new();
        let mut layers = Vec::new();
        for node in &graph.main().nodes {
            let Op::Call(function) = node.op else { continue };
            let at = *known.entry(function.index()).or_insert_with(|| {
                kinds.push(read_layer(graph.function(function), &places));
                kinds.len() - 1
            });
            layers.push(at);
        }
        let in_layers: f64 = layers.iter().map(|k| kinds[*k].cut + kinds[*k].whole + kinds[*k].experts).sum();
        let heads = graph.args(Role::Weight).filter(|a| parallel::is_output_projection(&a.name));
        let head: f64 = heads.map(|a| elements(&a.ty.shape.elements())).sum();
        let total = model.parameter_count();
        let ops = || kinds.iter().flat_map(|k| &k.ops);
        let hidden = match graph.functions.iter().find_map(|f| f.args.iter().find(|a| &*a.name == "x")) {
            Some(x) => x.ty.shape.last().as_const().unwrap_or_default(),
            None => return Err(PlanError::Graph("the graph has no layers".into())),
        };
        Ok(Self {
            family: model.family,
            parameters: total,
            layers,
            hidden,
            vocab: model.vocab_size,
            max_context: model.max_context,
            embedding: total as f64 - in_layers - head,
            head,
            states: model.state_groups.clone(),
            cache: model.cache,
            heads: ops().map(|o| o.heads).filter(|h| *h > 0).min().unwrap_or(0),
            experts: ops().map(|o| o.experts).max().unwrap_or(0),
            kinds,
            prediction: None,
        })
    }

    /// What bytes of the reading's cache are to be multiplied by where an element takes `bytes`: 1 as the engine stores it.
    pub fn cache_share(&self, bytes: f64) -> f64 {
        bytes / self.cache.size_bytes() as f64
    }

    /// Each layer in order.
    pub fn each_layer(&self) -> impl Iterator<Item = &LayerWork> {
        self.layers.iter().map(|k| &self.kinds[*k])
    }

    /// Parameters that one token multiplies: all but embeddings and the experts that it does not take.
    pub fn active(&self) -> f64 {
        let head = if self.head > 0.0 { self.head } else { (self.hidden * self.vocab) as f64 };
        let ops = self.each_layer().flat_map(|l| &l.ops);
        ops.map(|o| o.flops_token / 2.0).sum::<f64>() + head
    }
}

/// Activations of 16 bits.
fn options(cache: DType) -> BuildOptions {
    BuildOptions { activations: DType::BF16, cache, ..BuildOptions::default() }
}

/// The model of the config.json `text`, with 16-bit activations.
fn build(file: &str, text: &str, cache: DType) -> Result<Model, PlanError> {
    let options = options(cache);
    let model = match PlannedConfig::plans(file, text)? {
        true => PlannedConfig::from_json(file, text)?.build(&options),
        false => ModelConfig::unquantised(file, text)?.build(&options),
    };
    model.map_err(|e| PlanError::Graph(e.to_string()))
}

fn elements(poly: &Poly) -> f64 {
    poly.as_const().unwrap_or(0) as f64
}

/// What `poly` gains when `symbol` goes from 0 to 1, all else being 0.
fn coefficient(poly: &Poly, symbol: &str) -> f64 {
    let at = |value: usize| {
        let zeros = poly.symbols().fold(Bindings::new(), |b, s| b.with(s.name(), 0));
        poly.eval(&zeros.with(symbol, value)).unwrap_or(0) as f64
    };
    at(1) - at(0)
}

/// State of a walk over a layer.
struct Walk<'a> {
    function: &'a Function,
    /// Where values are over tensor parallelism.
    places: &'a HashMap<Var, Placement>,
    /// What this value is a view of.
    source: HashMap<Var, Var>,
    kept: HashSet<Var>,
    layer: LayerWork,
    products: usize,
}

impl Walk<'_> {
    /// Is this value, or what it is a view of, cut over tensor parallelism?
    fn is_cut(&self, var: Var) -> bool {
        matches!(self.places.get(&var), Some(Placement::Shard { .. }))
            || self.source.get(&var).is_some_and(|from| self.is_cut(*from))
    }

    fn width(&self, var: Var) -> f64 {
        coefficient(&self.function.ty(var).shape.elements(), symbols::TOKENS)
    }

    fn origin(&self, var: Var) -> Var {
        self.source.get(&var).map_or(var, |from| self.origin(*from))
    }

    /// The backward pass needs `var`.
    fn keep(&mut self, var: Var) {
        let var = self.origin(var);
        if self.kept.insert(var) {
            let width = self.width(var);
            if self.is_cut(var) { self.layer.saved.cut += width } else { self.layer.saved.whole += width }
        }
    }

    /// Of matrix products, every second is kept where the others are computed again.
    fn product(&mut self, out: Var, always: bool) {
        if !always {
            self.products += 1;
        }
        if always || self.products % 2 == 1 {
            let width = self.width(out);
            if self.is_cut(out) {
                self.layer.saved.products_cut += width;
            } else {
                self.layer.saved.products_whole += width;
            }
        }
    }
}

fn read_layer(function: &Function, places: &HashMap<Var, Placement>) -> LayerWork {
    let weights = function.args.iter().filter(|a| a.role == Role::Weight);
    let layer = LayerWork::of_weights(&function.name, weights);
    let (source, kept) = (HashMap::new(), HashSet::new());
    let mut walk = Walk { function, places, source, kept, layer, products: 0 };
    for index in 0..function.nodes.len() {
        read_node(&mut walk, index);
    }
    walk.layer
}

fn read_node(walk: &mut Walk<'_>, index: usize) {
    let function = walk.function;
    let node = &function.nodes[index];
    let (inputs, out) = (node.inputs.clone(), function.var(index, 0));
    let work = node.work();
    if work == Work::View {
        // What keeps a view keeps what it shows.
        if let Some(from) = inputs.first() {
            walk.source.insert(out, *from);
        }
        return;
    }
    let types = function.types(&inputs);
    let (name, cost) = match &node.op {
        Op::Prim(p) => (p.name(), p.cost(&types, &node.outputs)),
        Op::Composite(c) => (c.name(), c.cost(&types, &node.outputs)),
        Op::Arg(_) | Op::Call(_) | Op::Group(_) => return,
    };
    let mut op = OpWork {
        name: name.to_owned(),
        scope: node.scope.to_string(),
        class: Class::Memory,
        cut: walk.is_cut(out) || inputs.iter().any(|v| walk.is_cut(*v)),
        reduced: matches!(work, Work::Product { .. } | Work::Experts { .. })
            && walk.places.get(&out) == Some(&Placement::Partial),
        flops_token: coefficient(&cost.matrix_flops, symbols::TOKENS),
        flops_pair: 0.0,
        vector_token: coefficient(&(cost.vector_flops.clone() + &cost.special_flops), symbols::TOKENS),
        expanded_pair: 0.0,
        bytes_token: coefficient(&cost.bytes(), symbols::TOKENS),
        bytes_seq: coefficient(&cost.bytes(), symbols::SEQS),
        bytes_cached: 0.0,
        heads: 0,
        window: None,
        n: 0,
        k: 0,
        weight: 0.0,
        experts: 0,
        top_k: 0,
    };
    let weight_shape = |weight: usize| function.ty(inputs[weight]).shape.as_const().unwrap_or_default();
    let count = |shape: &[usize]| shape.iter().map(|n| *n as f64).product::<f64>();
    match &work {
        Work::View | Work::Pass => {}
        Work::Product { weight } | Work::Experts { weight } => {
            let shape = weight_shape(*weight);
            if let [.., n, k] = shape[..] {
                (op.n, op.k) = (n, k);
            }
            op.weight = count(&shape);
            op.class = Class::Matmul;
            if matches!(work, Work::Experts { .. }) {
                op.class = Class::Experts;
                op.experts = shape.first().copied().unwrap_or_default();
                // Rows of a token.
                op.top_k = coefficient(&Poly::from(&function.ty(out).shape.0[0]), symbols::TOKENS) as usize;
                // Expert parallelism cuts them where tensor parallelism does not.
                op.cut = true;
            }
        }
        Work::Attention(attention) => {
            op.class = Class::Attention;
            op.heads = function.ty(inputs[0]).shape.0.get(1).and_then(ridge_graph::Dim::as_const).unwrap_or(0);
            op.window = attention.window;
            op.flops_pair = attention.pairs.iter().map(|s| coefficient(&cost.matrix_flops, s.name())).sum();
            op.bytes_cached = attention.cached.iter().map(|s| coefficient(&cost.bytes_read, s.name())).sum();
            op.expanded_pair = attention.expanded_pair.map_or(0.0, |of_head| (of_head * op.heads) as f64);
            op.weight = attention.weight.map_or(0.0, |weight| count(&weight_shape(weight)));
            walk.layer.saved.score_heads += op.heads as f64;
        }
    }
    if let Some(habit) = habits::of(name) {
        habit.keeps.iter().filter_map(|i| inputs.get(*i)).for_each(|var| walk.keep(*var));
        if habit.keeps_output {
            walk.keep(out);
        }
        if let Some(first) = inputs.first().filter(|_| habit.more_passes > 0.0) {
            op.bytes_token += habit.more_passes * coefficient(&function.ty(*first).bytes(), symbols::TOKENS);
        }
    }
    match work {
        Work::Product { .. } | Work::Experts { .. } => walk.product(out, false),
        Work::Attention(_) => walk.product(out, true),
        Work::View | Work::Pass => {}
    }
    if name == "add" && !walk.is_cut(out) && is_residual(function, &inputs) {
        walk.layer.saved.residuals += walk.width(out);
    }
    walk.layer.ops.push(op);
}

/// Does this sum take the layer's input, or a sum of it, along?
fn is_residual(function: &Function, inputs: &[Var]) -> bool {
    inputs.iter().any(|v| match &function.nodes[v.index()].op {
        Op::Arg(arg) => &*function.args[*arg].name == "x",
        Op::Prim(p) => p.name() == "add",
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small Llama with another family's `model_type` in an object within it.
    const NESTED: &str = r#"{
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2,
        "num_attention_heads": 8, "vocab_size": 512, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "task_specific_params": {"router": {"model_type":"mixtral"}}
    }"#;

    #[test]
    fn family_is_that_of_the_top_level_model_type() {
        assert_eq!(Reading::from_json("config.json", NESTED).expect("is a Llama").family, "llama");
        let refused = |text: &str| Reading::from_json("config.json", text).expect_err("is refused").to_string();
        let message = refused(&NESTED.replace(r#""model_type": "llama", "#, ""));
        assert!(message.contains("model_type is missing"), "{message}");
        let message = refused(&NESTED.replace(r#""llama""#, r#""mixtral""#));
        assert!(message.contains("num_key_value_heads is missing"), "{message}");
    }
}
