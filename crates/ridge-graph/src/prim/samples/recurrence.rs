//! Linear recurrences over ragged steps.

use super::super::Prim;
use crate::dtype::DType;
use crate::sample::{Rng, Sample};
use crate::tensor::{Tensor, Value};

/// Tokens of each sequence, padding behind them, groups, heads, keys, values; is the decay that of a channel?
type Case<'a> = (&'a [usize], usize, [usize; 4], bool);

/// F32 alone, which the primitive computes in.
pub(crate) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    if dtype != DType::F32 {
        return Vec::new();
    }
    let mut samples = short_and_long(rng);
    samples.extend(of_many_chunks(&mut Rng::new(97)));
    samples
}

/// Steps whose rows span several chunks of a GPU's kernels, most of whose keys decay by themselves.
/// Heads have 13 values and more: what is allowed for a row of few follows from how lucky the plain implementation is.
fn of_many_chunks(rng: &mut Rng) -> Vec<Sample> {
    let by_key: [Case<'_>; 5] = [
        (&[150, 16], 0, [1, 2, 20, 40], true),
        (&[64, 1, 40], 2, [2, 2, 130, 17], true),
        (&[200], 0, [1, 1, 64, 32], true),
        (&[97], 1, [1, 2, 33, 19], true),
        (&[70], 0, [1, 1, 256, 24], true),
    ];
    let mut samples = Vec::new();
    for rate in [0.02, 2.0, 60.0] {
        samples.extend(of_cases(rng, &by_key, rate));
    }
    let mut resets = of_cases(rng, &by_key[..1], 0.5);
    resets.iter_mut().for_each(|sample| lose_tokens(sample, 2 * 20));
    samples.extend(resets);
    let long: [Case<'_>; 2] = [(&[600, 20], 3, [1, 2, 12, 13], true), (&[200, 20], 0, [2, 2, 16, 68], false)];
    samples.extend(of_cases(rng, &long, 0.1));
    // More rows than chunks.
    let mut rows = [1; 42];
    [rows[7], rows[23]] = [70, 18];
    samples.extend(of_cases(rng, &[(&rows, 1, [1, 2, 8, 20], true), (&rows, 0, [1, 1, 8, 18], false)], 0.5));
    samples
}

/// Makes tokens leave nothing of the state, where each has `rates` logarithms of decays.
fn lose_tokens(sample: &mut Sample, rates: usize) {
    let of = sample.inputs[3].tensor();
    let lost = |(i, x): (usize, &f64)| if [0, 70, 71, 140].contains(&(i / rates)) { -1e4 } else { *x };
    let of = Tensor::float(DType::F32, &of.shape, of.floats().iter().enumerate().map(lost).collect());
    sample.inputs[3] = Value::Plain(of);
}

fn short_and_long(rng: &mut Rng) -> Vec<Sample> {
    let cases: [Case<'_>; 10] = [
        (&[], 0, [1, 1, 4, 4], false),
        (&[], 3, [1, 2, 4, 3], true),
        (&[1], 0, [1, 1, 1, 1], true),
        (&[1, 1, 1], 2, [1, 4, 16, 8], false),
        (&[9, 0, 33], 1, [2, 4, 20, 36], false),
        (&[70, 5], 0, [3, 3, 64, 64], true),
        (&[40], 3, [2, 2, 33, 130], true),
        // Channels with a state of their own, as Mamba-1 has them.
        (&[12, 1], 1, [1, 37, 16, 1], true),
        (&[4], 0, [2, 6, 5, 2], false),
        (&[25, 2], 0, [1, 5, 12, 1], true),
    ];
    let mut samples = of_cases(rng, &cases, 2.0);
    // Rows of several chunks, from decays that keep nearly all to such that leave next to nothing, and tokens that leave nothing.
    let long: [Case<'_>; 4] = [
        (&[150, 16], 0, [1, 2, 20, 40], false),
        (&[64, 1, 40], 2, [2, 2, 130, 17], false),
        (&[200], 0, [1, 1, 64, 32], false),
        (&[97], 1, [1, 2, 33, 7], false),
    ];
    let mut rng = Rng::new(83);
    for rate in [0.02, 2.0, 60.0] {
        samples.extend(of_cases(&mut rng, &long, rate));
    }
    let mut resets = of_cases(&mut rng, &long[..1], 0.5);
    resets.iter_mut().for_each(|sample| lose_tokens(sample, 2));
    samples.extend(resets);
    // Three sequences, the longest of ten chunks.
    samples.extend(of_cases(&mut rng, &[(&[290, 3, 140], 1, [1, 2, 12, 5], false)], 0.1));
    samples
}

/// A sample of each case, without and with a part of low rank. Logarithms of decays lie between `-rate` and 0.
fn of_cases(rng: &mut Rng, cases: &[Case<'_>], rate: f64) -> Vec<Sample> {
    let mut samples = Vec::new();
    for &(rows, padding, [groups, heads, key, value], per_key) in cases {
        for low_rank in [false, true] {
            let tokens = rows.iter().sum::<usize>() + padding;
            // As models have them: unit keys and decays, so that the state neither vanishes nor grows.
            let unit = (key as f64).sqrt().recip();
            let scaled = |t: Tensor, by: f64| {
                Tensor::float(DType::F32, &t.shape, t.floats().iter().map(|x| x * by).collect()).rounded()
            };
            let [q, k] = [(); 2].map(|()| scaled(rng.normal(DType::F32, &[tokens, groups, key]), unit));
            let v = rng.normal(DType::F32, &[tokens, heads, value]);
            let rates = [tokens, heads, if per_key { key } else { 1 }];
            let rates = Tensor::float(
                DType::F32,
                &rates,
                (0..rates.iter().product()).map(|_| -rate * rng.unit() * rng.unit()).collect(),
            );
            let state = rng.normal(DType::F32, &[rows.len(), heads, key, value]);
            let mut starts = vec![0];
            starts.extend(rows.iter().scan(0, |end, n| {
                *end += *n as i64;
                Some(*end)
            }));
            let mut sample = Sample::prim(Prim::LinearRecurrence { low_rank })
                .input(q)
                .input(k)
                .input(v)
                .input(rates.rounded())
                .input(state)
                .input(Tensor::int(DType::I32, &[rows.len() + 1], starts));
            if low_rank {
                let erase = scaled(rng.normal(DType::F32, &[tokens, heads, key]), unit);
                // Less than what is there is taken away.
                sample = sample.input(erase.clone()).input(scaled(erase, -0.6));
            }
            samples.push(sample);
        }
    }
    samples
}

/// The same steps, with cotangents.
pub(super) fn samples_gradient(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let with_cotangents = |sample: Sample| {
        let inputs: Vec<Tensor> = sample.inputs.iter().map(|value| value.tensor().clone()).collect();
        let gradient = Sample::prim(Prim::LinearRecurrenceGradient { low_rank: inputs.len() == 8 });
        let (v, state) = (inputs[2].shape.clone(), inputs[4].shape.clone());
        let sample = inputs.into_iter().fold(gradient, Sample::input);
        sample.input(rng.normal(DType::F32, &v)).input(rng.normal(DType::F32, &state))
    };
    if dtype != DType::F32 {
        return Vec::new();
    }
    // Steps of many chunks that are taken in chunks: those without a part of low rank, and those with one whose keys decay alike.
    let in_chunks = |sample: &Sample| sample.inputs.len() == 6 || sample.inputs[3].tensor().shape[2] == 1;
    let chunks = of_many_chunks(&mut Rng::new(101)).into_iter().filter(in_chunks);
    short_and_long(&mut Rng::new(29)).into_iter().chain(chunks).map(with_cotangents).collect()
}
