//! The next token.

use ridge_graph::ops::SampleToken;
use ridge_graph::sample::{Check, Sample};
use ridge_graph::{DType, Precision, Tensor, uniform};

use super::{input, run, samples, shape};

/// What decides which tokens may come, and how likely they are.
#[derive(Clone, Copy, Debug)]
struct Keys {
    temperature: f64,
    top_k: i64,
    top_p: f64,
    min_p: f64,
    typical_p: f64,
}

const ALL: Keys = Keys { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, typical_p: 1.0 };

/// The tokens that may come, most likely first, with their weights: by the definition, one step after another.
fn kept(logits: &[f64], keys: &Keys) -> Vec<(usize, f64)> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].partial_cmp(&logits[*a]).expect("no NaN").then(a.cmp(b)));
    if keys.temperature <= 0.0 {
        return vec![(order[0], 1.0)];
    }
    let largest = logits[order[0]];
    let weigh = |id: usize| (id, ((logits[id] - largest) / keys.temperature).exp());
    let mut kept: Vec<(usize, f64)> = order.into_iter().map(weigh).collect();
    if keys.top_k > 0 {
        kept.truncate(keys.top_k as usize);
    }
    let total = |kept: &[(usize, f64)]| kept.iter().map(|(_, w)| w).sum::<f64>();
    if keys.top_p < 1.0 {
        let bound = keys.top_p * total(&kept);
        let mut count = 1;
        while count < kept.len() && total(&kept[..count]) < bound {
            count += 1;
        }
        kept.truncate(count);
    }
    let first = kept[0];
    kept.retain(|token| token.1 >= keys.min_p || *token == first);
    if keys.typical_p < 1.0 {
        let total = total(&kept);
        let surprise = |w: f64| -(w / total).ln();
        let entropy: f64 = kept.iter().filter(|(_, w)| *w > 0.0).map(|(_, w)| w / total * surprise(*w)).sum();
        let distance = |w: f64| (surprise(w) - entropy).abs();
        let mut ascending: Vec<f64> = kept.iter().map(|(_, w)| *w).collect();
        ascending.sort_by(|a, b| distance(*a).total_cmp(&distance(*b)));
        let mut sum = 0.0;
        let mut bound = f64::INFINITY;
        for w in ascending {
            sum += w / total;
            bound = distance(w);
            if sum >= keys.typical_p {
                break;
            }
        }
        kept.retain(|(_, w)| distance(*w) <= bound);
    }
    kept
}

/// The token that `u` gives.
fn token(logits: &[f64], keys: &Keys, u: f64) -> i64 {
    let valid = logits.iter().all(|x| *x < f64::INFINITY) && logits.iter().any(|x| x.is_finite());
    if !valid {
        return -1;
    }
    let kept = kept(logits, keys);
    let total: f64 = kept.iter().map(|(_, w)| w).sum();
    let mut sum = 0.0;
    for (id, weight) in kept {
        sum += weight;
        if sum > u * total {
            return id as i64;
        }
    }
    panic!("u of {u} is not below 1");
}

fn expected(sample: &Sample) -> Vec<i64> {
    let [logits, temperature, top_k, top_p, min_p, typical_p] = [0, 1, 2, 3, 4, 5].map(|i| input(sample, i));
    let [seeds, sequences, positions] = [6, 7, 8].map(|i| sample.inputs[i].tensor().ints());
    let of_row = |(row, logits): (usize, &[f64])| {
        let keys = Keys {
            temperature: temperature[row],
            top_k: top_k[row] as i64,
            top_p: top_p[row],
            min_p: min_p[row],
            typical_p: typical_p[row],
        };
        token(logits, &keys, uniform(seeds[row], SampleToken::STREAM, sequences[row], positions[row], 0).into())
    };
    logits.chunks(shape(sample, 0)[1]).enumerate().map(of_row).collect()
}

#[test]
fn tokens_are_those_of_the_definition() {
    for sample in samples("sample_token") {
        assert_eq!(run(&sample, Precision::Exact)[0].ints(), expected(&sample), "{:?}", sample.types());
    }
}

#[test]
fn the_check_of_samples_accepts_f32_sums_and_refuses_another_token() {
    let mut refused = 0;
    for sample in samples("sample_token") {
        let Check::Property(check) = sample.check else { continue };
        let outputs = run(&sample, Precision::Rounded);
        assert_eq!(check(&sample.inputs, &outputs), Ok(()));
        assert_eq!(check(&sample.inputs, &run(&sample, Precision::Exact)), Ok(()));
        let vocab = shape(&sample, 0)[1] as i64;
        if vocab > 1 && !outputs[0].is_empty() {
            let other = outputs[0].ints().iter().map(|t| (t + 1) % vocab).collect();
            let other = Tensor::int(DType::I32, &outputs[0].shape, other);
            assert!(check(&sample.inputs, &[other]).is_err());
            refused += 1;
        }
    }
    assert!(refused > 0);
}

/// How often each token comes of `probabilities`, drawn at many positions.
fn draw(probabilities: &[f64], keys: &Keys, count: usize) -> Vec<usize> {
    let logits: Vec<f64> = probabilities.iter().map(|p| p.ln()).collect();
    let floats = |x: f64| Tensor::float(DType::F32, &[count], vec![x; count]).rounded();
    let ints = |x: i64| Tensor::int(DType::I64, &[count], vec![x; count]);
    let sample = Sample::new(SampleToken)
        .input(Tensor::float(DType::F32, &[count, logits.len()], logits.repeat(count)).rounded())
        .input(floats(keys.temperature))
        .input(Tensor::int(DType::I32, &[count], vec![keys.top_k; count]))
        .input(floats(keys.top_p))
        .input(floats(keys.min_p))
        .input(floats(keys.typical_p))
        .input(ints(42))
        .input(ints(3))
        .input(Tensor::int(DType::I64, &[count], (0..count as i64).collect()));
    let mut counts = vec![0; logits.len()];
    for token in run(&sample, Precision::Rounded)[0].ints() {
        counts[*token as usize] += 1;
    }
    counts
}

/// Pearson's statistic for `counts` under `kept` tokens and weights.
fn chi_square(counts: &[usize], kept: &[(usize, f64)]) -> f64 {
    let (count, total) = (counts.iter().sum::<usize>() as f64, kept.iter().map(|(_, w)| w).sum::<f64>());
    kept.iter().map(|(id, w)| (counts[*id] as f64 - count * w / total).powi(2) / (count * w / total)).sum()
}

#[test]
fn tokens_are_drawn_as_often_as_they_are_probable() {
    // No two as likely, so that nothing hangs on rounding.
    let mut probabilities: Vec<f64> = (1..=20).map(|i| 1.0 / f64::from(i).powf(1.3)).collect();
    probabilities.rotate_left(7);
    for keys in [
        ALL,
        Keys { temperature: 0.6, ..ALL },
        Keys { temperature: 1.7, top_k: 9, ..ALL },
        Keys { top_p: 0.7, ..ALL },
        Keys { min_p: 0.11, ..ALL },
        Keys { typical_p: 0.5, ..ALL },
        Keys { temperature: 1.3, top_k: 15, top_p: 0.9, min_p: 0.05, typical_p: 0.8 },
    ] {
        let logits: Vec<f64> = probabilities.iter().map(|p| p.ln()).collect();
        let kept = kept(&logits, &keys);
        let counts = draw(&probabilities, &keys, 6000);
        let outside = (0..20).filter(|id| counts[*id] > 0 && !kept.iter().any(|(k, _)| k == id)).count();
        // Mean and deviation of the statistic; five deviations are beyond what chance does.
        let freedom = (kept.len() - 1) as f64;
        let statistic = chi_square(&counts, &kept);
        assert!(outside == 0 && kept.len() > 1, "{keys:?}: {counts:?}");
        assert!(statistic < freedom + 5.0 * (2.0 * freedom).sqrt(), "{keys:?}: {statistic} of {freedom} in {counts:?}");
        // The same counts do not fit a distribution that is a little different.
        let other: Vec<(usize, f64)> =
            kept.iter().enumerate().map(|(i, (id, w))| (*id, w * (1.0 + 0.3 * (i % 2) as f64))).collect();
        assert!(chi_square(&counts, &other) > freedom + 5.0 * (2.0 * freedom).sqrt(), "{keys:?}: {counts:?}");
    }
}

#[test]
fn limits_keep_whom_they_say() {
    let draw = |keys: Keys| draw(&[0.2, 0.5, 0.3], &keys, 200).iter().map(|n| *n > 0).collect::<Vec<_>>();
    assert_eq!(draw(ALL), [true, true, true]);
    assert_eq!(draw(Keys { top_k: 2, ..ALL }), [false, true, true]);
    // 0.5 is less than 0.6 of all, so the second token is kept; with both it is 0.8.
    assert_eq!(draw(Keys { top_p: 0.6, ..ALL }), [false, true, true]);
    assert_eq!(draw(Keys { top_p: 0.4, ..ALL }), [false, true, false]);
    assert_eq!(draw(Keys { top_p: 0.0, ..ALL }), [false, true, false]);
    assert_eq!(draw(Keys { top_k: 1, ..ALL }), [false, true, false]);
    // 0.3 is 0.6 of the largest.
    assert_eq!(draw(Keys { min_p: 0.59, ..ALL }), [false, true, true]);
    assert_eq!(draw(Keys { min_p: 0.61, ..ALL }), [false, true, false]);
    // The entropy is 1.03: 0.3, of surprise 1.20, is the most typical.
    assert_eq!(draw(Keys { typical_p: 0.2, ..ALL }), [false, false, true]);
    assert_eq!(draw(Keys { typical_p: 0.7, ..ALL }), [false, true, true]);
}
