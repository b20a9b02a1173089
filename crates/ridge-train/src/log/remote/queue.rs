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
            let pause = error.wait.unwrap_or(wait).min(self.pace.longest_wait);
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
mod tests {
    use std::sync::mpsc;

    use serde_json::Value;

    use super::*;

    const QUICK: Pace = Pace {
        capacity: 8,
        interval: Duration::from_millis(5),
        heartbeat: Duration::from_millis(40),
        first_wait: Duration::from_millis(2),
        longest_wait: Duration::from_millis(8),
        grace: Duration::from_secs(20),
    };

    /// What a request comes to: nothing, an error, or an answer that never comes.
    #[derive(Clone, Copy, PartialEq)]
    enum Outcome {
        Fine,
        Passing,
        Lasting,
        Hang,
    }

    #[derive(Clone, Debug, PartialEq)]
    enum Asked {
        Begin,
        Send(Vec<u64>),
        End(RunEnded),
    }

    struct Script {
        outcome: Box<dyn FnMut(&Asked) -> Outcome + Send>,
        asked: mpsc::Sender<Asked>,
        /// What the first failure asks for.
        wait: Option<Duration>,
    }

    impl Script {
        fn ask(&mut self, asked: Asked) -> Result<(), JsonError> {
            let outcome = (self.outcome)(&asked);
            let _ = self.asked.send(asked);
            if outcome == Outcome::Hang {
                std::thread::sleep(Duration::from_secs(600));
            }
            let problem = "no answer".to_owned();
            let (passing, wait) = (outcome == Outcome::Passing, self.wait.take());
            let error = JsonError { problem, passing, wait, status: None, body: Value::Null };
            if outcome == Outcome::Fine { Ok(()) } else { Err(error) }
        }
    }

    impl Tracker for Script {
        fn name(&self) -> String {
            "server".to_owned()
        }

        fn begin(&mut self) -> Result<String, JsonError> {
            self.ask(Asked::Begin).map(|()| "page".to_owned())
        }

        fn send(&mut self, rows: &[Row]) -> Result<(), JsonError> {
            self.ask(Asked::Send(rows.iter().map(|row| row.step).collect()))
        }

        fn end(&mut self, ended: RunEnded) -> Result<(), JsonError> {
            self.ask(Asked::End(ended))
        }
    }

    fn start(pace: Pace, outcome: impl FnMut(&Asked) -> Outcome + Send + 'static) -> (Delivery, mpsc::Receiver<Asked>) {
        let (asked, seen) = mpsc::channel();
        (Delivery::start(Script { outcome: Box::new(outcome), asked, wait: None }, pace), seen)
    }

    fn push(delivery: &Delivery, steps: std::ops::Range<u64>) {
        for step in steps {
            delivery.push(Row { step, time: 0.0, numbers: Vec::new() });
        }
    }

    fn close(delivery: Delivery) -> Vec<String> {
        delivery.end(RunEnded::Finished);
        delivery.close("see the file")
    }

    #[test]
    fn rows_arrive_once_and_in_order_and_the_end_behind_them() {
        let (delivery, seen) = start(QUICK, |_| Outcome::Fine);
        push(&delivery, 0..5);
        let first = seen.recv().expect("the run begins");
        assert_eq!(first, Asked::Begin);
        let mut all: Vec<Asked> = vec![seen.recv().expect("rows are sent while the run lasts")];
        push(&delivery, 5..8);
        assert_eq!(close(delivery), ["server: page"]);
        all.extend(seen.iter());
        assert_eq!(all.pop(), Some(Asked::End(RunEnded::Finished)));
        let steps = all.iter().flat_map(|asked| if let Asked::Send(steps) = asked { steps.clone() } else { vec![] });
        assert_eq!(steps.collect::<Vec<_>>(), (0..8).collect::<Vec<_>>());
    }

    #[test]
    fn what_fails_for_a_while_is_sent_again() {
        let mut asked = 0;
        let (delivery, seen) = start(QUICK, move |_| {
            asked += 1;
            if asked % 3 == 0 { Outcome::Fine } else { Outcome::Passing }
        });
        push(&delivery, 0..3);
        let notes = close(delivery);
        assert_eq!(notes, ["server: no answer; training goes on, and sending is tried again", "server: page"]);
        let all: Vec<Asked> = seen.iter().collect();
        assert_eq!(all.iter().filter(|asked| **asked == Asked::Begin).count(), 3);
        assert_eq!(all.iter().filter(|asked| **asked == Asked::Send(vec![0, 1, 2])).count(), 3);
        assert_eq!(all.iter().filter(|asked| matches!(asked, Asked::End(_))).count(), 3);
    }

    #[test]
    fn a_refused_run_sends_nothing_and_says_so() {
        let (delivery, seen) = start(QUICK, |_| Outcome::Lasting);
        push(&delivery, 0..3);
        let notes = close(delivery);
        assert_eq!(
            notes,
            [
                "server: no answer; training goes on",
                "server: 3 of 3 reports were not delivered (no answer); see the file"
            ]
        );
        assert_eq!(seen.iter().count(), 1);
    }

    #[test]
    fn refused_rows_do_not_keep_back_those_behind_them() {
        let (delivery, seen) = start(QUICK, |asked| match asked {
            Asked::Send(steps) if steps.contains(&0) => Outcome::Lasting,
            _ => Outcome::Fine,
        });
        push(&delivery, 0..1);
        while seen.recv().expect("it asks") != Asked::Send(vec![0]) {}
        push(&delivery, 1..3);
        let notes = close(delivery);
        assert_eq!(notes.last().map(String::as_str), Some("server: 1 of 3 reports were not delivered; see the file"));
        assert_eq!(seen.iter().last(), Some(Asked::End(RunEnded::Finished)));
    }

    /// Neither while rows are queued, nor at the end for longer than it may.
    #[test]
    fn a_server_that_hangs_keeps_nobody_waiting() {
        let grace = Duration::from_millis(50);
        let (delivery, seen) = start(Pace { grace, ..QUICK }, |_| Outcome::Hang);
        assert_eq!(seen.recv(), Ok(Asked::Begin));
        let began = Instant::now();
        push(&delivery, 0..100);
        assert!(began.elapsed() < Duration::from_secs(5));
        let notes = close(delivery);
        assert!(began.elapsed() >= grace && began.elapsed() < Duration::from_secs(5));
        assert_eq!(notes, ["server: 100 of 100 reports were not delivered; see the file"]);
    }

    #[test]
    fn a_server_that_is_not_there_is_asked_three_times_behind_the_end() {
        let hour = Duration::from_secs(3600);
        let (asked, seen) = mpsc::channel();
        let pace = Pace { longest_wait: hour, ..QUICK };
        let delivery =
            Delivery::start(Script { outcome: Box::new(|_| Outcome::Passing), asked, wait: Some(hour) }, pace);
        push(&delivery, 0..1);
        assert_eq!(seen.recv(), Ok(Asked::Begin));
        let began = Instant::now();
        let notes = close(delivery);
        assert!(notes.last().expect("a note").contains("1 of 1 reports were not delivered (no answer)"), "{notes:?}");
        assert!(began.elapsed() < Duration::from_secs(10), "the wait that the server asked for ends with the run");
        assert_eq!(seen.iter().count(), 3);
    }

    #[test]
    fn a_queue_that_is_full_takes_no_more() {
        let (release, wait) = mpsc::channel::<()>();
        let (delivery, seen) = start(QUICK, move |asked| {
            if *asked == Asked::Begin {
                wait.recv().expect("is released");
            }
            Outcome::Fine
        });
        push(&delivery, 0..20);
        release.send(()).expect("it waits");
        let notes = close(delivery);
        let wanted = format!("server: {} of 20 reports were not delivered; see the file", 20 - QUICK.capacity);
        assert_eq!(notes.last(), Some(&wanted));
        assert!(seen.iter().any(|asked| asked == Asked::Send((0..8).collect())));
    }

    #[test]
    fn a_server_hears_that_a_quiet_run_lasts() {
        let (delivery, seen) = start(QUICK, |_| Outcome::Fine);
        assert_eq!(seen.recv(), Ok(Asked::Begin));
        assert_eq!(seen.recv(), Ok(Asked::Send(Vec::new())));
        assert_eq!(close(delivery), ["server: page"]);
    }
}
