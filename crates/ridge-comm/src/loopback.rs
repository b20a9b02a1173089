//! Ranks within one process, each on threads of its own.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ridge_runtime::{CollectiveError, Collectives};

use crate::health::{Backoff, Health};

/// One rank's end of a group within this process.
pub struct Loopback {
    shared: Arc<LoopbackState>,
    rank: usize,
    /// Numbers this rank's exchanges.
    own: Health,
}

struct LoopbackState {
    mail: Vec<Mutex<Mail>>,
    meeting: Meeting,
    health: Health,
}

/// What a rank has brought.
#[derive(Default)]
struct Mail {
    number: u64,
    what: String,
    bytes: Vec<u8>,
    /// Where the part for each rank ends.
    ends: Vec<usize>,
}

impl Loopback {
    /// The ends of a group of `ranks` ranks, in rank order.
    pub fn group(ranks: usize) -> Vec<Arc<dyn Collectives>> {
        let mail = (0..ranks).map(|_| Mutex::default()).collect();
        let shared = Arc::new(LoopbackState { mail, meeting: Meeting::default(), health: Health::default() });
        let end = |rank| Self { shared: Arc::clone(&shared), rank, own: Health::default() };
        (0..ranks).map(|rank| Arc::new(end(rank)) as Arc<dyn Collectives>).collect()
    }

    fn mail(&self, rank: usize) -> MutexGuard<'_, Mail> {
        self.shared.mail[rank].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn meet(&self) -> Result<(), CollectiveError> {
        self.shared.meeting.wait(self.ranks(), &self.shared.health)
    }
}

impl Collectives for Loopback {
    fn ranks(&self) -> usize {
        self.shared.mail.len()
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn exchange(&self, what: &str, send: &[&[u8]], receive: &mut [&mut [u8]]) -> Result<(), CollectiveError> {
        assert!(send.len() == self.ranks() && receive.len() == self.ranks(), "one slice for each rank");
        let number = self.own.begin();
        {
            let mut mail = self.mail(self.rank);
            mail.number = number;
            mail.what.clear();
            mail.what.push_str(what);
            mail.bytes.clear();
            mail.ends.clear();
            for part in send {
                mail.bytes.extend_from_slice(part);
                let end = mail.bytes.len();
                mail.ends.push(end);
            }
        }
        self.meet()?;
        for (rank, to) in receive.iter_mut().enumerate() {
            let mail = self.mail(rank);
            let start = if self.rank == 0 { 0 } else { mail.ends[self.rank - 1] };
            let part = &mail.bytes[start..mail.ends[self.rank]];
            if mail.what != what || mail.number != number || part.len() != to.len() {
                let theirs = format!("calls {}", mail.what);
                let error =
                    CollectiveError::Mismatch { number, rank: self.rank, mine: what.into(), other: rank, theirs };
                return Err(self.shared.health.fail(error));
            }
            to.copy_from_slice(part);
        }
        // Nobody brings the next part before all have read this one.
        self.meet()?;
        self.own.end();
        Ok(())
    }

    fn abort(&self, why: &str) {
        self.shared.health.fail(CollectiveError::Aborted { why: why.into() });
    }

    fn failure(&self) -> Option<CollectiveError> {
        self.shared.health.check().err()
    }
}

/// Where the ranks wait for each other.
#[derive(Default)]
struct Meeting {
    arrived: AtomicUsize,
    /// Meetings so far.
    held: AtomicUsize,
}

impl Meeting {
    /// Returns once all `ranks` ranks are here.
    fn wait(&self, ranks: usize, health: &Health) -> Result<(), CollectiveError> {
        health.check()?;
        let held = self.held.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == ranks {
            self.arrived.store(0, Ordering::Relaxed);
            self.held.store(held + 1, Ordering::Release);
            return Ok(());
        }
        let mut backoff = Backoff::new();
        while self.held.load(Ordering::Acquire) == held {
            health.check()?;
            backoff.wait();
        }
        Ok(())
    }
}
