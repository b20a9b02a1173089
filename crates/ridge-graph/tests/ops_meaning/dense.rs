//! Ops on whole rows: linear, rope, softmax, swiglu, embedding, `rms_norm`.

use ridge_graph::ops::{LinearGroup, RmsNorm, Rope, linear_scaling, llama3_scaling, rope_frequencies};
use ridge_graph::sample::Sample;

use super::{holds, input, op, samples, shape};

/// `x w^T + b` by three loops.
fn linear(x: &[f64], w: &[f64], bias: &[f64], n: usize, k: usize, rows: usize) -> Vec<f64> {
    let mut y = vec![0.0; rows * n];
    for row in 0..rows {
        for out in 0..n {
            let products = (0..k).map(|i| x[row * k + i] * w[out * k + i]);
            y[row * n + out] = products.sum::<f64>() + bias.get(out).unwrap_or(&0.0);
        }
    }
    y
}

fn rows_of(sample: &Sample) -> usize {
    let x = shape(sample, 0);
    x[..x.len() - 1].iter().product()
}

#[test]
fn linear_multiplies_by_the_transposed_weight() {
    for sample in samples("linear") {
        let w = shape(&sample, 1);
        let bias = if sample.inputs.len() > 2 { input(&sample, 2) } else { Vec::new() };
        holds(&sample, &[linear(&input(&sample, 0), &input(&sample, 1), &bias, w[0], w[1], rows_of(&sample))]);
    }
}

#[test]
fn a_group_of_linears_is_its_members() {
    for sample in samples("linear_group") {
        let LinearGroup { count, biases } = *op(&sample);
        let one = |i: usize| {
            let w = shape(&sample, 1 + i);
            let bias = if biases { input(&sample, 1 + count + i) } else { Vec::new() };
            linear(&input(&sample, 0), &input(&sample, 1 + i), &bias, w[0], w[1], rows_of(&sample))
        };
        holds(&sample, &(0..count).map(one).collect::<Vec<_>>());
    }
}

#[test]
fn rope_rotates_each_pair_by_position_times_frequency() {
    for sample in samples("rope") {
        let rope: &Rope = op(&sample);
        let (mut x, positions) = (input(&sample, 0), input(&sample, 1));
        let (extents, half) = (shape(&sample, 0), rope.inv_freq.len());
        for (token, position) in positions.iter().enumerate() {
            for head in 0..extents[1] {
                let base = (token * extents[1] + head) * extents[2];
                for i in 0..half {
                    let (sin, cos) = (position * rope.inv_freq[i]).sin_cos();
                    let (a, b) = (x[base + i], x[base + i + half]);
                    x[base + i] = rope.scale * (a * cos - b * sin);
                    x[base + i + half] = rope.scale * (a * sin + b * cos);
                }
            }
        }
        holds(&sample, &[x]);
    }
}

#[test]
fn rope_frequencies_follow_the_published_rules() {
    let freqs = rope_frequencies(10_000.0, 8);
    for (got, expected) in freqs.iter().zip([1.0, 0.1, 0.01, 0.001]) {
        assert!((got - expected).abs() < 1e-15, "{got} is not {expected}");
    }
    assert_eq!(linear_scaling(&[1.0, 0.5], 4.0), [0.25, 0.125]);

    // Llama 3.1: theta 500000, factor 8, low 1, high 4, 8192 positions; the rule as it is published, by wavelength.
    let freqs = rope_frequencies(500_000.0, 128);
    let scaled = llama3_scaling(&freqs, 8.0, 1.0, 4.0, 8192.0);
    let mut regions = [0; 3];
    for (freq, got) in freqs.iter().zip(&scaled) {
        let wavelength = std::f64::consts::TAU / freq;
        let expected = if wavelength < 8192.0 / 4.0 {
            regions[0] += 1;
            *freq
        } else if wavelength > 8192.0 / 1.0 {
            regions[1] += 1;
            freq / 8.0
        } else {
            regions[2] += 1;
            let smooth = (8192.0 / wavelength - 1.0) / (4.0 - 1.0);
            (1.0 - smooth) * freq / 8.0 + smooth * freq
        };
        assert!((got - expected).abs() <= 1e-12 * expected, "{got} is not {expected}");
    }
    assert!(regions.iter().all(|n| *n > 0), "{regions:?}");
}

#[test]
fn ropes_that_differ_in_one_bit_of_one_frequency_are_different_ops() {
    let text = |freqs: &[f64]| format!("{:?}", Rope { inv_freq: freqs.into(), scale: 1.0 });
    let freqs = rope_frequencies(10_000.0, 8);
    let mut other = freqs.clone();
    other[1] = other[1].next_up();
    assert_eq!(text(&freqs), text(&freqs.clone()));
    assert_ne!(text(&freqs), text(&other));
}

#[test]
fn softmax_sums_to_one_and_keeps_ratios() {
    for sample in samples("softmax") {
        let x = input(&sample, 0);
        let n = *shape(&sample, 0).last().expect("an axis");
        let mut y = Vec::new();
        for row in x.chunks(n.max(1)) {
            let total: f64 = row.iter().map(|v| (v - row[0]).exp()).sum();
            y.extend(row.iter().map(|v| (v - row[0]).exp() / total));
        }
        holds(&sample, &[y]);
    }
}

#[test]
fn swiglu_gates_by_silu() {
    for sample in samples("swiglu") {
        let (gate, up) = (input(&sample, 0), input(&sample, 1));
        let y = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        holds(&sample, &[y]);
    }
}

#[test]
fn embedding_picks_rows_and_gives_zeros_beyond_the_table() {
    for sample in samples("embedding") {
        let (table, ids) = (input(&sample, 0), input(&sample, 1));
        let extents = shape(&sample, 0);
        let mut y = Vec::new();
        for id in ids {
            for column in 0..extents[1] {
                let known = id >= 0.0 && id < extents[0] as f64;
                y.push(if known { table[id as usize * extents[1] + column] } else { 0.0 });
            }
        }
        holds(&sample, &[y]);
    }
}

#[test]
fn rms_norm_divides_by_the_root_mean_square() {
    for sample in samples("rms_norm") {
        let RmsNorm { eps } = *op(&sample);
        let (x, weight) = (input(&sample, 0), input(&sample, 1));
        let n = weight.len();
        let mut y = Vec::new();
        for row in x.chunks(n) {
            let mean = row.iter().map(|v| v * v).sum::<f64>() / n as f64;
            y.extend(row.iter().zip(&weight).map(|(v, w)| v / (mean + eps).sqrt() * w));
        }
        holds(&sample, &[y]);
    }
}
