//! What a whole run takes: days, money, the sizes that a budget of compute is best spent on, and what failures cost.

use serde::Serialize;

/// A run to a number of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TrainingRun {
    /// Days of training, without failures.
    pub days: f64,
    /// Days with failures, restarts and checkpoints.
    pub days_with_failures: f64,
    /// GPU hours with failures.
    pub gpu_hours: f64,
    /// Dollars with failures.
    pub dollars: f64,
}

impl TrainingRun {
    /// A run of `tokens` at `tokens_per_second` on `gpus` at `price` dollars a GPU hour, of whose time `overhead` more is
    /// lost.
    pub fn new(tokens: f64, tokens_per_second: f64, gpus: usize, price: f64, overhead: f64) -> Self {
        let days = tokens / tokens_per_second / 86_400.0;
        let with = days * (1.0 + overhead);
        let gpu_hours = with * 24.0 * gpus as f64;
        Self { days, days_with_failures: with, gpu_hours, dollars: gpu_hours * price }
    }
}

/// Checkpoints of a job that fails now and then.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Checkpointing {
    /// Hours between failures of the whole job.
    pub mtbf_hours: f64,
    /// Seconds between checkpoints that lose least.
    pub interval_seconds: f64,
    /// What checkpoints, lost work and restarts add to the time, as a share of it; infinite where a restart and the work
    /// to the next checkpoint take longer than the time between failures, so that no step is kept.
    pub overhead: f64,
}

/// The best interval by Daly's first two terms (Young 1974; Daly 2006, "A higher order estimate of the optimum
/// checkpoint interval", equation 20), for `gpus` that fail once in `gpu_mtbf_hours` each, checkpoints that stop training
/// for `write_seconds`, and restarts of `restart_seconds`.
pub fn checkpointing(gpus: usize, gpu_mtbf_hours: f64, write_seconds: f64, restart_seconds: f64) -> Checkpointing {
    let mtbf_hours = gpu_mtbf_hours / gpus.max(1) as f64;
    let mtbf = mtbf_hours * 3600.0;
    let ratio = write_seconds / (2.0 * mtbf);
    let young = (2.0 * write_seconds * mtbf).sqrt();
    let interval = if ratio < 1.0 { young * (1.0 + ratio.sqrt() / 3.0 + ratio / 9.0) - write_seconds } else { mtbf };
    let interval = interval.max(write_seconds.max(1e-9));
    // Half an interval and a checkpoint are lost at a failure.
    let overhead = match restart_seconds + interval < mtbf {
        true => write_seconds / interval + (0.5 * (interval + write_seconds) + restart_seconds) / mtbf,
        false => f64::INFINITY,
    };
    Checkpointing { mtbf_hours, interval_seconds: interval, overhead }
}

/// Parameters and tokens that `flops` are best spent on: `6 N D = flops`, 20 tokens a parameter (Hoffmann et al. 2022,
/// "Training Compute-Optimal Large Language Models", section 3 and table 3).
pub fn chinchilla(flops: f64) -> (f64, f64) {
    let parameters = (flops / 120.0).sqrt();
    (parameters, 20.0 * parameters)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budget_of_chinchilla_gives_chinchilla() {
        // 70B parameters and 1.4T tokens took 5.88e23 FLOPs.
        let (parameters, tokens) = chinchilla(5.88e23);
        assert!((parameters / 70e9 - 1.0).abs() < 0.01 && (tokens / 1.4e12 - 1.0).abs() < 0.01);
    }

    #[test]
    fn the_best_interval_loses_least() {
        let loss = |interval: f64, write: f64, mtbf: f64| write / interval + 0.5 * (interval + write) / mtbf;
        let best = checkpointing(16_384, 50_000.0, 60.0, 0.0);
        // Llama 3 reports a failure in 3 hours on 16,384 GPUs, which is this rate.
        assert!((best.mtbf_hours - 3.05).abs() < 0.01);
        let at = loss(best.interval_seconds, 60.0, best.mtbf_hours * 3600.0);
        for other in [0.8, 1.25] {
            assert!(loss(best.interval_seconds * other, 60.0, best.mtbf_hours * 3600.0) > at);
        }
    }

    #[test]
    fn what_fails_before_a_checkpoint_never_ends() {
        // A failure every 3.6 s, long before the 30 s of a checkpoint.
        assert!(checkpointing(1000, 1.0, 30.0, 300.0).overhead.is_infinite());
        // One in 3600 s leaves time for a restart and the 446 s between checkpoints.
        assert!(checkpointing(1000, 1000.0, 30.0, 300.0).overhead < 0.3);
    }

    #[test]
    fn days_and_dollars_follow_from_the_rate() {
        let run = TrainingRun::new(86_400.0 * 1e6 * 10.0, 1e6, 100, 2.0, 0.1);
        assert!((run.days - 10.0).abs() < 1e-9 && (run.gpu_hours - 26_400.0).abs() < 1e-6);
        assert!((run.dollars - 52_800.0).abs() < 1e-6);
    }
}
