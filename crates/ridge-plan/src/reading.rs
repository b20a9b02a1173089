//! What a model's graph says to a planner: for each kind of layer its ops with FLOPs and bytes for a token and for a
//! (query, key) pair, how tensor parallelism cuts each, and what a backward pass needs to keep.
//!
//! The graph is walked once. Degrees of parallelism, lengths and batches are symbols until then: everything here is a
//! coefficient of one of them, so any configuration is a short sum.

use std::collections::{BTreeMap, HashMap};

use ridge_graph::ops::PagedAttention;
use ridge_graph::ops::planned::LatentAttention;
use ridge_graph::{Bindings, DType, Function, Op, Poly, Role, Sym, Var};
use ridge_models::parallel::{self, Cut};
use ridge_models::{BuildOptions, FamilyKind, Model, ModelConfig, PlannedConfig, StateGroup, family_kind, symbols};

use crate::error::PlanError;

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
    /// Bytes of the cache read for each token in it, in 16 bits.
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
    /// What it keeps between steps, in 16 bits.
    pub states: Vec<StateGroup>,
    /// Query heads, or 0 without attention.
    pub heads: usize,
    /// Experts of a layer, 0 without.
    pub experts: usize,
}

impl Reading {
    /// Reads the config.json `text`, of a family that Ridge runs or one that it plans. `file` names it in errors.
    ///
    /// # Errors
    /// [`PlanError::Model`] with what is wrong in it.
    pub fn from_json(file: &str, text: &str) -> Result<Self, PlanError> {
        let options = BuildOptions { activations: DType::BF16, cache: DType::BF16, ..BuildOptions::default() };
        let model = match family_kind(file, text)? {
            Some(FamilyKind::Planned) => PlannedConfig::from_json(file, text)?.build(&options),
            Some(FamilyKind::Decoder | FamilyKind::Encoder | FamilyKind::ImageClassifier) | None => {
                ModelConfig::from_json(file, text)?.build(&options)
            }
        };
        Self::new(&model.map_err(|e| PlanError::Graph(e.to_string()))?)
    }

    /// Reads `model`, which is built with 16-bit activations and cache.
    ///
    /// # Errors
    /// A mistake of ours: when the graph is not a decoder's.
    pub fn new(model: &Model) -> Result<Self, PlanError> {
        let graph = &model.graph;
        let mut kinds: Vec<LayerWork> = Vec::new();
        let mut known = BTreeMap::new();
        let mut layers = Vec::new();
        for node in &graph.main().nodes {
            let Op::Call(function) = node.op else { continue };
            let at = *known.entry(function.index()).or_insert_with(|| {
                kinds.push(read_layer(graph.function(function)));
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
            heads: ops().map(|o| o.heads).filter(|h| *h > 0).min().unwrap_or(0),
            experts: ops().map(|o| o.experts).max().unwrap_or(0),
            kinds,
        })
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
    /// Is this value cut over tensor parallelism?
    cut: HashMap<Var, bool>,
    /// What this value is a view of.
    source: HashMap<Var, Var>,
    kept: HashMap<Var, ()>,
    layer: LayerWork,
    products: usize,
}

impl Walk<'_> {
    fn is_cut(&self, var: Var) -> bool {
        self.cut.get(&var).copied().unwrap_or(false)
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
        if self.kept.insert(var, ()).is_none() {
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

fn read_layer(function: &Function) -> LayerWork {
    let layer = LayerWork {
        name: function.name.to_string(),
        ops: Vec::new(),
        saved: Saved::default(),
        cut: 0.0,
        whole: 0.0,
        experts: 0.0,
    };
    let mut walk =
        Walk { function, cut: HashMap::new(), source: HashMap::new(), kept: HashMap::new(), layer, products: 0 };
    for arg in function.args.iter().filter(|a| a.role == Role::Weight) {
        let size = elements(&arg.ty.shape.elements());
        if arg.ty.shape.rank() == 3 {
            walk.layer.experts += size;
        } else if matches!(parallel::cut(&arg.name), Some(Cut::Columns | Cut::Heads | Cut::Terms | Cut::HeadTerms)) {
            walk.layer.cut += size;
        } else {
            walk.layer.whole += size;
        }
    }
    for index in 0..function.nodes.len() {
        read_node(&mut walk, index);
    }
    walk.layer
}

fn read_node(walk: &mut Walk<'_>, index: usize) {
    let function = walk.function;
    let node = &function.nodes[index];
    let (inputs, out) = (node.inputs.clone(), function.var(index, 0));
    let weight_cut = |var: Var| match &function.nodes[var.index()].op {
        Op::Arg(arg) if function.args[*arg].role == Role::Weight => parallel::cut(&function.args[*arg].name),
        _ => None,
    };
    let any_cut = inputs.iter().any(|v| walk.is_cut(*v));
    let types = function.types(&inputs);
    let (name, cost) = match &node.op {
        Op::Prim(p) => (p.name(), p.cost(&types, &node.outputs)),
        Op::Composite(c) => (c.name(), c.cost(&types, &node.outputs)),
        Op::Arg(_) | Op::Call(_) | Op::Group(_) => return,
    };
    for o in 0..node.outputs.len() {
        walk.cut.insert(function.var(index, o), any_cut);
    }
    let mut op = OpWork {
        name: name.to_owned(),
        scope: node.scope.to_string(),
        class: Class::Memory,
        cut: any_cut,
        reduced: false,
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
    let sized = |op: &mut OpWork, w: Var| {
        let shape = function.ty(w).shape.as_const().unwrap_or_default();
        if let [.., n, k] = shape[..] {
            (op.n, op.k) = (n, k);
        }
        op.weight = shape.iter().map(|n| *n as f64).product();
        shape
    };
    let of_pairs = |op: &mut OpWork, pairs: &[&Sym], cached: &[&Sym]| {
        op.flops_pair = pairs.iter().map(|s| coefficient(&cost.matrix_flops, s.name())).sum();
        op.bytes_cached = cached.iter().map(|s| coefficient(&cost.bytes_read, s.name())).sum();
    };
    match name {
        // Views: nothing moves, and what keeps them keeps what they show.
        "reshape" | "cast" | "slice" | "broadcast" | "transpose" => {
            if let Some(from) = inputs.first() {
                walk.source.insert(out, *from);
            }
            return;
        }
        "const" | "iota" => return,
        "linear" => {
            let cut = weight_cut(inputs[1]);
            sized(&mut op, inputs[1]);
            op.class = Class::Matmul;
            op.reduced = matches!(cut, Some(Cut::Terms | Cut::HeadTerms));
            op.cut = cut.is_some();
            walk.cut.insert(out, matches!(cut, Some(Cut::Columns | Cut::Heads)));
            walk.keep(inputs[0]);
            walk.product(out, false);
        }
        "grouped_linear" => {
            let cut = weight_cut(inputs[1]);
            let shape = sized(&mut op, inputs[1]);
            op.class = Class::Experts;
            op.experts = shape.first().copied().unwrap_or_default();
            // Rows of a token.
            op.top_k = coefficient(&Poly::from(&function.ty(out).shape.0[0]), symbols::TOKENS) as usize;
            op.reduced = cut == Some(Cut::Terms);
            op.cut = true;
            walk.cut.insert(out, cut == Some(Cut::Columns));
            walk.keep(inputs[0]);
            walk.product(out, false);
        }
        "attention" | "latent_attention" => {
            op.class = Class::Attention;
            op.heads = function.ty(inputs[0]).shape.0.get(1).and_then(ridge_graph::Dim::as_const).unwrap_or(0);
            if let Op::Composite(c) = &node.op {
                if let Some(a) = c.downcast::<PagedAttention>() {
                    op.window = a.window;
                    of_pairs(&mut op, &[&a.pairs], &[&a.cached]);
                }
                if let Some(a) = c.downcast::<LatentAttention>() {
                    let mut pairs = vec![&a.pairs];
                    let mut cached = vec![&a.cached];
                    if let Some(index) = a.indexer.as_ref() {
                        // Scores of all pairs and attention to the best: the window bounds the larger part.
                        op.window = a.pairs.name().rsplit('_').next().and_then(|n| n.parse().ok());
                        pairs.push(&index.pairs);
                        cached.push(&index.cached);
                    }
                    of_pairs(&mut op, &pairs, &cached);
                    if a.indexer.is_none() {
                        op.expanded_pair = (2 * op.heads * (a.nope + a.rope + a.value)) as f64;
                    }
                    sized(&mut op, inputs[2]);
                    (op.n, op.k) = (0, 0);
                    op.cut = true;
                    walk.cut.insert(out, true);
                }
            }
            walk.keep(inputs[0]);
            walk.keep(out);
            if name == "latent_attention" {
                walk.keep(inputs[1]);
            }
            walk.product(out, true);
            walk.layer.saved.score_heads += op.heads as f64;
        }
        "kv_write" => {
            walk.keep(inputs[1]);
            walk.keep(inputs[2]);
        }
        "rms_norm" | "layer_norm" | "gelu" | "moe_router" => walk.keep(inputs[0]),
        "swiglu" => {
            walk.keep(inputs[0]);
            walk.keep(inputs[1]);
        }
        "mul" if inputs.len() == 2 => {
            walk.keep(inputs[0]);
            walk.keep(inputs[1]);
        }
        "expert_combine" => {
            // Programs of today copy a token's row for each of its experts, and weigh what these give in a pass of its own.
            op.bytes_token += 3.0 * coefficient(&function.ty(inputs[0]).bytes(), symbols::TOKENS);
            walk.keep(inputs[0]);
            walk.keep(inputs[2]);
        }
        "mamba2" => {
            walk.keep(inputs[0]);
            walk.keep(inputs[1]);
            // Small products chained by a state: memory limits them.
            op.flops_token = coefficient(&cost.matrix_flops, symbols::TOKENS);
        }
        "add" if inputs.len() == 2 && !walk.is_cut(out) && is_residual(function, &inputs) => {
            walk.layer.saved.residuals += walk.width(out);
        }
        _ => {}
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
