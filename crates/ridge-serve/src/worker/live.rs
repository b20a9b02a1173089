//! Recent activity of the engine, for the page.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

/// A step. Times count from the server's start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepSeen {
    pub(crate) at: Duration,
    pub(crate) took: Duration,
    /// What its bytes and FLOPs take at least, where that was worked out.
    pub(crate) floor: Option<Duration>,
    pub(crate) sequences: usize,
    pub(crate) tokens: usize,
}

/// An answer that ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AnswerSeen {
    pub(crate) at: Duration,
    pub(crate) ttft: Duration,
    /// From token to token on average, if there was more than one.
    pub(crate) tpot: Option<Duration>,
    pub(crate) tokens: usize,
}

/// The last steps and answers.
#[derive(Default)]
pub(crate) struct Live(Mutex<Lately>);

#[derive(Default)]
struct Lately {
    steps: VecDeque<StepSeen>,
    answers: VecDeque<AnswerSeen>,
}

const STEPS: usize = 256;
const ANSWERS: usize = 256;

impl Live {
    fn with<T>(&self, act: impl FnOnce(&mut Lately) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn step(&self, step: StepSeen) {
        self.with(|lately| push(&mut lately.steps, step, STEPS));
    }

    pub(crate) fn answer(&self, answer: AnswerSeen) {
        self.with(|lately| push(&mut lately.answers, answer, ANSWERS));
    }

    /// `recent_steps` and `recent_answers`, oldest first.
    pub(crate) fn to_json(&self) -> (Value, Value) {
        let ms = |t: Duration| t.as_secs_f64() * 1e3;
        self.with(|lately| {
            let step = |s: &StepSeen| {
                json!({
                    "at_s": s.at.as_secs_f64(), "ms": ms(s.took), "floor_ms": s.floor.map(ms),
                    "sequences": s.sequences, "tokens": s.tokens,
                })
            };
            let answer = |a: &AnswerSeen| {
                json!({ "at_s": a.at.as_secs_f64(), "ttft_ms": ms(a.ttft), "tpot_ms": a.tpot.map(ms), "tokens": a.tokens })
            };
            (lately.steps.iter().map(step).collect(), lately.answers.iter().map(answer).collect())
        })
    }
}

fn push<T>(queue: &mut VecDeque<T>, item: T, most: usize) {
    if queue.len() == most {
        queue.pop_front();
    }
    queue.push_back(item);
}
