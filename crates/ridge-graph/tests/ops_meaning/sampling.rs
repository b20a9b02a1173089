//! The next token.

use ridge_graph::ops::SampleToken;
use ridge_graph::sample::{Check, Sample};
use ridge_graph::{DType, Precision, Tensor, uniform};

use super::{input, run, samples, shape};

/// The token by the definition, one step after another.
fn token(logits: &[f64], temperature: f64, top_k: i64, top_p: f64, u: f64) -> usize {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].partial_cmp(&logits[*a]).expect("no NaN").then(a.cmp(b)));
    if temperature <= 0.0 {
        return order[0];
    }
    if top_k > 0 {
        order.truncate(top_k as usize);
    }
    let largest = logits[order[0]];
    let mut weights: Vec<f64> = order.iter().map(|id| ((logits[*id] - largest) / temperature).exp()).collect();
    if top_p < 1.0 {
        let total: f64 = weights.iter().sum();
        let mut kept = 1;
        let mut before = weights[0];
        while kept < weights.len() && before < top_p * total {
            before += weights[kept];
            kept += 1;
        }
        weights.truncate(kept);
    }
    let total: f64 = weights.iter().sum();
    let mut sum = 0.0;
    for (rank, weight) in weights.iter().enumerate() {
        sum += weight;
        if sum > u * total {
            return order[rank];
        }
    }
    panic!("u of {u} is not below 1");
}

fn expected(sample: &Sample) -> Vec<i64> {
    let [logits, temperature, top_k, top_p, seed, sequence, position] = [0, 1, 2, 3, 4, 5, 6].map(|i| input(sample, i));
    let vocab = shape(sample, 0)[1];
    let seeds = sample.inputs[4].tensor().ints();
    assert_eq!(seeds.len(), seed.len());
    logits
        .chunks(vocab)
        .enumerate()
        .map(|(row, logits)| {
            let u = uniform(seeds[row], SampleToken::STREAM, sequence[row] as i64, position[row] as i64, 0);
            token(logits, temperature[row], top_k[row] as i64, top_p[row], u.into()) as i64
        })
        .collect()
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

/// One row of three tokens whose probabilities are known, drawn at many positions.
fn draw(top_k: i64, top_p: f64, count: usize) -> [usize; 3] {
    let probabilities = [0.2f64, 0.5, 0.3];
    let logits = (0..count).flat_map(|_| probabilities.map(f64::ln)).collect();
    let floats = |x: f64| Tensor::float(DType::F32, &[count], vec![x; count]).rounded();
    let ints = |x: i64| Tensor::int(DType::I64, &[count], vec![x; count]);
    let sample = Sample::new(SampleToken)
        .input(Tensor::float(DType::F32, &[count, 3], logits).rounded())
        .input(floats(1.0))
        .input(Tensor::int(DType::I32, &[count], vec![top_k; count]))
        .input(floats(top_p))
        .input(ints(42))
        .input(ints(3))
        .input(Tensor::int(DType::I64, &[count], (0..count as i64).collect()));
    let mut counts = [0; 3];
    for token in run(&sample, Precision::Rounded)[0].ints() {
        counts[*token as usize] += 1;
    }
    counts
}

#[test]
fn tokens_are_drawn_as_often_as_they_are_probable() {
    let near = |count: usize, probability: f64| (count as f64 / 4000.0 - probability).abs() < 0.03;
    let all = draw(0, 1.0, 4000);
    assert!(near(all[0], 0.2) && near(all[1], 0.5) && near(all[2], 0.3), "{all:?}");
    let two = draw(2, 1.0, 4000);
    assert!(two[0] == 0 && near(two[1], 0.625) && near(two[2], 0.375), "{two:?}");
    // 0.5 is less than 0.6 of all, so the second token is kept; with both it is 0.8.
    assert_eq!(draw(0, 0.6, 4000), two);
    assert_eq!(draw(0, 0.4, 4000), [0, 4000, 0]);
    assert_eq!(draw(0, 0.0, 4000), [0, 4000, 0]);
    assert_eq!(draw(1, 1.0, 4000), [0, 4000, 0]);
}
