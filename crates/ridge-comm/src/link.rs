//! Byte streams to other ranks, and exchanges over them.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use ridge_runtime::{CollectiveError, Collectives};

use crate::health::{Backoff, Health};

/// A stream of bytes to and from one other rank that never blocks. What is sent arrives once, in order.
pub(crate) trait Link: Send {
    /// Takes as many of the bytes as there is room for now.
    ///
    /// # Errors
    /// When the other rank is gone.
    fn send(&mut self, bytes: &[u8]) -> io::Result<usize>;

    /// Gives as many bytes as have arrived and fit.
    ///
    /// # Errors
    /// When the other rank is gone.
    fn receive(&mut self, bytes: &mut [u8]) -> io::Result<usize>;
}

/// A group whose ranks are linked each to each.
pub(crate) struct LinkedGroup {
    rank: usize,
    ranks: usize,
    health: Arc<Health>,
    /// By rank; none to this rank.
    links: Mutex<Vec<Option<Box<dyn Link>>>>,
}

/// The longest description of an exchange that is compared.
const MAX_WHAT: usize = 1024;

/// What stands before each part: the number of the exchange, the bytes of what it is for, and the bytes of the part.
const HEADER: usize = 8 + 2 + 8;

/// A part on its way to another rank.
struct Outgoing<'a> {
    /// Header and description.
    front: &'a [u8],
    part: &'a [u8],
    sent: usize,
}

impl Outgoing<'_> {
    /// Sends what there is room for. Gives whether anything was sent.
    fn advance(&mut self, link: &mut dyn Link) -> io::Result<bool> {
        let before = self.sent;
        while self.sent < self.front.len() + self.part.len() {
            let rest = if self.sent < self.front.len() {
                &self.front[self.sent..]
            } else {
                &self.part[self.sent - self.front.len()..]
            };
            let taken = link.send(rest)?;
            self.sent += taken;
            if taken == 0 {
                break;
            }
        }
        Ok(self.sent > before)
    }

    fn is_done(&self) -> bool {
        self.sent == self.front.len() + self.part.len()
    }
}

/// A part on its way from another rank.
struct Incoming<'a> {
    front: Vec<u8>,
    got_front: usize,
    part: &'a mut [u8],
    got: usize,
    /// Was the front found to be what it must be?
    checked: bool,
}

/// What a rank announces that does not fit.
enum Received {
    Nothing,
    Something,
    /// What the other rank calls.
    Other(String),
}

impl Incoming<'_> {
    /// Takes what has arrived. The front must be that of exchange `number` for `what`.
    fn advance(&mut self, link: &mut dyn Link, number: u64, what: &str) -> io::Result<Received> {
        let mut any = Received::Nothing;
        while !self.checked {
            let taken = link.receive(&mut self.front[self.got_front..])?;
            if taken == 0 {
                return Ok(any);
            }
            any = Received::Something;
            self.got_front += taken;
            if self.got_front < self.front.len() {
                continue;
            }
            let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| self.front[at + i]));
            let described = usize::from(u16::from_le_bytes([self.front[8], self.front[9]])).min(MAX_WHAT);
            if self.front.len() < HEADER + described {
                self.front.resize(HEADER + described, 0);
                continue;
            }
            let theirs = String::from_utf8_lossy(&self.front[HEADER..]);
            let (their_number, bytes) = (word(0), word(10));
            if theirs != cut(what) || their_number != number {
                let of = if their_number == number { String::new() } else { format!(" as collective {their_number}") };
                return Ok(Received::Other(format!("calls {theirs}{of}")));
            }
            if bytes != self.part.len() as u64 {
                return Ok(Received::Other(format!("calls {theirs} with {bytes} bytes and not {}", self.part.len())));
            }
            self.checked = true;
        }
        while self.got < self.part.len() {
            let taken = link.receive(&mut self.part[self.got..])?;
            if taken == 0 {
                break;
            }
            self.got += taken;
            any = Received::Something;
        }
        Ok(any)
    }

    fn is_done(&self) -> bool {
        self.checked && self.got == self.part.len()
    }
}

/// As much of `what` as is compared.
fn cut(what: &str) -> &str {
    let fits = (0..=what.len().min(MAX_WHAT)).rev().find(|end| what.is_char_boundary(*end));
    &what[..fits.unwrap_or(0)]
}

impl LinkedGroup {
    pub(crate) fn new(rank: usize, links: Vec<Option<Box<dyn Link>>>, health: Arc<Health>) -> Self {
        Self { rank, ranks: links.len(), health, links: Mutex::new(links) }
    }

    fn exchange_numbered(
        &self,
        number: u64,
        what: &str,
        send: &[&[u8]],
        receive: &mut [&mut [u8]],
    ) -> Result<(), CollectiveError> {
        let what = cut(what);
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        receive[self.rank].copy_from_slice(send[self.rank]);
        let fronts: Vec<Vec<u8>> = send
            .iter()
            .map(|part| {
                let mut front = Vec::with_capacity(HEADER + what.len());
                front.extend(number.to_le_bytes());
                front.extend((what.len() as u16).to_le_bytes());
                front.extend((part.len() as u64).to_le_bytes());
                front.extend(what.as_bytes());
                front
            })
            .collect();
        let mut outgoing: Vec<Outgoing<'_>> =
            fronts.iter().zip(send).map(|(front, part)| Outgoing { front, part, sent: 0 }).collect();
        let mut incoming: Vec<Incoming<'_>> = receive
            .iter_mut()
            .map(|part| Incoming { front: vec![0; HEADER], got_front: 0, part, got: 0, checked: false })
            .collect();
        let mut backoff = Backoff::new();
        loop {
            let (mut done, mut progress) = (true, false);
            for (rank, link) in links.iter_mut().enumerate() {
                let Some(link) = link else { continue };
                let lost = |cause: io::Error| {
                    self.health
                        .verdict(CollectiveError::Lost { rank, why: format!("its connection was lost: {cause}") })
                };
                let (to, from) = (&mut outgoing[rank], &mut incoming[rank]);
                if !to.is_done() {
                    progress |= to.advance(&mut **link).map_err(lost)?;
                }
                if !from.is_done() {
                    match from.advance(&mut **link, number, what).map_err(lost)? {
                        Received::Nothing => {}
                        Received::Something => progress = true,
                        Received::Other(theirs) => {
                            let mine = what.to_owned();
                            let error =
                                CollectiveError::Mismatch { number, rank: self.rank, mine, other: rank, theirs };
                            return Err(self.health.fail(error));
                        }
                    }
                }
                done &= to.is_done() && from.is_done();
            }
            if done {
                return Ok(());
            }
            if progress {
                backoff.reset();
            } else {
                self.health.check()?;
                backoff.wait();
            }
        }
    }
}

impl Collectives for LinkedGroup {
    fn ranks(&self) -> usize {
        self.ranks
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn exchange(&self, what: &str, send: &[&[u8]], receive: &mut [&mut [u8]]) -> Result<(), CollectiveError> {
        assert!(send.len() == self.ranks && receive.len() == self.ranks, "one slice for each rank");
        self.health.check()?;
        let number = self.health.begin();
        let outcome = self.exchange_numbered(number, what, send, receive);
        self.health.end();
        outcome
    }

    fn abort(&self, why: &str) {
        self.health.fail(CollectiveError::Aborted { why: why.into() });
    }

    fn failure(&self) -> Option<CollectiveError> {
        self.health.check().err()
    }
}
