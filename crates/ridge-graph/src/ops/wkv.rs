//! The weighted average of RWKV-4 (Peng et al. 2023, "RWKV: Reinventing RNNs for the Transformer Era", section 3.2 and appendix D),
//! over the sequences of a step, each continued from the tokens before it.

use super::require::{takes, want};
use crate::cost::Cost;
use crate::dim::Dim;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Gradient, Var};
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;

/// `y[t] = (sum over s < t of e^(k[s] + (t - 1 - s) w) v[s] + e^(k[t] + u) v[t]) / (the same without v)`, each channel by itself.
///
/// All f32 but the last two inputs. `k`, `v`: `[tokens, channels]`; `w`: `[channels]`, the logarithm of what is kept from token to
/// token, not above 0; `u`: `[channels]`; `state`: `[sequences, 4, channels]`, the sums of the tokens before the step: with
/// `v`, without, both divided by the exponential of the largest exponent, and of that the key that it comes from and how many
/// tokens that was before the last: it is `key + age w`. Where the second is 0 there were no tokens. `seq_ids`: i32 `[tokens]`,
/// negative for padding, which is behind all sequences; `query_start`: i32 `[sequences + 1]`.
///
/// Gives `y`, `[tokens, channels]`, 0 for padding, and the state behind the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wkv;

/// The largest exponent where there was no token: its exponential is 0 beside that of any.
const LOWEST: f64 = -1e30;

impl Composite for Wkv {
    fn name(&self) -> &'static str {
        "wkv"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [k, v, w, u, state, ids, starts] = inputs else {
            return Err(takes("k, v, w, u, state, seq_ids and query_start", inputs));
        };
        if k.shape.rank() != 2 || state.shape.rank() != 3 {
            return Err(format!(
                "k must be [tokens, channels] and state [sequences, 4, channels], got {k} and {state}"
            ));
        }
        let (tokens, channels) = (k.shape.0[0].clone(), k.shape.0[1].clone());
        let rows = state.shape.0[0].clone();
        for (name, x) in [("k", k), ("v", v)] {
            want(name, x, DType::F32, Shape(vec![tokens.clone(), channels.clone()]))?;
        }
        for (name, x) in [("w", w), ("u", u)] {
            want(name, x, DType::F32, Shape(vec![channels.clone()]))?;
        }
        want("state", state, DType::F32, Shape(vec![rows.clone(), 4.into(), channels]))?;
        want("seq_ids", ids, DType::I32, Shape(vec![tokens]))?;
        want("query_start", starts, DType::I32, Shape(vec![rows + 1]))?;
        Ok(vec![k.clone(), state.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [k, v, w, u, state, ids, starts] = *inputs else { unreachable!("infer has counted the inputs") };
        let (tokens, rows) = (g.ty(k)?.shape.0[0].clone(), g.ty(state)?.shape.0[0].clone());
        let (one, zero) = (g.constant(DType::I32, 1.0)?, g.constant(DType::I32, 0.0)?);
        let old = StoredSums::read(g, state)?;
        let token = g.iota([&tokens], 0, DType::I32)?;
        let [begins, ends] = [0, 1].map(|bound| g.slice(starts, 0, bound, &rows));
        let (begins, ends) = (begins?, ends?);

        // Of each token those up to it; its own has a factor instead of the decays.
        let begin = g.gather(begins, ids, 0)?;
        let into = g.sub(token, begin)?;
        let pairs = Pairs::new(g, [ids, ids], [token, token])?;
        let own = g.eq(pairs.back, zero)?;
        let before = g.sub(pairs.back, one)?;
        let decayed = exponents(g, k, w, before)?;
        let bonus = g.add(k, u)?;
        let bonus = with_axis(g, bonus, 0)?;
        let decayed = g.select(own, bonus, decayed)?;
        let mine = old.of(g, ids)?;
        let [with, without, ..] = pairs.sums(g, decayed, v, (&mine, into, w))?;
        let y = g.div(with, without)?;
        let real = g.ge(ids, zero)?;
        let real = with_axis(g, real, 1)?;
        let nothing = g.constant(DType::F32, 0.0)?;
        let y = g.select(real, y, nothing)?;

        // Of each sequence all its tokens.
        let row = g.iota([&rows], 0, DType::I32)?;
        let last = g.sub(ends, one)?;
        let pairs = Pairs::new(g, [row, ids], [last, token])?;
        let decayed = exponents(g, k, w, pairs.back)?;
        let count = g.sub(ends, begins)?;
        let sums = pairs.sums(g, decayed, v, (&old, count, w))?;
        let mut parts = Vec::with_capacity(sums.len());
        for sum in sums {
            parts.push(with_axis(g, sum, 1)?);
        }
        Ok(vec![y, g.concat(&parts, 1)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let elements = outputs[0].shape.elements();
        Cost { vector_flops: elements.clone() * 14, special_flops: elements * 4, ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::None
    }

    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let cut = Placement::shard;
        let whole = Placement::Replicate;
        vec![ShardingRule {
            inputs: vec![cut(1), cut(1), cut(0), cut(0), cut(2), whole, whole],
            outputs: vec![cut(1), cut(2)],
        }]
    }
}

/// `x` with an axis of one element before axis `axis`.
fn with_axis(g: &mut Builder, x: Var, axis: usize) -> Result<Var> {
    let mut shape = g.ty(x)?.shape.clone();
    shape.0.insert(axis, Dim::from(1));
    g.reshape(x, shape)
}

/// `k`, `[tokens, channels]`, of tokens that are `back`, `[queries, tokens, 1]`, behind: less what decays: `[queries, tokens, channels]`.
fn exponents(g: &mut Builder, k: Var, w: Var, back: Var) -> Result<Var> {
    let back = g.cast(back, DType::F32)?;
    let lost = g.mul(back, w)?;
    let k = with_axis(g, k, 0)?;
    g.add(k, lost)
}

/// The sums of the tokens before the step, `[sequences, channels]` each.
struct StoredSums {
    with: Var,
    without: Var,
    key: Var,
    age: Var,
}

impl StoredSums {
    fn read(g: &mut Builder, state: Var) -> Result<Self> {
        let shape = g.ty(state)?.shape.clone();
        let mut parts = [state; 4];
        for (i, part) in parts.iter_mut().enumerate() {
            let slice = g.slice(state, 1, i, 1usize)?;
            *part = g.reshape(slice, Shape(vec![shape.0[0].clone(), shape.0[2].clone()]))?;
        }
        let [with, without, key, age] = parts;
        let nothing = g.constant(DType::F32, 0.0)?;
        let none = g.eq(without, nothing)?;
        let lowest = g.constant(DType::F32, LOWEST)?;
        Ok(Self { with, without, key: g.select(none, lowest, key)?, age })
    }

    /// Those of the sequence of each token.
    fn of(&self, g: &mut Builder, ids: Var) -> Result<Self> {
        let [with, without, key, age] = [self.with, self.without, self.key, self.age].map(|x| g.gather(x, ids, 0));
        Ok(Self { with: with?, without: without?, key: key?, age: age? })
    }
}

/// Queries, which are tokens or sequences, and the tokens that each sums.
struct Pairs {
    /// `[queries, tokens, 1]`: is the token one of them?
    seen: Var,
    /// How many places behind the query's last token it is: i32 of the same shape.
    back: Var,
}

impl Pairs {
    /// Of queries and tokens by sequence, and by their places.
    fn new(g: &mut Builder, sequences: [Var; 2], places: [Var; 2]) -> Result<Self> {
        let mut table = |[queries, tokens]: [Var; 2]| -> Result<[Var; 2]> {
            let queries = with_axis(g, queries, 1)?;
            let tokens = with_axis(g, tokens, 0)?;
            Ok([with_axis(g, queries, 2)?, with_axis(g, tokens, 2)?])
        };
        let ([a, b], [to, from]) = (table(sequences)?, table(places)?);
        let back = g.sub(to, from)?;
        let (zero, far) = (g.constant(DType::I32, 0.0)?, g.constant(DType::I32, -1.0)?);
        let same = g.eq(a, b)?;
        let counted = g.select(same, back, far)?;
        Ok(Self { seen: g.ge(counted, zero)?, back })
    }

    /// Sums with and without `v` of the exponentials of `exponents`, `[queries, tokens, channels]`, and of what was before, which
    /// is `into` tokens back, both divided by that of the largest; and the key and age of that.
    fn sums(
        &self,
        g: &mut Builder,
        exponents: Var,
        v: Var,
        (old, into, w): (&StoredSums, Var, Var),
    ) -> Result<[Var; 4]> {
        let shape = g.ty(old.with)?.shape.clone();
        let into = with_axis(g, into, 1)?;
        let into = g.cast(into, DType::F32)?;
        let old_age = g.add(old.age, into)?;
        let lost = g.mul(old_age, w)?;
        let stored = g.add(old.key, lost)?;
        let lowest = g.constant(DType::F32, LOWEST)?;
        let masked = g.select(self.seen, exponents, lowest)?;
        let largest = g.reduce_max(masked, 1)?;
        let largest = g.reshape(largest, shape.clone())?;
        let largest = g.max(largest, stored)?;

        let of_all = with_axis(g, largest, 1)?;
        let below = g.sub(masked, of_all)?;
        let share = g.exp(below)?;
        let nothing = g.constant(DType::F32, 0.0)?;
        let share = g.select(self.seen, share, nothing)?;
        let v = with_axis(g, v, 0)?;
        let weighed = g.mul(share, v)?;
        let below = g.sub(stored, largest)?;
        let kept = g.exp(below)?;
        let mut sums = [largest; 2];
        for (sum, (of_step, before)) in sums.iter_mut().zip([(weighed, old.with), (share, old.without)]) {
            let of_step = g.reduce_sum(of_step, 1)?;
            let of_step = g.reshape(of_step, shape.clone())?;
            let before = g.mul(before, kept)?;
            *sum = g.add(of_step, before)?;
        }

        // Where the largest is of a token of the step, its age.
        let none = g.constant(DType::F32, -1.0)?;
        let back = g.cast(self.back, DType::F32)?;
        let is_largest = g.ge(masked, of_all)?;
        let age = g.select(is_largest, back, none)?;
        let age = g.select(self.seen, age, none)?;
        let age = g.reduce_max(age, 1)?;
        let age = g.reshape(age, shape)?;
        let of_step = g.ge(age, nothing)?;
        let age = g.select(of_step, age, old_age)?;
        let lost = g.mul(age, w)?;
        Ok([sums[0], sums[1], g.sub(largest, lost)?, age])
    }
}

impl Builder {
    /// `(y, state)` of [`Wkv`], from `[k, v, w, u, state]` and `[seq_ids, query_start]`.
    ///
    /// # Errors
    /// When an input does not have the type described there.
    pub fn wkv(&mut self, [k, v, w, u, state]: [Var; 5], [ids, starts]: [Var; 2]) -> Result<[Var; 2]> {
        let out = self.composite(Wkv, &[k, v, w, u, state, ids, starts])?;
        Ok([out[0], out[1]])
    }
}

pub(super) fn samples(rng: &mut Rng, _dtype: DType) -> Vec<Sample> {
    // Tokens of each sequence, padding, channels, and the size of keys: exponentials of the largest do not fit f32.
    type Case<'a> = (&'a [usize], usize, usize, f64);
    let cases: [Case<'_>; 8] = [
        (&[], 0, 4, 1.0),
        (&[], 2, 3, 1.0),
        (&[1], 0, 1, 1.0),
        (&[1, 1, 1], 1, 33, 2.0),
        (&[2, 0, 7, 3], 2, 16, 1.0),
        (&[9, 4], 0, 5, 120.0),
        (&[20, 5], 0, 100, 3.0),
        (&[0, 3], 3, 130, 1.0),
    ];
    let mut samples = Vec::new();
    for (case, (rows, padding, channels, size)) in cases.into_iter().enumerate() {
        let mut ids: Vec<i64> = rows.iter().enumerate().flat_map(|(row, n)| vec![row as i64; *n]).collect();
        let mut starts = vec![0];
        rows.iter().for_each(|n| starts.push(starts.last().copied().unwrap_or(0) + *n as i64));
        ids.resize(ids.len() + padding, -1);
        let mut numbers = |shape: &[usize], number: &dyn Fn(usize, f64) -> f64| {
            let count: usize = shape.iter().product();
            Tensor::float(DType::F32, shape, (0..count).map(|i| number(i, rng.gauss())).collect())
        };
        let k = numbers(&[ids.len(), channels], &|_, x| size * x);
        let v = numbers(&[ids.len(), channels], &|_, x| x);
        let w = numbers(&[channels], &|_, x| -x.exp());
        let u = numbers(&[channels], &|_, x| x);
        // Every other case begins without tokens.
        let old = numbers(&[rows.len(), 4, channels], &|i, x| match i / channels % 4 {
            _ if case % 2 == 0 => 0.0,
            0 | 2 => x,
            1 => x.abs() + 0.1,
            _ => (3.0 * x.abs()).floor(),
        });
        samples.push(
            Sample::new(Wkv)
                .input(k)
                .input(v)
                .input(w)
                .input(u)
                .input(old)
                .input(Tensor::int(DType::I32, &[ids.len()], ids))
                .input(Tensor::int(DType::I32, &[rows.len() + 1], starts)),
        );
    }
    samples
}
