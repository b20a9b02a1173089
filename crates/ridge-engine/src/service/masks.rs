//! Expensive grammar masks, computed concurrently with steps.
//!
//! The mask of most grammars takes microseconds and is computed between two steps. A grammar whose last mask was expensive is passed
//! to an [`Executor`] of the service's owner, with the sampled token. Its sequence has no row in a step until the mask is ready;
//! other sequences continue.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use llguidance::CancellationHandle;

use super::grammar::{Advanced, Grammar};
use super::request::RequestId;

/// Runs a job on another thread, or drops it where there is none any more.
pub type Executor = Arc<dyn Fn(Box<dyn FnOnce() + Send>) + Send + Sync>;

/// How long a mask may take, once a thread works on it, before its request fails.
pub(super) const BUDGET: Duration = Duration::from_millis(1000);
/// How long a mask may wait for a thread.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// The grammar of an answer, if it has one.
pub(super) enum TaskGrammar {
    None,
    Here(Box<Grammar>),
    /// The executor has it.
    Away(AwayGrammar),
}

impl TaskGrammar {
    pub(super) fn is_away(&self) -> bool {
        matches!(self, Self::Away(_))
    }

    /// The executor gave `grammar` back.
    pub(super) fn come_back(&mut self, grammar: Box<Grammar>) {
        if let Self::Away(away) = self {
            away.cancel = None;
        }
        *self = Self::Here(grammar);
    }
}

/// A grammar that the executor has. Dropping this cancels the job.
pub(super) struct AwayGrammar {
    sent: Duration,
    /// Does a thread work on it, and since when as far as the owner's clock has shown?
    begun: Arc<AtomicBool>,
    began: Option<Duration>,
    /// `None` once it is back.
    cancel: Option<CancellationHandle>,
}

impl AwayGrammar {
    /// Why the answer cannot wait any longer, if it cannot.
    pub(super) fn is_late(&mut self, now: Duration) -> Option<String> {
        if self.began.is_none() && self.begun.load(Ordering::Relaxed) {
            self.began = Some(now);
        }
        match self.began {
            Some(began) if now.saturating_sub(began) > BUDGET => {
                Some(format!("computing the next mask took more than {BUDGET:?}; make the grammar less ambiguous"))
            }
            None if now.saturating_sub(self.sent) > PATIENCE => {
                Some(format!("other expensive grammars have occupied the mask threads for {PATIENCE:?}; retry later"))
            }
            _ => None,
        }
    }
}

impl Drop for AwayGrammar {
    fn drop(&mut self) {
        if let Some(cancel) = &self.cancel {
            cancel.cancel();
        }
    }
}

/// A job that is done.
pub(super) struct DoneMask {
    pub(super) id: RequestId,
    pub(super) choice: usize,
    pub(super) grammar: Box<Grammar>,
    pub(super) outcome: Result<Advanced, String>,
}

/// A grammar on another thread. However the job ends, the service is told.
struct MaskJob {
    of: (RequestId, usize),
    grammar: Option<Box<Grammar>>,
    back: Sender<DoneMask>,
}

impl MaskJob {
    fn run(&mut self, token: Option<u32>) {
        if let Some(grammar) = &mut self.grammar {
            let outcome = grammar.advance(token);
            self.done(outcome);
        }
    }

    fn done(&mut self, outcome: Result<Advanced, String>) {
        if let Some(grammar) = self.grammar.take() {
            let (id, choice) = self.of;
            // Nobody listens where the service is gone.
            let _ = self.back.send(DoneMask { id, choice, grammar, outcome });
        }
    }
}

impl Drop for MaskJob {
    fn drop(&mut self) {
        self.done(Err("the grammar library failed on it".to_owned()));
    }
}

/// The jobs of one service.
pub(super) struct Masks {
    executor: Option<Executor>,
    back: Sender<DoneMask>,
    done: Receiver<DoneMask>,
    /// Jobs whose outcome was not taken yet, those that nobody waits for included.
    pub(super) away: usize,
}

impl Masks {
    pub(super) fn new() -> Self {
        let (back, done) = channel();
        Self { executor: None, back, done, away: 0 }
    }

    /// Has costly masks computed by `executor`.
    pub(super) fn run_on(&mut self, executor: Executor) {
        self.executor = Some(executor);
    }

    /// Is the next mask of `grammar` to be computed beside the steps?
    pub(super) fn takes(&self, grammar: &Grammar) -> bool {
        self.executor.is_some() && grammar.is_costly()
    }

    /// Hands `grammar` of answer `choice` of request `id` over, to take `token` and compute the next mask.
    pub(super) fn send(
        &mut self,
        (id, choice): (RequestId, usize),
        grammar: Box<Grammar>,
        token: Option<u32>,
        now: Duration,
    ) -> TaskGrammar {
        let begun = Arc::new(AtomicBool::new(false));
        let away =
            AwayGrammar { sent: now, begun: Arc::clone(&begun), began: None, cancel: Some(grammar.cancellation()) };
        let mut job = MaskJob { of: (id, choice), grammar: Some(grammar), back: self.back.clone() };
        self.away += 1;
        let job = Box::new(move || {
            begun.store(true, Ordering::Relaxed);
            job.run(token);
        });
        if let Some(executor) = &self.executor {
            executor(job);
        }
        TaskGrammar::Away(away)
    }

    /// The next job that is done, if one is.
    pub(super) fn take(&mut self) -> Option<DoneMask> {
        let done = self.done.try_recv().ok()?;
        self.away -= 1;
        Some(done)
    }
}
