//! A script of a server, and what it is asked.

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
        ["server: no answer; training goes on", "server: 3 of 3 reports were not delivered (no answer); see the file"]
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
    let delivery = Delivery::start(Script { outcome: Box::new(|_| Outcome::Passing), asked, wait: Some(hour) }, pace);
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

#[test]
fn a_server_that_asks_for_no_wait_is_not_asked_without_a_pause() {
    let (asked, seen) = mpsc::channel();
    let second = Duration::from_secs(1);
    let pace = Pace { first_wait: second / 4, longest_wait: second, ..QUICK };
    let mut requests = 0;
    let outcome = Box::new(move |_: &Asked| {
        requests += 1;
        if requests == 1 { Outcome::Passing } else { Outcome::Fine }
    });
    let began = Instant::now();
    let delivery = Delivery::start(Script { outcome, asked, wait: Some(Duration::ZERO) }, pace);
    assert_eq!([seen.recv(), seen.recv()], [Ok(Asked::Begin), Ok(Asked::Begin)]);
    assert!(began.elapsed() >= pace.first_wait);
    close(delivery);
}
