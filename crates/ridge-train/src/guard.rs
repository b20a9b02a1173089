//! Whether a step's update is made: losses and gradients that are no numbers, and spikes of the loss, are refused.

use serde::{Deserialize, Serialize};

use crate::settings::TrainSettings;

/// The running mean and variance of the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LossStatistics {
    mean: f64,
    variance: f64,
    /// Losses so far.
    count: u64,
    /// Steps refused in a row.
    pub refused: u64,
}

/// Why an update is refused.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Refusal {
    /// The loss is no finite number.
    Loss(f64),
    /// The norm of the gradient is none.
    Gradient(f64),
    /// The loss is this many standard deviations above its mean.
    Spike(f64),
    /// The gradient left the range of f16 at this loss scale, which is halved.
    Overflow(f64),
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Loss(loss) => write!(f, "the loss is {loss}"),
            Self::Gradient(norm) => write!(f, "the norm of the gradient is {norm}"),
            Self::Spike(deviations) => write!(f, "the loss is {deviations:.1} standard deviations above its mean"),
            Self::Overflow(scale) => {
                write!(f, "the gradient left the range of f16; the loss scale of {scale} is halved")
            }
        }
    }
}

impl LossStatistics {
    /// Share of a new loss in the means.
    const RATE: f64 = 0.02;
    /// Losses before the first spike.
    const LEARNS: u64 = 50;

    /// Judges a step by its loss and the norm of its gradient, and remembers it.
    ///
    /// # Errors
    /// Why its update is not to be made.
    pub fn judge(&mut self, loss: f64, norm: f64, settings: &TrainSettings) -> Result<(), Refusal> {
        let refusal = self.refusal(loss, norm, settings);
        if let Some(refusal) = refusal {
            self.refused += 1;
            return Err(refusal);
        }
        self.refused = 0;
        // Plain means of the first losses, then exponential ones.
        let rate = Self::RATE.max(1.0 / (self.count + 1) as f64);
        let off = loss - self.mean;
        self.mean += rate * off;
        self.variance = (1.0 - rate) * (self.variance + rate * off * off);
        self.count += 1;
        Ok(())
    }

    fn refusal(&self, loss: f64, norm: f64, settings: &TrainSettings) -> Option<Refusal> {
        if !loss.is_finite() {
            return Some(Refusal::Loss(loss));
        }
        if !norm.is_finite() {
            return Some(Refusal::Gradient(norm));
        }
        let deviations = (loss - self.mean) / self.variance.sqrt().max(1e-3 * self.mean.abs()).max(f64::MIN_POSITIVE);
        let looks = settings.spike > 0.0 && self.count >= Self::LEARNS;
        (looks && deviations > settings.spike).then_some(Refusal::Spike(deviations))
    }
}

/// What the loss is multiplied by so that gradients in f16 are neither lost nor too large (Micikevicius et al. 2018, "Mixed
/// Precision Training", section 3.2): halved when they overflow, doubled after many steps without.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    /// The scale, a power of two.
    pub scale: f64,
    /// Steps since it changed.
    steps: u64,
}

impl Default for LossScale {
    fn default() -> Self {
        Self { scale: 65536.0, steps: 0 }
    }
}

impl LossScale {
    /// Steps without overflow after which it is doubled.
    const PATIENCE: u64 = 2000;
    /// Above this gradients that overflow are rare, and sums of their squares may leave f32.
    const LARGEST: f64 = 16_777_216.0;

    /// Halves it, and gives why the step is refused; `None` if it cannot be lower, so that the scale is not to blame.
    pub fn overflowed(&mut self) -> Option<Refusal> {
        let refusal = (self.scale > 1.0).then_some(Refusal::Overflow(self.scale));
        *self = Self { scale: (self.scale / 2.0).max(1.0), steps: 0 };
        refusal
    }

    /// Counts a step whose gradient was finite.
    pub fn held(&mut self) {
        self.steps += 1;
        if self.steps >= Self::PATIENCE {
            *self = Self { scale: (self.scale * 2.0).min(Self::LARGEST), steps: 0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_number_is_refused_and_so_is_a_spike() {
        let settings = TrainSettings { spike: 6.0, ..TrainSettings::default() };
        let mut losses = LossStatistics::default();
        assert_eq!(losses.judge(4.0, 1.0, &settings), Ok(()), "there is no mean yet");
        for step in 0..200 {
            let noise = f64::from(step % 7) * 0.01;
            assert_eq!(losses.judge(3.0 - f64::from(step) * 1e-3 + noise, 1.0, &settings), Ok(()), "{step}");
        }
        assert!(matches!(losses.judge(f64::NAN, 1.0, &settings), Err(Refusal::Loss(_))));
        assert!(matches!(losses.judge(3.0, f64::INFINITY, &settings), Err(Refusal::Gradient(_))));
        assert!(matches!(losses.judge(9.0, 1.0, &settings), Err(Refusal::Spike(_))), "{losses:?}");
        assert_eq!(losses.refused, 3);
        let blind = TrainSettings { spike: 0.0, ..settings };
        assert_eq!(losses.judge(9.0, 1.0, &blind), Ok(()));
        assert_eq!(losses.refused, 0);
    }

    #[test]
    fn the_loss_scale_halves_on_overflow_and_doubles_after_many_steps() {
        let mut scale = LossScale::default();
        assert_eq!(scale.overflowed(), Some(Refusal::Overflow(65536.0)));
        (0..LossScale::PATIENCE - 1).for_each(|_| scale.held());
        assert_eq!(scale.scale, 32768.0);
        scale.held();
        assert_eq!(scale.scale, 65536.0);
        for _ in 0..16 {
            assert!(scale.overflowed().is_some());
        }
        assert_eq!((scale.scale, scale.overflowed()), (1.0, None));
    }
}
