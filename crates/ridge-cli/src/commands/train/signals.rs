//! What signals do to a run.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::{flag, low_level};

use crate::error::{Error, Result};
use crate::output::note;

/// The flags by which signals stop a run.
pub(super) struct Signals {
    /// Set by SIGTERM, SIGUSR1 and Ctrl-C.
    pub(super) stop: Arc<AtomicBool>,
    /// Whether no step has begun, so that nothing of the run is on disk.
    starting: Arc<AtomicBool>,
    /// Whether it was said that the run ended before its first step.
    said: Arc<AtomicBool>,
}

/// What a start that a signal stops has until the process ends: it looks at the flag more often than that, but for
/// calls such as compilations, requests to servers, and the tokenisation of one text.
const GRACE: Duration = Duration::from_millis(500);
const POLL: Duration = Duration::from_millis(50);

impl Signals {
    /// Installs the handlers. A second Ctrl-C ends the process at once with exit code 130, as kill -9 would: checkpoints get their names
    /// when they are complete, so one that is being written is left out.
    pub(super) fn register() -> Result<Self> {
        let [stop, interrupted, said, starting] = [false, false, false, true].map(|set| Arc::new(AtomicBool::new(set)));
        // In this order, so that the first Ctrl-C does not end it.
        flag::register_conditional_shutdown(SIGINT, 130, Arc::clone(&interrupted)).map_err(Error::Signal)?;
        flag::register(SIGINT, interrupted).map_err(Error::Signal)?;
        for signal in [SIGTERM, SIGUSR1, SIGINT] {
            flag::register(signal, Arc::clone(&stop)).map_err(Error::Signal)?;
        }
        let signals = Self { stop, starting, said };
        signals.watch_start()?;
        Ok(signals)
    }

    /// The first step is next.
    pub(super) fn started(&self) {
        self.starting.store(false, Ordering::SeqCst);
    }

    /// Says that the run ended before its first step.
    pub(super) fn stopped_before_first_step(&self) {
        say(&self.said);
    }

    /// Ends the process where a start does not end by itself.
    fn watch_start(&self) -> Result<()> {
        let (stop, starting, said) = (Arc::clone(&self.stop), Arc::clone(&self.starting), Arc::clone(&self.said));
        let watch = move || {
            while !stop.load(Ordering::SeqCst) {
                if !starting.load(Ordering::SeqCst) {
                    return;
                }
                std::thread::sleep(POLL);
            }
            std::thread::sleep(GRACE);
            // A run whose start ends here sees that it is to stop before it makes a step.
            if starting.load(Ordering::SeqCst) {
                say(&said);
                low_level::exit(0);
            }
        };
        std::thread::Builder::new().name("signals".to_owned()).spawn(watch).map(drop).map_err(Error::Signal)
    }
}

/// Says it once, whichever thread comes first.
fn say(said: &AtomicBool) {
    if !said.swap(true, Ordering::SeqCst) {
        note("stopped before the first step; nothing was saved");
    }
}
