//! The next token of each sequence: temperature, top-k (Fan, Lewis and Dauphin 2018, "Hierarchical Neural Story
//! Generation", section 5.4), top-p (Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section
//! 3.1), min-p (Nguyen et al. 2025, "Turning Up the Heat", section 3), locally typical sampling (Meister et al. 2023,
//! section 3), in the order of transformers, and one counter-based random number.

use std::cmp::Ordering;

use super::require::{flat, takes, want, want_floats};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::{GraphError, Result};
use crate::eval::uniform;
use crate::graph::{Builder, Composite, Gradient, Var};
use crate::sample::{Check, Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::tensor::{Tensor, Value};
use crate::types::Type;
use crate::why::Why;

/// A token for each row of `logits`.
///
/// `logits`: `[sequences, vocab]` of any float dtype, finite or minus infinity and one at least finite; then
/// [`SampleToken::KEYS`], all `[sequences]`. Gives i32 `[sequences]`; -1 for a row whose logits are not as said.
///
/// Where the temperature is 0 (or below) it is the largest logit, the first of equals. Elsewhere, in f32:
/// 1. sort by logit, largest first, equals (the two zeros are equal) by id; weigh each token
///    `exp((logit - largest) / temperature)`;
/// 2. keep the first `top_k` (0 or below: all);
/// 3. of these keep each whose predecessors' weights sum to less than `top_p` of all kept so far (1 or above: all);
/// 4. of these keep each whose weight is `min_p` (times the largest, which is 1) or more;
/// 5. of these, with `p` their weights over the sum of them and `H` the entropy of `p`, keep those whose `|-ln p - H|` is
///    no larger than that of the token at which, in ascending order of it, the sum of `p` reaches `typical_p` (1 or
///    above: all);
/// 6. `u` is uniform in `[0, 1)`, `random(seed, sequence, position, index 0)` of stream [`SampleToken::STREAM`]: take
///    the first token at which the running sum of kept weights exceeds `u` times their total.
///
/// Steps 3 and 4 keep the first token always. So a token depends on its own row alone, and the same keys give the same
/// token in any batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleToken;

impl SampleToken {
    /// The random stream that tokens are drawn from.
    pub const STREAM: u32 = 0;

    /// The inputs after the logits.
    pub const KEYS: [(&str, DType); 8] = [
        ("temperature", DType::F32),
        ("top_k", DType::I32),
        ("top_p", DType::F32),
        ("min_p", DType::F32),
        ("typical_p", DType::F32),
        ("seed", DType::I64),
        ("sequence", DType::I64),
        ("position", DType::I64),
    ];
}

impl Composite for SampleToken {
    fn name(&self) -> &'static str {
        "sample_token"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let names = || {
            let keys: Vec<&str> = Self::KEYS.iter().map(|(name, _)| *name).collect();
            takes(&format!("logits, {}", keys.join(", ")), inputs)
        };
        let [logits, keys @ ..] = inputs else { return Err(names()) };
        if keys.len() != Self::KEYS.len() {
            return Err(names());
        }
        want_floats("logits", logits, 2, "[sequences, vocab]")?;
        if logits.shape.last().as_const() == Some(0) {
            return Err(format!("logits must have a token to choose, got {logits}"));
        }
        let rows = &logits.shape.0[0];
        for ((name, dtype), ty) in Self::KEYS.iter().zip(keys) {
            want(name, ty, *dtype, [rows])?;
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
        let mut setting = |i: usize| g.reshape(inputs[1 + i], column.clone());
        let (temperature, top_k, top_p) = (setting(0)?, setting(1)?, setting(2)?);
        let (min_p, typical_p) = (setting(3)?, setting(4)?);

        let valid = valid(g, logits)?;
        let best = g.argmax(logits, 1)?;
        let warm = g.gt(temperature, zero)?;
        let divisor = g.select(warm, temperature, one)?;
        let (sorted, ids) = g.sort(logits, 1, true, vocab.clone())?;
        let largest = g.slice(sorted, 1, 0, 1)?;
        let below = g.sub(sorted, largest)?;
        let exponent = g.div(below, divisor)?;
        let weight = g.exp(exponent)?;

        let rank = g.iota(shape.clone(), 1, DType::I32)?;
        let first = g.eq(rank, none)?;
        let all = g.dim_value(&vocab)?;
        let all = g.cast(all, DType::I32)?;
        let limited = g.gt(top_k, none)?;
        let limit = g.select(limited, top_k, all)?;
        let kept = g.lt(rank, limit)?;
        let weight = g.select(kept, weight, zero)?;

        let kept = {
            let running = g.scan_sum(weight, 1)?;
            let total = g.slice(running, 1, vocab.clone() + -1, 1)?;
            // Sums of the predecessors.
            let before = g.pad(running, 1, 1, 0, 0.0)?;
            let before = g.slice(before, 1, 0, vocab.clone())?;
            let bound = g.mul(top_p, total)?;
            let inside = g.lt(before, bound)?;
            let open = g.ge(top_p, one)?;
            let inside = g.or(inside, open)?;
            let likely = g.ge(weight, min_p)?;
            let inside = g.and(inside, likely)?;
            let inside = g.or(inside, first)?;
            g.and(kept, inside)?
        };
        let typical = typical(g, [weight, exponent, kept, rank], typical_p, &shape)?;
        let kept = g.and(kept, typical)?;

        let index = g.constant(DType::I64, 0.0)?;
        let index = g.broadcast(index, rows.clone())?;
        let u = g.random(inputs[6], inputs[7], inputs[8], index, Self::STREAM)?;
        let u = g.reshape(u, column)?;
        let weight = g.select(kept, weight, zero)?;
        let running = g.scan_sum(weight, 1)?;
        let total = g.slice(running, 1, vocab + -1, 1)?;
        let threshold = g.mul(u, total)?;
        let passed = g.le(running, threshold)?;
        let passed = g.and(kept, passed)?;
        let passed = g.cast(passed, DType::I32)?;
        let passed = g.reduce_sum(passed, 1)?;
        // The number of each kept token among the kept.
        let kept = g.cast(kept, DType::I32)?;
        let nth = g.scan_sum(kept, 1)?;
        let count = g.reduce_sum(kept, 1)?;
        let one = g.constant(DType::I32, 1.0)?;
        let next = g.add(passed, one)?;
        // Rounding may deny every token.
        let wanted = g.min(next, count)?;
        let hit = g.eq(nth, wanted)?;
        let is_kept = g.gt(kept, none)?;
        let hit = g.and(hit, is_kept)?;
        let id = g.select(hit, ids, none)?;
        let id = g.reduce_sum(id, 1)?;
        let token = g.select(warm, id, best)?;
        let invalid = g.constant(DType::I32, -1.0)?;
        let token = g.select(valid, token, invalid)?;
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

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        vec![ShardingRule { inputs: vec![Placement::shard(0); inputs.len()], outputs: vec![Placement::shard(0)] }]
    }
}

/// Is each row of `logits` free of NaN and infinity, and not all minus infinity? Bool `[sequences, 1]`.
fn valid(g: &mut Builder, logits: Var) -> Result<Var> {
    let (most, none) = (g.constant(DType::F32, f64::from(f32::MAX))?, g.constant(DType::I32, 0.0)?);
    let least = g.constant(DType::F32, f64::from(f32::MIN))?;
    let counted = |g: &mut Builder, truth: Var| -> Result<Var> {
        let count = g.cast(truth, DType::I32)?;
        g.reduce_sum(count, 1)
    };
    // Of NaN nothing holds.
    let good = g.le(logits, most)?;
    let bad = g.not(good)?;
    let bad = counted(g, bad)?;
    let possible = g.ge(logits, least)?;
    let possible = counted(g, possible)?;
    let (clean, some) = (g.eq(bad, none)?, g.gt(possible, none)?);
    g.and(clean, some)
}

/// Which of the kept tokens are typical, all in sorted order: bool `[sequences, vocab]`.
fn typical(g: &mut Builder, [weight, exponent, kept, rank]: [Var; 4], typical_p: Var, shape: &Shape) -> Result<Var> {
    let (rows, vocab) = (shape.0[0].clone(), shape.last());
    let zero = g.constant(DType::F32, 0.0)?;
    let one = g.constant(DType::F32, 1.0)?;
    let weight = g.select(kept, weight, zero)?;
    let total = g.reduce_sum(weight, 1)?;
    let p = g.div(weight, total)?;
    let log_total = g.log(total)?;
    let log_p = g.sub(exponent, log_total)?;
    let there = g.gt(p, zero)?;
    let part = g.mul(p, log_p)?;
    let part = g.select(there, part, zero)?;
    let negative_entropy = g.reduce_sum(part, 1)?;
    let distance = g.sub(negative_entropy, log_p)?;
    let distance = g.abs(distance)?;
    let far = g.constant(DType::F32, f64::from(f32::MAX))?;
    let distance = g.select(there, distance, far)?;
    let (ascending, from) = g.sort(distance, 1, false, vocab.clone())?;
    let flat = flat(&[rows, vocab.clone()]).map_err(|why| GraphError::usage(g.scope(), why))?;
    let p = g.reshape(p, Shape(vec![flat]))?;
    let at = super::history::places(g, from, None, shape, &vocab)?;
    let p = g.gather(p, at, 0)?;
    let running = g.scan_sum(p, 1)?;
    let short = g.lt(running, typical_p)?;
    let short = g.cast(short, DType::I32)?;
    let short = g.reduce_sum(short, 1)?;
    let last = g.dim_value(&(vocab + -1))?;
    let last = g.cast(last, DType::I32)?;
    let short = g.min(short, last)?;
    let here = g.eq(rank, short)?;
    let bound = g.select(here, ascending, zero)?;
    let bound = g.reduce_sum(bound, 1)?;
    let inside = g.le(distance, bound)?;
    let open = g.ge(typical_p, one)?;
    g.or(inside, open)
}

impl Builder {
    /// The next token of each sequence, by the keys of [`SampleToken::KEYS`] in that order; see [`SampleToken`].
    ///
    /// # Errors
    /// When `logits` is not a float matrix with a column or more, or a key is not of the dtype described there with one
    /// element a row.
    pub fn sample_token(&mut self, logits: Var, keys: [Var; SampleToken::KEYS.len()]) -> Result<Var> {
        let inputs: Vec<Var> = std::iter::once(logits).chain(keys).collect();
        Ok(self.composite(SampleToken, &inputs)?[0])
    }
}

/// Accepts each token that the definition gives when its sums are off by f32's rounding over the vocabulary.
fn check(inputs: &[Value], outputs: &[Tensor]) -> Result<(), String> {
    let input = |i: usize| inputs[i].tensor();
    let vocab = input(0).shape[1];
    for (row, logits) in input(0).floats().chunks(vocab).enumerate() {
        let token = outputs[0].ints()[row];
        let float = |i: usize| input(i).floats()[row];
        let int = |i: usize| input(i).ints()[row];
        let valid = logits.iter().all(|x| *x <= f64::from(f32::MAX)) && logits.iter().any(|x| x.is_finite());
        if !valid || token < 0 {
            if valid || token != -1 {
                return Err(format!(
                    "row {row}: token {token} of logits that are {}valid",
                    if valid { "" } else { "in" }
                ));
            }
            continue;
        }
        let mut order: Vec<usize> = (0..vocab).collect();
        // Not `total_cmp`: the two zeros are equal, so the smaller id comes first.
        let by_logit = |a: &usize, b: &usize| logits[*b].partial_cmp(&logits[*a]).unwrap_or(Ordering::Equal);
        order.sort_by(|a, b| by_logit(a, b).then(a.cmp(b)));
        let rank = order.iter().position(|id| *id as i64 == token);
        let rank = rank.ok_or_else(|| format!("row {row}: token {token} is not in a vocabulary of {vocab}"))?;
        if float(1) <= 0.0 {
            if rank != 0 {
                return Err(format!("row {row}: greedy token must be {}, got {token}", order[0]));
            }
            continue;
        }
        let weigh = |id: &usize| ((logits[*id] - logits[order[0]]) / float(1)).exp();
        let k = usize::try_from(int(2)).ok().filter(|k| *k > 0).unwrap_or(vocab).min(vocab);
        let choice = Choice {
            weights: order[..k].iter().map(weigh).collect(),
            top_p: float(3),
            min_p: float(4),
            typical_p: float(5),
            u: f64::from(uniform(int(6), SampleToken::STREAM, int(7), int(8), 0)),
            slack: 4.0 * (vocab as f64 + 16.0) * DType::F32.unit_roundoff(),
        };
        if rank >= k || !choice.counts().any(|n| choice.reaches(n, rank)) {
            return Err(format!(
                "row {row}: token {token} of rank {rank} does not hold u = {} under top_k {k}, top_p {}, min_p {}, \
                 typical_p {}, temperature {}",
                choice.u,
                choice.top_p,
                choice.min_p,
                choice.typical_p,
                float(1)
            ));
        }
    }
    Ok(())
}

/// A row's choice in f64, as far as f32 can tell.
struct Choice {
    /// Those of the first `top_k`, largest first.
    weights: Vec<f64>,
    top_p: f64,
    min_p: f64,
    typical_p: f64,
    u: f64,
    slack: f64,
}

impl Choice {
    /// How many tokens top-p and min-p may keep.
    fn counts(&self) -> impl Iterator<Item = usize> {
        let total: f64 = self.weights.iter().sum();
        // Of the tokens whose predecessors sum to less, and whose weights are no less, by a bound that much off.
        let kept = |slack: f64| {
            let mut before = 0.0;
            let inside = |weight: &&f64| {
                let inside = self.top_p >= 1.0 || before < (self.top_p + slack) * total;
                before += **weight;
                inside && **weight >= self.min_p * (1.0 - slack)
            };
            self.weights.iter().take_while(inside).count().max(1)
        };
        kept(-self.slack)..=kept(self.slack)
    }

    /// May the token of this rank be the one that `u` gives, of `n` that are kept?
    fn reaches(&self, n: usize, rank: usize) -> bool {
        if rank >= n {
            return false;
        }
        let weights = &self.weights[..n];
        let total: f64 = weights.iter().sum();
        let entropy: f64 = weights.iter().filter(|w| **w > 0.0).map(|w| w / total * -(w / total).ln()).sum();
        let distance = |w: &f64| if *w > 0.0 { (-(w / total).ln() - entropy).abs() } else { f64::MAX };
        let mut ascending: Vec<(f64, f64)> = weights.iter().map(|w| (distance(w), w / total)).collect();
        ascending.sort_by(|a, b| a.0.total_cmp(&b.0));
        // Distances are sums over the vocabulary too, and as large as exponents are.
        let blur = self.slack * (1.0 + entropy);
        let bound = |slack: f64| {
            let mut sum = 0.0;
            let short = |(_, p): &&(f64, f64)| {
                sum += p;
                sum < self.typical_p + slack
            };
            let last = ascending.iter().take_while(short).count().min(n - 1);
            if self.typical_p >= 1.0 { f64::INFINITY } else { ascending[last].0 + slack.signum() * blur }
        };
        let (least, most) = (bound(-self.slack), bound(self.slack));
        // Sums of what is kept surely, and of what may be kept.
        let sum = |range: std::ops::Range<usize>, bound: f64| -> f64 {
            weights[range].iter().filter(|w| distance(w) <= bound).sum()
        };
        let low = sum(0..rank, least) / sum(0..n, most);
        let high = (sum(0..rank, most) + weights[rank]) / sum(0..n, least).max(f64::MIN_POSITIVE);
        distance(&weights[rank]) <= most && (low - self.slack..=high + self.slack).contains(&self.u)
    }
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
            if rows == 9 && dtype != DType::F8E4M3 {
                // Rows of which there is no token to choose.
                values[2 * vocab + 7] = f64::NAN;
                values[4 * vocab] = f64::INFINITY;
                values[6 * vocab..7 * vocab].fill(f64::NEG_INFINITY);
            }
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
                .input(each(|i| [0.0, 0.05, 0.3][i % 3]))
                .input(each(|i| [1.0, 1.0, 0.2, 0.9][(i / 3) % 4]))
                .input(rng.integers(DType::I64, &[rows], 0, i64::MAX))
                .input(rng.integers(DType::I64, &[rows], 0, 1000))
                .input(rng.integers(DType::I64, &[rows], 0, 10_000))
                .judged(if greedy { Check::Exact } else { Check::Property(check) }),
        );
    }
    samples
}
