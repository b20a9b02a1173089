//! Loss and optimiser.

use ridge_graph::ops::AdamW;

use super::{holds, input, op, samples, shape};

fn logsumexp(row: &[f64]) -> f64 {
    row[0] + row.iter().map(|x| (x - row[0]).exp()).sum::<f64>().ln()
}

fn losses(logits: &[f64], targets: &[f64], vocab: usize) -> Vec<f64> {
    let loss = |(row, target): (&[f64], &f64)| {
        if *target < 0.0 { 0.0 } else { logsumexp(row) - row[*target as usize] }
    };
    logits.chunks(vocab).zip(targets).map(loss).collect()
}

#[test]
fn cross_entropy_is_the_negative_log_probability_and_ignores_negative_targets() {
    for sample in samples("cross_entropy") {
        let (logits, targets) = (input(&sample, 0), input(&sample, 1));
        holds(&sample, &[losses(&logits, &targets, shape(&sample, 0)[1])]);
    }
    for sample in samples("cross_entropy_saving") {
        let (logits, targets) = (input(&sample, 0), input(&sample, 1));
        let vocab = shape(&sample, 0)[1];
        let lse = logits.chunks(vocab).map(logsumexp).collect();
        holds(&sample, &[losses(&logits, &targets, vocab), lse]);
    }
}

#[test]
fn cross_entropy_backward_is_probability_less_target() {
    for sample in samples("cross_entropy_backward") {
        let [logits, targets, lse, dloss] = [0, 1, 2, 3].map(|i| input(&sample, i));
        let vocab = shape(&sample, 0)[1];
        let mut y = Vec::new();
        for (token, row) in logits.chunks(vocab).enumerate() {
            for (id, logit) in row.iter().enumerate() {
                let hit = if id as f64 == targets[token] { 1.0 } else { 0.0 };
                let known = if targets[token] < 0.0 { 0.0 } else { 1.0 };
                y.push(known * dloss[token] * ((logit - lse[token]).exp() - hit));
            }
        }
        holds(&sample, &[y]);
    }
}

#[test]
fn adamw_follows_the_paper() {
    for sample in samples("adamw") {
        let AdamW { beta1, beta2, eps, weight_decay } = *op(&sample);
        let [mut param, grad, mut m, mut v, lr, step] = [0, 1, 2, 3, 4, 5].map(|i| input(&sample, i));
        let (lr, step) = (lr[0], step[0] as i32);
        for i in 0..param.len() {
            param[i] *= 1.0 - lr * weight_decay;
            m[i] = beta1 * m[i] + (1.0 - beta1) * grad[i];
            v[i] = beta2 * v[i] + (1.0 - beta2) * grad[i] * grad[i];
            let (mean, variance) = (m[i] / (1.0 - beta1.powi(step)), v[i] / (1.0 - beta2.powi(step)));
            param[i] -= lr * mean / (variance.sqrt() + eps);
        }
        holds(&sample, &[param, m, v]);
    }
}
