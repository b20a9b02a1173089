//! The next token of each sequence: temperature, top-k (Fan, Lewis and Dauphin 2018, "Hierarchical Neural Story
//! Generation", section 5.4), top-p (Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section
//! 3.1), and one counter-based random number.

use std::cmp::Ordering;

use crate::builder::Builder;
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::{Result, Why};
use crate::eval::uniform;
use crate::graph::Var;
use crate::op::{Composite, Gradient};
use crate::sample::{Check, Rng, Sample};
use crate::shard::{Placement, Rule};
use crate::tensor::{Tensor, Value};
use crate::types::{Shape, Type};

/// A token for each row of `logits`.
///
/// `logits`: `[sequences, vocab]` of any float dtype, finite or minus infinity and one at least finite;
/// `temperature`: f32; `top_k`: i32; `top_p`: f32; `seed`, `sequence`, `position`: i64; all `[sequences]`. Gives i32
/// `[sequences]`.
///
/// Where the temperature is 0 (or below) it is the largest logit, the first of equals. Elsewhere, in f32:
/// 1. sort by logit, largest first, equals (the two zeros are equal) by id; weigh each token
///    `exp((logit - largest) / temperature)`;
/// 2. keep the first `top_k` (0 or below: all);
/// 3. of these keep each whose predecessors' weights sum to less than `top_p` of all kept so far, and always the first
///    (1 or above: all);
/// 4. `u` is uniform in `[0, 1)`, `random(seed, sequence, position, index 0)` of stream [`SampleToken::STREAM`]: take
///    the first token at which the running sum of kept weights exceeds `u` times their total.
///
/// So a token depends on its own row alone, and the same keys give the same token in any batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleToken;

impl SampleToken {
    /// The random stream that tokens are drawn from.
    pub const STREAM: u32 = 0;
}

const KEYS: [(&str, DType); 6] = [
    ("temperature", DType::F32),
    ("top_k", DType::I32),
    ("top_p", DType::F32),
    ("seed", DType::I64),
    ("sequence", DType::I64),
    ("position", DType::I64),
];

impl Composite for SampleToken {
    fn name(&self) -> &'static str {
        "sample_token"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [logits, keys @ ..] = inputs else { return Err(super::takes("logits and six of its rows' keys", inputs)) };
        if keys.len() != KEYS.len() {
            let names = "logits, temperature, top_k, top_p, seed, sequence and position";
            return Err(super::takes(names, inputs));
        }
        super::want_floats("logits", logits, 2, "[sequences, vocab]")?;
        if logits.shape.last().as_const() == Some(0) {
            return Err(format!("logits must have a token to choose, got {logits}"));
        }
        let rows = &logits.shape.0[0];
        for ((name, dtype), ty) in KEYS.iter().zip(keys) {
            super::want(name, ty, *dtype, [rows])?;
        }
        Ok(vec![Type::tensor(DType::I32, [rows])])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let shape = g.ty(inputs[0])?.shape.clone();
        let (rows, vocab) = (Shape(vec![shape.0[0].clone()]), shape.last());
        let column = Shape(vec![shape.0[0].clone(), 1.into()]);
        let zero = g.constant(DType::F32, 0.0)?;
        let one = g.constant(DType::F32, 1.0)?;
        let none = g.constant(DType::I32, 0.0)?;
        let logits = g.cast(inputs[0], DType::F32)?;
        let temperature = g.reshape(inputs[1], column.clone())?;
        let top_k = g.reshape(inputs[2], column.clone())?;
        let top_p = g.reshape(inputs[3], column.clone())?;

        let best = g.argmax(logits, 1)?;
        let warm = g.gt(temperature, zero)?;
        let divisor = g.select(warm, temperature, one)?;
        let (sorted, ids) = g.sort(logits, 1, true, vocab.clone())?;
        let largest = g.slice(sorted, 1, 0, 1)?;
        let below = g.sub(sorted, largest)?;
        let exponent = g.div(below, divisor)?;
        let weight = g.exp(exponent)?;

        let rank = g.iota(shape.clone(), 1, DType::I32)?;
        let all = g.dim_value(&vocab)?;
        let all = g.cast(all, DType::I32)?;
        let limited = g.gt(top_k, none)?;
        let limit = g.select(limited, top_k, all)?;
        let kept = g.lt(rank, limit)?;
        let weight = g.select(kept, weight, zero)?;
        let running = g.scan_sum(weight, 1)?;
        let total = g.slice(running, 1, vocab.clone() + -1, 1)?;

        // Sums of the predecessors.
        let before = g.pad(running, 1, 1, 0, 0.0)?;
        let before = g.slice(before, 1, 0, vocab)?;
        let bound = g.mul(top_p, total)?;
        let inside = g.lt(before, bound)?;
        let open = g.ge(top_p, one)?;
        let first = g.eq(rank, none)?;
        let inside = g.or(inside, open)?;
        let inside = g.or(inside, first)?;
        let kept = g.and(kept, inside)?;
        let counted = g.select(kept, running, zero)?;
        let total = g.reduce_max(counted, 1)?;

        let index = g.constant(DType::I64, 0.0)?;
        let index = g.broadcast(index, rows.clone())?;
        let u = g.random(inputs[4], inputs[5], inputs[6], index, Self::STREAM)?;
        let u = g.reshape(u, column)?;
        let threshold = g.mul(u, total)?;
        let passed = g.le(running, threshold)?;
        let passed = g.and(kept, passed)?;
        let passed = g.cast(passed, DType::I32)?;
        let chosen = g.reduce_sum(passed, 1)?;
        let hit = g.eq(rank, chosen)?;
        let id = g.select(hit, ids, none)?;
        let id = g.reduce_sum(id, 1)?;
        let token = g.select(warm, id, best)?;
        Ok(vec![g.reshape(token, rows)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let elements = inputs[0].shape.elements();
        // What selection without a full sort needs: a maximum, a difference, a weight, a sum, two comparisons.
        Cost { vector_flops: elements.clone() * 5, special_flops: elements, ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::None
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<Rule> {
        vec![Rule { inputs: vec![Placement::shard(0); inputs.len()], outputs: vec![Placement::shard(0)] }]
    }
}

impl Builder {
    /// The next token of each sequence; see [`SampleToken`].
    ///
    /// # Errors
    /// When `logits` is not a float matrix with a column or more, or another input is not of the dtype described there
    /// with one element a row.
    pub fn sample_token(
        &mut self,
        logits: Var,
        temperature: Var,
        top_k: Var,
        top_p: Var,
        seed: Var,
        sequence: Var,
        position: Var,
    ) -> Result<Var> {
        Ok(self.composite(SampleToken, &[logits, temperature, top_k, top_p, seed, sequence, position])?[0])
    }
}

/// Accepts each token that the definition gives when its sums are off by f32's rounding over the vocabulary.
fn check(inputs: &[Value], outputs: &[Tensor]) -> Result<(), String> {
    let input = |i: usize| inputs[i].tensor();
    let vocab = input(0).shape[1];
    let slack = 4.0 * (vocab as f64 + 16.0) * DType::F32.unit_roundoff();
    for (row, logits) in input(0).floats().chunks(vocab).enumerate() {
        let token = outputs[0].ints()[row];
        let mut order: Vec<usize> = (0..vocab).collect();
        // Not `total_cmp`: the two zeros are equal, so the smaller id comes first.
        let by_logit = |a: &usize, b: &usize| logits[*b].partial_cmp(&logits[*a]).unwrap_or(Ordering::Equal);
        order.sort_by(|a, b| by_logit(a, b).then(a.cmp(b)));
        let temperature = input(1).floats()[row];
        let rank = order.iter().position(|id| *id as i64 == token);
        let rank = rank.ok_or_else(|| format!("row {row}: token {token} is not in a vocabulary of {vocab}"))?;
        if temperature <= 0.0 {
            if rank != 0 {
                return Err(format!("row {row}: greedy token must be {}, got {token}", order[0]));
            }
            continue;
        }
        let k = usize::try_from(input(2).ints()[row]).ok().filter(|k| *k > 0).unwrap_or(vocab).min(vocab);
        let weights = order[..k].iter().map(|id| ((logits[*id] - logits[order[0]]) / temperature).exp());
        let mut sums = vec![0.0];
        sums.extend(weights.scan(0.0, |sum, w| {
            *sum += w;
            Some(*sum)
        }));
        let (total, top_p) = (sums[k], input(3).floats()[row]);
        let [seed, sequence, position] = [4, 5, 6].map(|i| input(i).ints()[row]);
        let u = f64::from(uniform(seed, SampleToken::STREAM, sequence, position, 0));
        // How many are kept may itself hang on rounding.
        let sure = |n: usize, slack: f64| n == 1 || top_p >= 1.0 || sums[n - 1] < (top_p + slack) * total;
        let possible = |n: usize| sure(n, slack) && (n == k || top_p < 1.0 && !sure(n + 1, -slack));
        let reached = |n: usize| {
            let (low, high) = (sums[rank] / sums[n] - slack, sums[rank + 1] / sums[n] + slack);
            rank < n && (low..=high).contains(&u)
        };
        if rank >= k || !(1..=k).any(|n| possible(n) && reached(n)) {
            return Err(format!(
                "row {row}: token {token} of rank {rank} does not hold u = {u} under top_k {k}, top_p {top_p}, \
                 temperature {temperature}"
            ));
        }
    }
    Ok(())
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    // (sequences, vocab, greedy)
    let cases = [
        (0, 8, false),
        (1, 1, false),
        (5, 33, true),
        (3, 1000, true),
        (8, 7, false),
        (9, 100, false),
        (6, 1000, false),
        (2, 5000, false),
    ];
    let mut samples = Vec::new();
    for (rows, vocab, greedy) in cases {
        let mut logits = rng.normal(dtype, &[rows, vocab]);
        if let crate::Data::Float(values) = &mut logits.data {
            // Coarse, so that some are equal, and some excluded (E4M3 has no infinity).
            let excluded = if dtype == DType::F8E4M3 { -448.0 } else { f64::NEG_INFINITY };
            for (i, x) in values.iter_mut().enumerate().filter(|(i, _)| i % vocab % 3 > 0) {
                *x = if i % 17 == 16 { excluded } else { dtype.round((*x * 4.0).round()) };
            }
        }
        let each = |f: fn(usize) -> f64| Tensor::float(DType::F32, &[rows], (0..rows).map(f).collect()).rounded();
        let temperature = if greedy { each(|_| 0.0) } else { each(|i| [1.0, 0.7, 0.0, 2.5, 1e-3][i % 5]) };
        let top_k = (0..rows).map(|i| [0, 1, 5, 40][i % 4]).collect();
        samples.push(
            Sample::new(SampleToken)
                .input(logits)
                .input(temperature)
                .input(Tensor::int(DType::I32, &[rows], top_k))
                .input(each(|i| [1.0, 0.9, 0.5, 0.0, 0.999][(i / 2) % 5]))
                .input(rng.integers(DType::I64, &[rows], 0, i64::MAX))
                .input(rng.integers(DType::I64, &[rows], 0, 1000))
                .input(rng.integers(DType::I64, &[rows], 0, 10_000))
                .judged(if greedy { Check::Exact } else { Check::Property(check) }),
        );
    }
    samples
}
