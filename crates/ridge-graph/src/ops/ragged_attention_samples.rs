//! Instances of attention without a cache.

use super::ragged_attention::{RaggedAttention, RaggedAttentionBackward, RaggedAttentionSaving};
use crate::dim::Sym;
use crate::dtype::DType;
use crate::sample::{Rng, Sample};
use crate::tensor::Tensor;

/// An instance: its attributes, q, k, v and ids, and key and heads with dropout.
struct Instance {
    op: RaggedAttention,
    qkv: [Tensor; 3],
    ids: Tensor,
    random: Vec<Tensor>,
}

/// Shape of an instance: lengths of the sequences, padding, heads, kv heads, dim.
type Case<'a> = (&'a [usize], usize, usize, usize, usize);

fn instance(rng: &mut Rng, dtype: DType, op: RaggedAttention, ids: Vec<i64>, sizes: [usize; 3]) -> Instance {
    let (tokens, [heads, kv_heads, dim]) = (ids.len(), sizes);
    let qkv = [heads, kv_heads, kv_heads].map(|heads| rng.normal(dtype, &[tokens, heads, dim]));
    let mut random = Vec::new();
    if op.dropout > 0.0 {
        random.push(Tensor::int(DType::I64, &[], vec![rng.bits() as i64]));
        random.push(rng.integers(DType::I64, &[heads], 0, 1 << 32));
    }
    Instance { op, qkv, ids: Tensor::int(DType::I32, &[tokens], ids), random }
}

fn instances(rng: &mut Rng, dtype: DType, longest: Case<'_>) -> Vec<Instance> {
    let both = |dim: usize| RaggedAttention::new(1.0 / (dim as f64).sqrt(), Sym::new("pairs"));
    let causal = |dim| RaggedAttention { causal: true, ..both(dim) };
    let window = |dim, window| RaggedAttention { window: Some(window), ..causal(dim) };
    let capped = |op, cap| RaggedAttention { softcap: Some(cap), ..op };
    let sides = |dim, window| RaggedAttention { window: Some(window), ..both(dim) };
    let cases: [(Case<'_>, RaggedAttention); 16] = [
        ((&[], 0, 2, 1, 8), both(8)),
        ((&[], 3, 2, 2, 8), causal(8)),
        ((&[1], 0, 1, 1, 1), both(1)),
        ((&[7, 1, 0, 12], 2, 4, 4, 16), both(16)),
        ((&[17, 5], 0, 4, 2, 33), both(33)),
        ((&[40], 1, 6, 2, 10), both(10)),
        ((&[3, 60], 0, 2, 2, 64), both(64)),
        (longest, both(8)),
        ((&[1, 1, 30], 1, 2, 1, 16), causal(16)),
        ((&[44, 9], 3, 4, 2, 33), causal(33)),
        ((&[67], 0, 2, 2, 64), causal(64)),
        ((&[33, 20], 2, 2, 1, 128), window(128, 5)),
        ((&[9, 30], 0, 6, 6, 16), window(16, 1)),
        ((&[35], 0, 2, 1, 64), window(64, 100)),
        ((&[21, 5], 1, 4, 2, 16), capped(causal(16), 0.5)),
        ((&[40], 0, 2, 2, 8), capped(window(8, 16), 50.0)),
    ];
    let mut all = Vec::new();
    let of = |rng: &mut Rng, ((lengths, padding, heads, kv_heads, dim), op): (Case<'_>, RaggedAttention)| {
        let mut ids: Vec<i64> =
            lengths.iter().enumerate().flat_map(|(id, n)| std::iter::repeat_n(id as i64, *n)).collect();
        ids.resize(ids.len() + padding, -1);
        instance(rng, dtype, op, ids, [heads, kv_heads, dim])
    };
    all.extend(cases.into_iter().map(|case| of(rng, case)));
    // Tokens of a sequence need not lie together.
    for op in [both(16), causal(16), window(16, 3)] {
        all.push(instance(rng, dtype, op, vec![1, 0, 1, -1, 0, 1], [4, 4, 16]));
    }
    let dropped = |op, dropout| RaggedAttention { dropout, ..op };
    let dropping: [(Case<'_>, RaggedAttention); 5] = [
        ((&[50], 0, 2, 2, 16), dropped(causal(16), 0.2)),
        ((&[11, 70], 3, 4, 2, 8), dropped(causal(8), 0.1)),
        ((&[5, 19], 1, 6, 3, 10), dropped(both(10), 0.9)),
        ((&[40], 0, 2, 1, 16), dropped(capped(window(16, 9), 1.5), 0.5)),
        // Rounded to none.
        ((&[7], 0, 1, 1, 8), dropped(causal(8), 1e-5)),
    ];
    all.extend(dropping.into_iter().map(|case| of(rng, case)));
    // Windows on both sides, of random numbers of their own, so that those of the others stay.
    let both_sides: [(Case<'_>, RaggedAttention); 4] = [
        ((&[33, 20], 2, 2, 1, 64), sides(64, 5)),
        ((&[9, 41], 0, 6, 6, 16), sides(16, 1)),
        ((&[70, 3], 1, 2, 2, 33), sides(33, 34)),
        ((&[25], 0, 2, 1, 8), capped(sides(8, 7), 2.0)),
    ];
    let mut rng = Rng::new(23);
    all.extend(both_sides.into_iter().map(|case| of(&mut rng, case)));
    all.push(instance(&mut rng, dtype, sides(16, 2), vec![1, 0, 1, -1, 0, 1], [4, 4, 16]));
    all
}

const LONG: Case<'static> = (&[530], 2, 1, 1, 8);

pub(crate) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let sample = |Instance { op, qkv, ids, random }| {
        random.into_iter().fold(qkv.into_iter().fold(Sample::new(op), Sample::input).input(ids), Sample::input)
    };
    instances(rng, dtype, LONG).into_iter().map(sample).collect()
}

pub(crate) fn samples_saving(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let sample = |Instance { op, qkv, ids, random }| {
        let sample = qkv.into_iter().fold(Sample::new(RaggedAttentionSaving(op)), Sample::input).input(ids);
        random.into_iter().fold(sample, Sample::input)
    };
    instances(rng, dtype, (&[130], 2, 1, 1, 8)).into_iter().map(sample).collect()
}

pub(crate) fn samples_backward(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut samples = Vec::new();
    for i in instances(rng, dtype, (&[130], 2, 1, 1, 8)) {
        let (y, lse) = i.forward(dtype);
        // Not quite the output, since sums over a query that sees one key would cancel to nothing but rounding.
        let noise = rng.normal(dtype, &y.shape);
        let y = y.floats().iter().zip(noise.floats()).map(|(y, noise)| y + noise).collect();
        let y = Tensor::float(dtype, &noise.shape, y).rounded();
        let dy = rng.normal(dtype, &i.qkv[0].shape);
        let sample = i.qkv.into_iter().fold(Sample::new(RaggedAttentionBackward(i.op)), Sample::input);
        let sample = sample.input(i.ids).input(y).input(lse);
        samples.push(i.random.into_iter().fold(sample, Sample::input).input(dy));
    }
    samples
}

impl Instance {
    /// Output and logarithms of sums by plain loops, rounded.
    fn forward(&self, dtype: DType) -> (Tensor, Tensor) {
        let [q, k, v] = &self.qkv;
        let (tokens, heads, kv_heads, dim) = (q.shape[0], q.shape[1], k.shape[1], q.shape[2]);
        let (mut y, mut lse) = (vec![0.0; q.len()], vec![0.0; tokens * heads]);
        for row in 0..tokens * heads {
            let (query, head) = (row / heads, row % heads);
            let at = |key: usize| (key * kv_heads + head / (heads / kv_heads)) * dim;
            let keys: Vec<usize> = (0..tokens).filter(|key| self.sees(query, *key)).collect();
            let score = |key: usize| {
                let products = q.floats()[row * dim..][..dim].iter().zip(&k.floats()[at(key)..][..dim]);
                let score = products.map(|(q, k)| q * k).sum::<f64>() * self.op.scale;
                self.op.softcap.map_or(score, |cap| cap * (score / cap).tanh())
            };
            let weights: Vec<f64> = keys.iter().map(|key| score(*key).exp()).collect();
            let total: f64 = weights.iter().sum();
            if keys.is_empty() {
                continue;
            }
            lse[row] = total.ln();
            for (key, weight) in keys.iter().zip(&weights) {
                let weight = weight * self.factor(head, query, *key);
                let values = &v.floats()[at(*key)..][..dim];
                y[row * dim..][..dim].iter_mut().zip(values).for_each(|(y, v)| *y += weight / total * v);
            }
        }
        let y = Tensor::float(dtype, &q.shape, y).rounded();
        (y, Tensor::float(DType::F32, &[tokens, heads], lse).rounded())
    }

    /// What dropout multiplies a share by, from random numbers as the op's description has them.
    fn factor(&self, head: usize, query: usize, place: usize) -> f64 {
        let [key, heads] = &self.random[..] else { return 1.0 };
        let (index, is_lower) = (place / 16 * 8 + place % 8, place % 16 >= 8);
        let stream = RaggedAttention::DROPOUT_STREAM;
        let number = crate::eval::uniform(key.ints()[0], stream, heads.ints()[head], query as i64, index as i64);
        let upper = (number * 4096.0).floor();
        let bits = if is_lower { (number * 4096.0 - upper) * 4096.0 } else { upper };
        let threshold = (self.op.dropout * 4096.0).round();
        if f64::from(bits) < threshold { 0.0 } else { 4096.0 / (4096.0 - threshold) }
    }

    fn sees(&self, query: usize, key: usize) -> bool {
        let ids = self.ids.ints();
        let same = ids[query] == ids[key] && ids[query] >= 0;
        let near = self.op.window.is_none_or(|window| key + window > query);
        same && (!self.op.causal || key <= query && near)
    }
}
