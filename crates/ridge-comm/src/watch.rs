//! Who is still there. A thread of each rank exchanges signs of life with rank 0, which tells all ranks when one is lost:
//! a rank that compiles or loads for long is alive, one whose process ended or was stopped is not.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ridge_runtime::CollectiveError;

use crate::health::Health;
use crate::lines::{Lines, Message};

/// How often a rank says that it lives, and after how long a silence it is taken for lost.
const BEAT: Duration = Duration::from_millis(250);
const SILENCE: Duration = Duration::from_secs(4);
/// How often the thread looks.
const LOOK: Duration = Duration::from_millis(20);

/// How long a rank may be in an exchange that others have not come to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience(pub(crate) Duration);

/// Another rank as the watch knows it.
struct Member {
    rank: usize,
    lines: Option<Lines>,
    heard: Instant,
    /// Exchanges it has begun, whether it is within the last, and since when this is so.
    number: u64,
    within: bool,
    since: Instant,
    /// It has nothing more to exchange.
    left: bool,
}

/// The thread that watches.
pub(crate) struct Watch {
    shared: Arc<WatchState>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct WatchState {
    closing: AtomicBool,
    /// What is said at the end.
    farewell: Mutex<Option<Message>>,
}

impl Watch {
    /// Watches from rank `rank`: rank 0 has lines to all others, the others have one to rank 0.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub(crate) fn start(
        rank: usize,
        members: Vec<(usize, Lines)>,
        health: Arc<Health>,
        patience: Patience,
    ) -> io::Result<Self> {
        let shared = Arc::new(WatchState::default());
        let now = Instant::now();
        let member = |(rank, lines)| Member {
            rank,
            lines: Some(lines),
            heard: now,
            number: 0,
            within: false,
            since: now,
            left: false,
        };
        let watcher = Watcher {
            rank,
            members: members.into_iter().map(member).collect(),
            health,
            patience,
            own: (0, false, now),
            told: false,
        };
        let state = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("ridge-ranks".into()).spawn(move || watcher.run(&state))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Says this and ends.
    pub(crate) fn end(&mut self, farewell: Message) {
        *self.shared.farewell.lock().unwrap_or_else(PoisonError::into_inner) = Some(farewell);
        self.shared.closing.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Watcher {
    rank: usize,
    members: Vec<Member>,
    health: Arc<Health>,
    patience: Patience,
    /// This rank's own progress, and since when it is so.
    own: (u64, bool, Instant),
    /// Have the others been told of a failure?
    told: bool,
}

impl Watcher {
    fn run(mut self, state: &WatchState) {
        let mut next_beat = Instant::now();
        loop {
            let closing = state.closing.load(Ordering::Acquire);
            let (number, within) = self.health.progress();
            if (number, within) != (self.own.0, self.own.1) {
                self.own = (number, within, Instant::now());
            }
            self.listen();
            self.judge();
            if closing {
                let farewell = state.farewell.lock().unwrap_or_else(PoisonError::into_inner).take();
                if let Some(farewell) = farewell {
                    self.tell(&farewell, None);
                }
                return;
            }
            if Instant::now() >= next_beat {
                self.tell(&Message::Beat { number, within }, None);
                next_beat = Instant::now() + BEAT;
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Reads what the others have said.
    fn listen(&mut self) {
        let mut lost = Vec::new();
        for member in &mut self.members {
            while let Some(lines) = &mut member.lines {
                let message = match lines.receive() {
                    Ok(Some(message)) => message,
                    Ok(None) => break,
                    Err(error) => {
                        member.lines = None;
                        if !member.left {
                            let why = match error.kind() {
                                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
                                    "its connection closed; its process has ended".to_owned()
                                }
                                _ => format!("its connection failed: {error}"),
                            };
                            lost.push((member.rank, why));
                        }
                        break;
                    }
                };
                member.heard = Instant::now();
                match message {
                    Message::Beat { number, within } => {
                        if (number, within) != (member.number, member.within) {
                            (member.number, member.within, member.since) = (number, within, Instant::now());
                        }
                    }
                    Message::Lost { rank, why } => lost.push((rank, why)),
                    Message::Failed { why } => {
                        member.left = true;
                        lost.push((member.rank, format!("it aborted: {why}")));
                    }
                    Message::Bye { number } => {
                        (member.number, member.within, member.left) = (number, false, true);
                    }
                    Message::Hello { .. } | Message::Table { .. } | Message::Refused { .. } => {
                        member.lines = None;
                        lost.push((member.rank, "it sent an unexpected message".into()));
                    }
                }
            }
        }
        lost.into_iter().for_each(|(rank, why)| self.lost(rank, &why));
    }

    /// Finds those who are silent, and those for whom others wait in vain.
    fn judge(&mut self) {
        let waiting = (self.own.1).then_some((self.rank, self.own.0, self.own.2));
        let others = self.members.iter().filter(|m| m.within).map(|m| (m.rank, m.number, m.since));
        // Who waits in the exchange that is furthest ahead.
        let first = waiting.into_iter().chain(others).max_by_key(|(_, number, _)| *number);
        let mut lost = Vec::new();
        for member in &self.members {
            if member.lines.is_some() && !member.left && member.heard.elapsed() > SILENCE {
                let seconds = member.heard.elapsed().as_secs();
                let why = format!("no heartbeat for {seconds} s; its process is stopped or unreachable");
                lost.push((member.rank, why));
            }
            let Some((who, number, since)) =
                first.filter(|(who, number, _)| *who != member.rank && *number > member.number)
            else {
                continue;
            };
            if member.left {
                let why = format!(
                    "it exited after {} collectives, while rank {who} is in collective {number}",
                    member.number
                );
                lost.push((member.rank, why));
            } else if since.elapsed() > self.patience.0 && !member.within {
                let waited = since.elapsed().as_secs();
                let why =
                    format!("it has not reached collective {number}, in which rank {who} has waited for {waited} s");
                lost.push((member.rank, why));
            }
        }
        lost.into_iter().for_each(|(rank, why)| self.lost(rank, &why));
    }

    /// A rank is lost: the group is of no use, and rank 0 tells all others.
    fn lost(&mut self, rank: usize, why: &str) {
        if rank == self.rank {
            let why = format!("the other ranks continued without rank {rank}: {why}");
            self.health.fail(CollectiveError::Aborted { why });
        } else {
            self.health.fail(CollectiveError::Lost { rank, why: why.to_owned() });
        }
        if !std::mem::replace(&mut self.told, true) && self.rank == 0 {
            self.tell(&Message::Lost { rank, why: why.to_owned() }, None);
        }
    }

    /// Says `message` to all but one. A rank that cannot be told is found out when it is listened to.
    fn tell(&mut self, message: &Message, but: Option<usize>) {
        for member in self.members.iter_mut().filter(|m| Some(m.rank) != but) {
            if let Some(lines) = &mut member.lines {
                let _ = lines.send(message);
            }
        }
    }
}
