//! Ops on whole rows: linear, rope and its frequencies, softmax, swiglu, gelu, embedding, norms.

use ridge_graph::format::{self, CodeType, ScaleLayout, ScaledFormat};
use ridge_graph::ops::{
    ClampedSwiglu, Embedding, Gelu, LayerNorm, LinearGroup, Quantize, RmsNorm, Rope, Yarn, linear_scaling,
    llama3_scaling, ntk_theta, rope_frequencies, yarn_scaling,
};
use ridge_graph::sample::Sample;
use ridge_graph::{Builder, Composite as _, DType, Op, Prim, Type};

use super::{holds, input, op, samples, shape};

/// `x`, matrices of `rows` rows of `k`, as multiples of a share of the largest magnitude of each unit.
fn quantised(format: ScaledFormat, x: &[f64], k: usize, rows: usize) -> Vec<f64> {
    let mut x = x.to_vec();
    let units: Vec<&mut [f64]> = match format.scales {
        ScaleLayout::Tensor => vec![&mut x],
        ScaleLayout::Row => x.chunks_mut(k.max(1)).collect(),
        ScaleLayout::Group(size) => x.chunks_mut(k.max(1)).flat_map(|row| row.chunks_mut(size)).collect(),
        ScaleLayout::Block => return in_blocks(format, &x, k, rows),
    };
    for unit in units {
        let largest = unit.iter().fold(0f64, |m, v| m.max(v.abs()));
        let most = f64::from(format.codes.largest());
        let rounded = |v: f64| match format.codes {
            CodeType::Int8 => (v * 127.0 / largest + 0.5).floor() * (largest / 127.0),
            codes => codes.dtype().round((v / (largest / most)).clamp(-most, most)) * (largest / most),
        };
        unit.iter_mut().filter(|_| largest > 0.0).for_each(|v| *v = rounded(*v));
    }
    x
}

/// The same of matrices of `rows`, each block of 128 by 128 taken by itself.
fn in_blocks(format: ScaledFormat, x: &[f64], k: usize, rows: usize) -> Vec<f64> {
    let mut result = x.to_vec();
    let whole = ScaledFormat { scales: ScaleLayout::Tensor, ..format };
    for first in (0..x.len().checked_div(k).unwrap_or(0)).step_by(rows.max(1)) {
        for (top, left) in (0..rows).step_by(128).flat_map(|top| (0..k).step_by(128).map(move |left| (top, left))) {
            let places: Vec<usize> = (top..(top + 128).min(rows))
                .flat_map(|row| (left..(left + 128).min(k)).map(move |column| (first + row) * k + column))
                .collect();
            let unit: Vec<f64> = places.iter().map(|at| x[*at]).collect();
            for (at, v) in places.iter().zip(quantised(whole, &unit, unit.len(), 1)) {
                result[*at] = v;
            }
        }
    }
    result
}

#[test]
fn quantising_rounds_to_multiples_of_a_share_of_the_largest_magnitude() {
    for sample in samples("quantize") {
        let x = input(&sample, 0);
        if x.iter().all(|v| v.is_finite()) {
            let shape = shape(&sample, 0);
            let k = shape.last().copied().unwrap_or(1);
            let rows = shape.iter().rev().nth(1).copied().unwrap_or(1);
            holds(&sample, &[quantised(op::<Quantize>(&sample).format, &x, k, rows)]);
        }
    }
}

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
        let x = input(&sample, 0);
        holds(&sample, &[linear(&x, &input(&sample, 1), &bias, w[0], w[1], rows_of(&sample))]);
    }
}

#[test]
fn a_group_of_linears_is_its_members() {
    for sample in samples("linear_group") {
        let LinearGroup { count, biases } = *op(&sample);
        let one = |i: usize| {
            let w = shape(&sample, 1 + i);
            let bias = if biases { input(&sample, 1 + count + i) } else { Vec::new() };
            let x = input(&sample, 0);
            linear(&x, &input(&sample, 1 + i), &bias, w[0], w[1], rows_of(&sample))
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
fn clamped_swiglu_keeps_both_sides_within_the_limit() {
    for sample in samples("clamped_swiglu") {
        let ClampedSwiglu { alpha, limit } = *op::<ClampedSwiglu>(&sample);
        let through = |(g, u): (&f64, f64)| {
            let g = g.min(limit);
            g / (1.0 + (-alpha * g).exp()) * (1.0 + u.clamp(-limit, limit))
        };
        let y = input(&sample, 0).iter().zip(input(&sample, 1)).map(through).collect();
        holds(&sample, &[y]);
    }
}

#[test]
fn grouped_bias_adds_to_each_row_what_its_group_has() {
    for sample in samples("grouped_bias") {
        let (mut y, bias, offsets) = (input(&sample, 0), input(&sample, 1), input(&sample, 2));
        let columns = shape(&sample, 0)[1];
        for (group, rows) in offsets.windows(2).enumerate() {
            for row in rows[0] as usize..rows[1] as usize {
                (0..columns).for_each(|column| y[row * columns + column] += bias[group * columns + column]);
            }
        }
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
fn embedding_decodes_the_rows_of_a_stored_table_that_it_picks() {
    for format in format::all() {
        let [block] = format.granularity(1)[..] else { unreachable!("one axis") };
        let mut g = Builder::new();
        let ty = Type::tensor(DType::BF16, [1000, 2 * block]).stored_as(format.clone());
        let table = g.weight("table", ty).unwrap();
        let ids = g.step_input("ids", Type::tensor(DType::I32, [3])).unwrap();
        let rows = Embedding { dtype: DType::F32 }.decompose(&mut g, &[table, ids]).unwrap()[0];
        let graph = g.finish(vec![("rows".into(), rows)]).unwrap();
        let body =
            graph.main().nodes.iter().filter(|node| !matches!(node.op, Op::Arg(_) | Op::Prim(Prim::Component(_))));
        for node in body {
            let has_all = node.outputs.iter().any(|ty| ty.shape.0.contains(&1000.into()));
            assert!(!has_all, "{}: {} gives {:?}", format.name(), node.op_name(), node.outputs);
        }
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

#[test]
fn layer_norm_centres_and_divides_by_the_deviation() {
    for sample in samples("layer_norm") {
        let LayerNorm { eps } = *op(&sample);
        let [x, weight, bias] = [0, 1, 2].map(|i| input(&sample, i));
        let n = weight.len();
        let mut y = Vec::new();
        for row in x.chunks(n) {
            let mean = row.iter().sum::<f64>() / n as f64;
            let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n as f64;
            let scale = 1.0 / (variance + eps).sqrt();
            y.extend(row.iter().zip(&weight).zip(&bias).map(|((v, w), b)| (v - mean) * scale * w + b));
        }
        holds(&sample, &[y]);
    }
}

/// The error function by its Maclaurin series, which converges well where the samples are.
fn erf(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..120 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * std::f64::consts::FRAC_2_SQRT_PI
}

#[test]
fn gelu_weighs_by_the_normal_distribution() {
    let tanh = |x: f64| (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
    for sample in samples("gelu") {
        let share = |x: f64| match op(&sample) {
            Gelu::Erf => erf(x / 2f64.sqrt()),
            Gelu::Tanh => 1.0 - 2.0 / ((2.0 * tanh(x)).exp() + 1.0),
        };
        let y = input(&sample, 0).into_iter().map(|x| 0.5 * x * (1.0 + share(x))).collect();
        holds(&sample, &[y]);
    }
}

/// YaRN's rule as the paper has it: by the turns of a pair over the original context, rounded to whole pairs.
#[test]
fn yarn_keeps_quick_pairs_and_slows_the_others_by_its_factor() {
    let yarn = Yarn { factor: 4.0, original_max_position: 4096.0, beta_fast: 32.0, beta_slow: 1.0, truncate: true };
    let plain = rope_frequencies(10_000.0, 128);
    let scaled = yarn_scaling(10_000.0, 128, &yarn);
    for (i, (freq, got)) in plain.iter().zip(&scaled).enumerate() {
        let turns = 4096.0 * freq / std::f64::consts::TAU;
        // Rounding outwards moves each border by at most one pair, of which one turns 15 % less than the next.
        if turns > 32.0 * 1.16 {
            assert_eq!(got, freq, "pair {i}");
        } else if turns < 1.0 / 1.16 {
            assert_eq!(*got, freq / 4.0, "pair {i}");
        } else {
            assert!((freq / 4.0..=*freq).contains(got), "pair {i}");
        }
    }
    let kept = scaled.iter().zip(&plain).filter(|(a, b)| a == b).count();
    // floor(128 ln(4096 / 64 pi) / 2 ln 10000) = 20, and ceil(128 ln(4096 / 2 pi) / 2 ln 10000) = 46.
    assert_eq!(kept, 21);
    assert_eq!(scaled.iter().zip(&plain).filter(|(a, b)| **a == **b / 4.0).count(), 64 - 46);
    assert!((scaled[33] / plain[33] - 0.625).abs() < 1e-12, "the middle of 20 and 46 is halfway from 1 to 1/4");
}

#[test]
fn ntk_scaling_keeps_the_quickest_pair_and_stretches_the_slowest_by_the_growth() {
    assert_eq!(ntk_theta(1e4, 64, 4.0, 100.0, 2048.0), 1e4, "within the original context nothing changes");
    let theta = ntk_theta(1e4, 64, 4.0, 4096.0, 2048.0);
    let (plain, scaled) = (rope_frequencies(1e4, 64), rope_frequencies(theta, 64));
    assert_eq!(scaled[0], 1.0);
    let growth = 4.0 * 4096.0 / 2048.0 - 3.0;
    assert!((plain[31] / scaled[31] / growth - 1.0).abs() < 1e-12, "{} is not {growth}", plain[31] / scaled[31]);
}
