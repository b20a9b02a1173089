//! Frequencies for [`Rope`](super::Rope), and the published ways to stretch them for contexts longer than those of
//! pretraining.

use std::f64::consts::TAU;

/// `theta^(-2i / rotary_dim)` for each pair `i`.
pub fn rope_frequencies(theta: f64, rotary_dim: usize) -> Vec<f64> {
    (0..rotary_dim / 2).map(|i| theta.powf(-2.0 * i as f64 / rotary_dim as f64)).collect()
}

/// Position interpolation (Chen et al. 2023, "Extending Context Window of Large Language Models via Positional
/// Interpolation"): every frequency divided by `factor`.
pub fn linear_scaling(freqs: &[f64], factor: f64) -> Vec<f64> {
    freqs.iter().map(|freq| freq / factor).collect()
}

/// Llama 3.1's context extension: frequencies whose wavelength is longer than `original_max_position /
/// low_freq_factor` are divided by `factor`, those shorter than `original_max_position / high_freq_factor` are kept,
/// and between them the two are interpolated linearly in the number of turns over the original context.
pub fn llama3_scaling(
    freqs: &[f64],
    factor: f64,
    low_freq_factor: f64,
    high_freq_factor: f64,
    original_max_position: f64,
) -> Vec<f64> {
    let scale = |freq: &f64| {
        let turns = original_max_position * freq / TAU;
        let keep = match high_freq_factor > low_freq_factor {
            true => ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0),
            false => f64::from(turns > low_freq_factor),
        };
        freq / factor * (1.0 - keep) + freq * keep
    };
    freqs.iter().map(scale).collect()
}

/// The base that NTK-aware scaling takes in place of `theta` for a context of `context` positions, of which the model
/// was trained on `original`: the longest wavelength grows by `factor * context / original - (factor - 1)`, the
/// shortest stays (bloc97 2023, "NTK-Aware Scaled RoPE"; emozilla 2023, "Dynamically Scaled RoPE"). `theta` itself up
/// to the original context.
pub fn ntk_theta(theta: f64, rotary_dim: usize, factor: f64, context: f64, original: f64) -> f64 {
    let growth = factor * context.max(original) / original - (factor - 1.0);
    // With one pair there is no longest wavelength beside the shortest.
    if rotary_dim > 2 { theta * growth.powf(rotary_dim as f64 / (rotary_dim as f64 - 2.0)) } else { theta }
}

/// How YaRN stretches frequencies (Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language
/// Models", section 3.2).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// By which slow frequencies are divided.
    pub factor: f64,
    /// Positions of the context in pretraining.
    pub original_max_position: f64,
    /// Pairs that turn at least so often over the original context keep their frequency.
    pub beta_fast: f64,
    /// Pairs that turn at most so often are divided by `factor`.
    pub beta_slow: f64,
    /// Are the borders between the two rounded outwards to whole pairs?
    pub truncate: bool,
}

/// Frequencies of base `theta` stretched by `yarn`: kept, divided by its factor, and in between interpolated linearly
/// in the index of the pair.
pub fn yarn_scaling(theta: f64, rotary_dim: usize, yarn: &Yarn) -> Vec<f64> {
    let dim = rotary_dim as f64;
    // The pair, as a real number, that turns so often over the original context.
    let pair = |turns: f64| dim * (yarn.original_max_position / (turns * TAU)).ln() / (2.0 * theta.ln());
    let (mut first, mut last) = (pair(yarn.beta_fast), pair(yarn.beta_slow));
    if yarn.truncate {
        (first, last) = (first.floor(), last.ceil());
    }
    let first = first.max(0.0);
    let mut last = last.min(dim - 1.0);
    if first == last {
        last += 0.001; // as the published code does, so that there is something to divide by
    }
    let scale = |(i, freq): (usize, f64)| {
        let divided = ((i as f64 - first) / (last - first)).clamp(0.0, 1.0);
        freq / yarn.factor * divided + freq * (1.0 - divided)
    };
    rope_frequencies(theta, rotary_dim).into_iter().enumerate().map(scale).collect()
}
