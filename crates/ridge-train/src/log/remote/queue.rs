//! Sending behind the back of training: a thread with a bounded queue. Training only appends to the queue, whatever the server
//! does, and waits for what is left of it once, at its end, for a limited time.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ridge_hub::JsonError;

use crate::log::event::RunEnded;

/// Numbers of a step.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::log) struct Row {
    pub(in crate::log) step: u64,
    /// Seconds since 1970.
    pub(in crate::log) time: f64,
    pub(in crate::log) numbers: Vec<(String, f64)>,
}

/// A server that knows runs. Each request may be repeated: one whose answer was lost has no other effect the second time.
pub(in crate::log) trait Tracker: Send + 'static {
    /// What messages call it.
    fn name(&self) -> String;

    /// Makes the run known, and returns the address of its page.
    fn begin(&mut self) -> Result<String, JsonError>;

    /// Adds rows; with none of them it says that the run lasts.
    fn send(&mut self, rows: &[Row]) -> Result<(), JsonError>;

    /// Notes how the run ended.
    fn end(&mut self, ended: RunEnded) -> Result<(), JsonError>;
}

/// How often, and for how long.
#[derive(Clone, Copy, Debug)]
pub(in crate::log) struct Pace {
    /// Rows that wait at most; what comes on top is not sent.
    pub(in crate::log) capacity: usize,
    /// Between two requests.
    pub(in crate::log) interval: Duration,
    /// Without a row until the server is told that the run lasts.
    pub(in crate::log) heartbeat: Duration,
    /// After a failed request; then twice as long each time.
    pub(in crate::log) first_wait: Duration,
    pub(in crate::log) longest_wait: Duration,
    /// At the end of the run, for all that is left.
    pub(in crate::log) grace: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        // A row takes some 300 bytes: 5 MB wait at most.
        Self {
            capacity: 16384,
            interval: seconds(5),
            heartbeat: seconds(30),
            first_wait: seconds(1),
            longest_wait: seconds(60),
            grace: seconds(20),
        }
    }
}

/// Rows of one request.
const BATCH: usize = 500;
/// How often a request fails at most once the run has ended: a server that is not there holds nobody up for long.
const LATE_ATTEMPTS: u32 = 3;

#[derive(Default)]
struct State {
    rows: VecDeque<Row>,
    /// Rows that the thread has taken and not sent yet.
    in_flight: usize,
    /// Rows that will not be sent.
    lost: usize,
    all: usize,
    /// Why the last request failed.
    problem: Option<String>,
    notes: Vec<String>,
    /// How the run ended, and until when that may be sent.
    ending: Option<(RunEnded, Instant)>,
    /// The thread is done, or nothing can be sent.
    closed: bool,
    /// All was sent, the end too.
    complete: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// What a server is sent of a run.
pub(in crate::log) struct Delivery {
    name: String,
    shared: Arc<Shared>,
    pace: Pace,
}

impl Delivery {
    /// Begins to send to `tracker`.
    pub(in crate::log) fn start(tracker: impl Tracker, pace: Pace) -> Self {
        let shared = Arc::new(Shared::default());
        let name = tracker.name();
        let sender = Sender { tracker, shared: Arc::clone(&shared), pace, has_warned: false };
        std::thread::spawn(move || sender.run());
        Self { name, shared, pace }
    }

    /// Queues a row.
    pub(in crate::log) fn push(&self, row: Row) {
        let mut state = self.shared.lock();
        state.all += 1;
        if state.closed || state.rows.len() >= self.pace.capacity {
            state.lost += 1;
        } else {
            state.rows.push_back(row);
            self.shared.changed.notify_all();
        }
    }

    /// What one should know since the last call.
    pub(in crate::log) fn notes(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.lock().notes)
    }

    /// Says how the run ended: from now on the time runs in which the rest may be sent.
    pub(in crate::log) fn end(&self, ended: RunEnded) {
        self.shared.lock().ending.get_or_insert((ended, Instant::now() + self.pace.grace));
        self.shared.changed.notify_all();
    }

    /// Waits until the rest is sent, or its time is over, and says what was not delivered; `instead` says where it is. It is called
    /// behind [`Delivery::end`].
    pub(in crate::log) fn close(self, instead: &str) -> Vec<String> {
        let mut state = self.shared.lock();
        while let (Some((_, deadline)), false) = (state.ending, state.closed) {
            if Instant::now() >= deadline {
                break;
            }
            state = self.shared.wait(state, deadline);
        }
        let missing = state.lost + state.in_flight + state.rows.len();
        let problem = state.problem.as_deref().map(|problem| format!(" ({problem})")).unwrap_or_default();
        let what = match (missing, state.complete) {
            (0, true) => None,
            (0, false) => Some("the end of the run was".to_owned()),
            (missing, _) => Some(format!("{missing} of {} reports were", state.all)),
        };
        let mut notes = std::mem::take(&mut state.notes);
        notes.extend(what.map(|what| format!("{}: {what} not delivered{problem}; {instead}", self.name)));
        notes
    }
}

impl Drop for Delivery {
    /// A run that is dropped without an end leaves no thread.
    fn drop(&mut self) {
        self.shared.lock().ending.get_or_insert((RunEnded::Failed, Instant::now()));
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a change, until `deadline` at most.
    fn wait<'a>(&self, state: MutexGuard<'a, State>, deadline: Instant) -> MutexGuard<'a, State> {
        let left = deadline.saturating_duration_since(Instant::now());
        self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
    }
}

struct Sender<T> {
    tracker: T,
    shared: Arc<Shared>,
    pace: Pace,
    has_warned: bool,
}

impl<T: Tracker> Sender<T> {
    fn run(mut self) {
        let complete = match self.persist(Tracker::begin) {
            Ok(page) => {
                let note = format!("{}: {page}", self.tracker.name());
                self.shared.lock().notes.push(note);
                self.send_all()
            }
            Err(_) => false,
        };
        let mut state = self.shared.lock();
        (state.complete, state.closed) = (complete, true);
        state.lost += state.rows.len();
        state.rows.clear();
        self.shared.changed.notify_all();
    }

    /// Sends rows as they come, and at last the end; whether that was delivered.
    fn send_all(&mut self) -> bool {
        loop {
            let (rows, ending) = self.next();
            if let (true, Some(ended)) = (rows.is_empty(), ending) {
                return self.persist(|tracker| tracker.end(ended)).is_ok();
            }
            let sent = self.persist(|tracker| tracker.send(&rows));
            let mut state = self.shared.lock();
            state.in_flight = 0;
            if sent.is_err() {
                state.lost += rows.len();
            }
        }
    }

    /// Rows of the next request: those that gather in an interval, or what is left when the run has ended.
    fn next(&self) -> (Vec<Row>, Option<RunEnded>) {
        let mut state = self.shared.lock();
        let (now, Pace { interval, heartbeat, .. }) = (Instant::now(), self.pace);
        loop {
            let due = now + if state.rows.is_empty() { heartbeat } else { interval };
            if state.ending.is_some() || Instant::now() >= due {
                break;
            }
            state = self.shared.wait(state, due);
        }
        let taken = state.rows.len().min(BATCH);
        state.in_flight = taken;
        (state.rows.drain(..taken).collect(), state.ending.map(|(ended, _)| ended))
    }

    /// Asks until it succeeds, as long as that may be and there is time.
    fn persist<R>(&mut self, mut ask: impl FnMut(&mut T) -> Result<R, JsonError>) -> Result<R, JsonError> {
        let (mut wait, mut late) = (self.pace.first_wait, 0);
        loop {
            late += u32::from(self.shared.lock().ending.is_some());
            let error = match ask(&mut self.tracker) {
                Ok(result) => {
                    self.shared.lock().problem = None;
                    return Ok(result);
                }
                Err(error) => error,
            };
            self.failed(&error);
            if late == 1 {
                wait = self.pace.first_wait;
            }
            // A server may ask for longer waits, and for none shorter: "at once" would be a loop without a pause.
            let pause = error.wait.map_or(wait, |asked| asked.max(wait)).min(self.pace.longest_wait);
            if !error.passing || late == LATE_ATTEMPTS || !self.pause(pause, late > 0) {
                return Err(error);
            }
            wait = (wait * 2).min(self.pace.longest_wait);
        }
    }

    /// Remembers a problem, and tells of the first one.
    fn failed(&mut self, error: &JsonError) {
        let mut state = self.shared.lock();
        state.problem = Some(error.problem.clone());
        if !std::mem::replace(&mut self.has_warned, true) {
            let next = if error.passing { "training goes on, and sending is tried again" } else { "training goes on" };
            state.notes.push(format!("{}: {error}; {next}", self.tracker.name()));
        }
    }

    /// Waits behind a request that was made when the run had ended (`late`) or had not; false when there is no time for another.
    fn pause(&self, wait: Duration, late: bool) -> bool {
        let until = Instant::now() + wait;
        let mut state = self.shared.lock();
        loop {
            let (now, end) = (Instant::now(), state.ending.map(|(_, deadline)| deadline));
            if end.is_some_and(|deadline| now >= deadline) {
                return false;
            }
            // A run that has just ended is not kept waiting for a server that may be back.
            if now >= until || end.is_some() && !late {
                return true;
            }
            state = self.shared.wait(state, end.map_or(until, |end| end.min(until)));
        }
    }
}

#[cfg(test)]
mod tests;
