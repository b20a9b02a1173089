//! The numbers of an event, under the names that every log but the JSON lines has them by.

use super::event::TrainEvent;

/// The step that an event is of, and its numbers by name; `None` of events without any.
pub(super) fn numbers(event: &TrainEvent) -> Option<(u64, Vec<(String, f64)>)> {
    let named = |names: &[(&str, f64)]| names.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
    match event {
        TrainEvent::Step(report) => Some((
            report.step,
            named(&[
                ("train/loss", report.loss),
                ("train/gradient_norm", report.gradient_norm),
                ("train/learning_rate", report.learning_rate),
                ("train/tokens_per_second", report.tokens_per_second),
            ]),
        )),
        TrainEvent::Experts { step, layers } => {
            let of = layers.iter().flat_map(|layer| {
                let numbers = [
                    ("entropy", layer.entropy),
                    ("max_load", layer.max_load),
                    ("dead", layer.dead as f64),
                    ("dropped", layer.dropped),
                ];
                numbers.map(|(what, value)| (format!("experts/{}/{what}", layer.layer), value))
            });
            Some((*step, of.collect()))
        }
        TrainEvent::Validation { step, loss, .. } => Some((*step, named(&[("validation/loss", *loss)]))),
        _ => None,
    }
}
