//! A small decoder, written by hand: a token's embedding, two calls of one layer with grouped-query attention over a
//! paged cache and a gated MLP, logits and the next token. It has a function, weights plain and stored in a format,
//! states, step inputs, symbols and an op of each kind that serving needs.
#![allow(dead_code, unreachable_pub)] // each test binary uses its part

use ridge_graph::format::Q8_0;
use ridge_graph::ops::{PagedAttention, Rope, SampleToken, rope_frequencies};
use ridge_graph::sample::Rng;
use ridge_graph::{
    Arg, Bindings, Builder, DType, Dim, FormatRef, Graph, Result, Role, Shape, Sym, Tensor, Type, Value, Var,
};

const HIDDEN: usize = 32;
const HEAD: usize = 8;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const MLP: usize = 64;
const VOCAB: usize = 50;
const BLOCKS: usize = 12;
const BLOCK_SIZE: usize = 4;
const TABLE: usize = 6;

/// The decoder over symbols `tokens` and `sequences`, with activations and cache of `dtype`; `stored` keeps the
/// layers' matrices in Q8_0. Outputs `hidden`, `logits` and `next`.
pub fn decoder(dtype: DType, stored: bool) -> Result<Graph> {
    let mut g = Builder::new();
    let tokens = Dim::sym("tokens");
    let sequences = Dim::sym("sequences");
    let model = Model { dtype, stored, tokens: tokens.clone(), sequences: sequences.clone() };
    let ids = g.step_input("ids", Type::tensor(DType::I32, [&tokens]))?;
    let table = g.weight("embed", Type::tensor(dtype, [VOCAB, HIDDEN]))?;
    let mut x = g.embedding(table, ids, dtype)?;
    let layer = g.function("layer", |g| model.layer(g))?;
    for i in 0..2 {
        x = g.scoped(&format!("layers.{i}"), |g| g.call(layer, &[x]))?[0];
    }
    let h = model.norm(&mut g, "norm", x)?;
    let last = g.step_input("last", Type::tensor(DType::I32, [&sequences]))?;
    let rows = g.gather(h, last, 0)?;
    let logits = g.linear(rows, table)?;
    let mut keys = Vec::new();
    for (name, dtype) in SampleToken::KEYS {
        keys.push(g.step_input(name, Type::tensor(dtype, [&sequences]))?);
    }
    let next = g.sample_token(logits, keys.try_into().expect("a key each"))?;
    g.finish(vec![("hidden".into(), h), ("logits".into(), logits), ("next".into(), next)])
}

struct Model {
    dtype: DType,
    stored: bool,
    tokens: Dim,
    sequences: Dim,
}

impl Model {
    fn linear(&self, g: &mut Builder, name: &str, x: Var, rows: usize, cols: usize) -> Result<Var> {
        let ty = Type::tensor(self.dtype, [rows, cols]);
        let ty = if self.stored { ty.stored_as(FormatRef::new(Q8_0)) } else { ty };
        let w = g.weight(&format!("{name}.weight"), ty)?;
        g.linear(x, w)
    }

    fn norm(&self, g: &mut Builder, name: &str, x: Var) -> Result<Var> {
        let w = g.weight(&format!("{name}.weight"), Type::tensor(self.dtype, [HIDDEN]))?;
        g.rms_norm(x, w, 1e-5)
    }

    fn layer(&self, g: &mut Builder) -> Result<Vec<Var>> {
        let x = g.arg("x", Type::tensor(self.dtype, [&self.tokens, &HIDDEN.into()]));
        let h = self.norm(g, "attn_norm", x)?;
        let a = self.attention(g, h)?;
        let a = self.linear(g, "o", a, HIDDEN, HEADS * HEAD)?;
        let x = g.add(x, a)?;
        let h = self.norm(g, "mlp_norm", x)?;
        let (gate, up) = (self.linear(g, "gate", h, MLP, HIDDEN)?, self.linear(g, "up", h, MLP, HIDDEN)?);
        let m = g.swiglu(gate, up)?;
        let m = self.linear(g, "down", m, HIDDEN, MLP)?;
        Ok(vec![g.add(x, m)?])
    }

    fn attention(&self, g: &mut Builder, h: Var) -> Result<Var> {
        let per_token = |g: &mut Builder, name| g.step_input(name, Type::tensor(DType::I32, [&self.tokens]));
        let (positions, slots, ids) = (per_token(g, "positions")?, per_token(g, "slots")?, per_token(g, "seq_ids")?);
        let table = g.step_input("block_table", Type::tensor(DType::I32, [&self.sequences, &TABLE.into()]))?;
        let rope = Rope { inv_freq: rope_frequencies(10_000.0, HEAD).into(), scale: 1.0 };
        let heads = |g: &mut Builder, name, n: usize| {
            let flat = self.linear(g, name, h, n * HEAD, HIDDEN)?;
            g.reshape(flat, Shape::new([&self.tokens, &n.into(), &HEAD.into()]))
        };
        let (q, k, v) = (heads(g, "q", HEADS)?, heads(g, "k", KV_HEADS)?, heads(g, "v", KV_HEADS)?);
        let (q, k) = (g.rope(q, positions, &rope)?, g.rope(k, positions, &rope)?);
        let kv = g.state("kv", Type::state(self.dtype, [BLOCKS, 2, KV_HEADS, BLOCK_SIZE, HEAD]))?;
        let kv = g.kv_write(kv, k, v, slots)?;
        let scale = 1.0 / (HEAD as f64).sqrt();
        let op = PagedAttention::new(scale, Sym::new("pairs"), Sym::new("cached"));
        let a = g.attention(q, kv, table, ids, positions, op)?;
        g.reshape(a, Shape::new([&self.tokens, &(HEADS * HEAD).into()]))
    }
}

/// A step: for each sequence how many tokens are in the cache and how many are new.
pub struct Step {
    pub bindings: Bindings,
    lengths: Vec<(usize, usize)>,
    seed: u64,
}

impl Step {
    /// # Panics
    /// When sequences or their tokens are more than the decoder's cache holds.
    pub fn new(lengths: &[(usize, usize)], seed: u64) -> Self {
        let blocks: usize = lengths.iter().map(|(old, new)| (old + new).div_ceil(BLOCK_SIZE)).sum();
        assert!(blocks <= BLOCKS && lengths.iter().all(|(old, new)| old + new <= TABLE * BLOCK_SIZE));
        let tokens = lengths.iter().map(|(_, new)| new).sum();
        let bindings = Bindings::new().with("tokens", tokens).with("sequences", lengths.len());
        Self { bindings, lengths: lengths.to_vec(), seed }
    }

    /// The value of an argument of the decoder's main function: weights, states and inputs depend on name and seed.
    pub fn value(&self, arg: &Arg) -> Value {
        let salt = arg.name.bytes().fold(self.seed, |h, b| h.wrapping_mul(31).wrapping_add(u64::from(b)));
        let mut rng = Rng::new(salt);
        let shape = arg.ty.shape.eval(&self.bindings).expect("the step binds every symbol");
        if arg.role != Role::StepInput {
            let mut tensor = rng.normal(arg.ty.dtype, &shape);
            if let (ridge_graph::Data::Float(values), [_, cols]) = (&mut tensor.data, &shape[..]) {
                values.iter_mut().for_each(|x| *x /= (*cols as f64).sqrt());
            }
            let tensor = tensor.rounded();
            return match &arg.ty.format {
                Some(format) => Value::stored(&tensor, format),
                None => Value::Plain(tensor),
            };
        }
        Value::Plain(self.input(arg, &shape, &mut rng))
    }

    fn input(&self, arg: &Arg, shape: &[usize], rng: &mut Rng) -> Tensor {
        let int = |values: Vec<i64>| Tensor::int(arg.ty.dtype, shape, values);
        let each = |f: &dyn Fn(usize, usize, usize) -> i64| {
            let mut out = Vec::new();
            let mut first_block = 0;
            for (sequence, (old, new)) in self.lengths.iter().enumerate() {
                out.extend((*old..old + new).map(|position| f(sequence, position, first_block)));
                first_block += (old + new).div_ceil(BLOCK_SIZE);
            }
            out
        };
        match &*arg.name {
            "ids" => rng.integers(DType::I32, shape, 0, VOCAB as i64),
            "seq_ids" => int(each(&|sequence, _, _| sequence as i64)),
            "positions" => int(each(&|_, position, _| position as i64)),
            "slots" => int(each(&|_, position, block| (block * BLOCK_SIZE + position) as i64)),
            "block_table" => {
                let mut table = Vec::new();
                let mut next = 0;
                for (old, new) in &self.lengths {
                    let used = (old + new).div_ceil(BLOCK_SIZE);
                    table.extend((0..TABLE).map(|i| if i < used { (next + i) as i64 } else { -1 }));
                    next += used;
                }
                int(table)
            }
            "last" => {
                let ends = self.lengths.iter().scan(0, |end, (_, new)| {
                    *end += *new as i64;
                    Some(*end - 1)
                });
                int(ends.collect())
            }
            "temperature" => Tensor::float(DType::F32, shape, vec![0.0; shape[0]]),
            "top_p" => Tensor::float(DType::F32, shape, vec![1.0; shape[0]]),
            _ => Tensor::zeros(arg.ty.dtype, shape),
        }
    }
}
