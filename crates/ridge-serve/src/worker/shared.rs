//! What the engine's thread and the requests share.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use ridge_engine::service::{Service, Stats};

use super::activity::Activity;
use super::live::Live;
use crate::metrics::Metrics;

/// What the thread and the requests share.
pub(crate) struct SharedEngineState {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) live: Live,
    pub(super) stats: Mutex<Stats>,
    pub(super) activity: Activity,
    pub(super) next: AtomicU64,
    pub(super) dead: AtomicBool,
    pub(super) started: Instant,
}

impl SharedEngineState {
    pub(super) fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            metrics,
            live: Live::default(),
            stats: Mutex::default(),
            activity: Activity::new(),
            next: AtomicU64::new(0),
            dead: AtomicBool::new(false),
            started: Instant::now(),
        }
    }

    /// A step has ended, or there is nothing to do.
    pub(super) fn progressed(&self) {
        self.activity.progressed(self.started.elapsed());
    }

    pub(super) fn publish(&self, service: &Service) {
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = service.stats();
    }
}
