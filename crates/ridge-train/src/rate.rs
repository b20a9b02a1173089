//! The learning rate of each step.

use crate::settings::{OptimizerSettings, ScheduleName};

/// The learning rate of step `step` of `steps`, counted from 0.
pub fn learning_rate(settings: &OptimizerSettings, step: u64, steps: u64) -> f64 {
    let OptimizerSettings { learning_rate: peak, final_learning_rate: last, warmup, .. } = *settings;
    if step < warmup {
        return peak * (step + 1) as f64 / (warmup + 1) as f64;
    }
    // From 0 at the end of the warm-up to 1 at the last step.
    let progress = |from: u64| {
        let whole = steps.saturating_sub(from).max(1);
        (step.saturating_sub(from) as f64 / whole as f64).min(1.0)
    };
    match settings.schedule {
        ScheduleName::Constant => peak,
        ScheduleName::Linear => peak + (last - peak) * progress(warmup),
        ScheduleName::Cosine => {
            let share = 0.5 * (1.0 + (std::f64::consts::PI * progress(warmup)).cos());
            last + (peak - last) * share
        }
        ScheduleName::Wsd => {
            let decay = if settings.decay == 0 { steps / 5 } else { settings.decay };
            peak + (last - peak) * progress(steps.saturating_sub(decay).max(warmup))
        }
        ScheduleName::InverseSqrt => {
            let from = warmup.max(1) as f64;
            (peak * (from / (step.max(1) as f64).max(from)).sqrt()).max(last)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(schedule: ScheduleName) -> OptimizerSettings {
        OptimizerSettings {
            schedule,
            learning_rate: 1.0,
            final_learning_rate: 0.1,
            warmup: 10,
            decay: 20,
            ..OptimizerSettings::default()
        }
    }

    #[test]
    fn schedules_rise_over_the_warmup_and_end_as_they_are_named() {
        for (schedule, middle, end) in [
            (ScheduleName::Constant, 1.0, 1.0),
            (ScheduleName::Linear, 0.55, 0.1),
            (ScheduleName::Cosine, 0.55, 0.1),
            (ScheduleName::Wsd, 1.0, 0.1),
            (ScheduleName::InverseSqrt, (10.0_f64 / 55.0).sqrt(), (10.0_f64 / 100.0).sqrt()),
        ] {
            let settings = settings(schedule);
            let at = |step| learning_rate(&settings, step, 100);
            assert!((at(0) - 1.0 / 11.0).abs() < 1e-12 && (at(9) - 10.0 / 11.0).abs() < 1e-12, "{schedule:?}");
            assert!((at(10) - 1.0).abs() < 1e-12, "{schedule:?}: {}", at(10));
            assert!((at(55) - middle).abs() < 1e-12, "{schedule:?}: {}", at(55));
            assert!((at(100) - end).abs() < 1e-12, "{schedule:?}: {}", at(100));
        }
    }

    #[test]
    fn the_cosine_is_that_of_nanogpt() {
        let settings = OptimizerSettings {
            learning_rate: 1e-3,
            final_learning_rate: 1e-4,
            warmup: 100,
            ..OptimizerSettings::default()
        };
        // get_lr of its train.py at steps 0, 99, 1050, 1999 of 2000.
        let wanted = [9.900990099009902e-06, 0.0009900990099009901, 0.00055, 0.00010000061514140841];
        for (step, wanted) in [0, 99, 1050, 1999].into_iter().zip(wanted) {
            assert!((learning_rate(&settings, step, 2000) / wanted - 1.0).abs() < 1e-9, "{step}");
        }
    }
}
