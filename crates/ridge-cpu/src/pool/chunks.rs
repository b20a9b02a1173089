//! The launch that is open: which of its chunks are taken, and how many are not finished.
//!
//! Threads are in groups, each of one NUMA node, and each group has a part of the chunks: the same of every launch, so that
//! threads read what their node has. A thread takes chunks of its group's part, then of the others'. So no cache line is
//! written by all threads for every chunk.

use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Threads of a group, at most.
#[cfg(not(ridge_loom))]
const GROUP: usize = 8;
#[cfg(ridge_loom)]
const GROUP: usize = 1;

/// The most chunks of a launch.
pub(crate) const MAX_CHUNKS: u16 = u16::MAX;

/// What lies in cache lines of its own: two of them, as processors fetch pairs.
#[repr(align(128))]
struct Apart<T>(T);

/// Launch, end and next chunk of a group's part, in the bits from 32, from 16 and from 0 on. All is taken when the next is the
/// end.
#[derive(Clone, Copy)]
struct Part(u64);

impl Part {
    fn new(launch: usize, next: u16, end: u16) -> Self {
        Self((launch as u64) << 32 | u64::from(end) << 16 | u64::from(next))
    }

    fn next(self) -> Option<TakenChunk> {
        let (launch, end, chunk) = ((self.0 >> 32) as usize, (self.0 >> 16) as u16, self.0 as u16);
        (chunk < end).then_some(TakenChunk { launch, chunk, group: 0 })
    }
}

/// A group of threads.
struct ThreadGroup {
    /// Its [`Part`] of the launch that had chunks for it last.
    part: Apart<AtomicU64>,
    /// Chunks of the part that are not finished.
    left: Apart<AtomicU32>,
    /// Threads of it and of all groups before.
    end: usize,
}

/// A chunk that a thread has taken, and has to finish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TakenChunk {
    pub(super) launch: usize,
    pub(super) chunk: u16,
    group: usize,
}

/// Chunks of the open launch.
pub(super) struct OpenChunks {
    groups: Box<[ThreadGroup]>,
    /// Groups whose parts are not finished.
    left: Apart<AtomicU32>,
}

impl OpenChunks {
    /// For threads of nodes, so many of each, at least one in all.
    pub(super) fn new(nodes: impl Iterator<Item = usize>) -> Self {
        let mut groups = Vec::new();
        for threads in nodes {
            let before = groups.last().map_or(0, |group: &ThreadGroup| group.end);
            let count = threads.div_ceil(GROUP);
            groups.extend((1..=count).map(|nth| ThreadGroup {
                part: Apart(AtomicU64::new(0)),
                left: Apart(AtomicU32::new(0)),
                end: before + threads * nth / count,
            }));
        }
        Self { groups: groups.into(), left: Apart(AtomicU32::new(0)) }
    }

    /// The group of a thread.
    pub(super) fn group_of(&self, thread: usize) -> usize {
        self.groups.iter().position(|group| thread < group.end).unwrap_or(0)
    }

    /// Opens a launch of `chunks` chunks, at least one, when all of the launch before are finished.
    pub(super) fn open(&self, launch: usize, chunks: u16) {
        let threads = self.groups.last().map_or(1, |group| group.end);
        let end_of = |group: &ThreadGroup| usize::from(chunks) * group.end / threads;
        let parts = || {
            let starts = std::iter::once(0).chain(self.groups.iter().map(end_of));
            self.groups.iter().zip(starts).map(move |(group, start)| (group, start as u16, end_of(group) as u16))
        };
        // Groups without a chunk of this launch keep the part they have, which is finished: as soon as the last chunk is
        // open, others may finish the launch and open the next.
        let filled = || parts().filter(|(_, start, end)| start < end);
        self.left.0.store(filled().count() as u32, Ordering::Relaxed);
        filled().for_each(|(group, start, end)| group.left.0.store(u32::from(end - start), Ordering::Relaxed));
        for (group, start, end) in filled() {
            // Sequentially consistent with a thread's look for chunks before it sleeps.
            group.part.0.store(Part::new(launch, start, end).0, Ordering::SeqCst);
        }
    }

    /// Takes a chunk, of the part of group `mine` while there is one.
    pub(super) fn take(&self, mine: usize) -> Option<TakenChunk> {
        let count = self.groups.len();
        (mine..count).chain(0..mine).find_map(|group| {
            let part = &self.groups[group].part.0;
            loop {
                let seen = part.load(Ordering::Acquire);
                let taken = Part(seen).next()?;
                if part.compare_exchange(seen, seen + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                    return Some(TakenChunk { group, ..taken });
                }
            }
        })
    }

    /// A chunk is finished. Gives whether all of its launch are.
    pub(super) fn finish(&self, taken: TakenChunk) -> bool {
        self.groups[taken.group].left.0.fetch_sub(1, Ordering::AcqRel) == 1
            && self.left.0.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Is there a chunk to take?
    pub(super) fn has_chunk(&self) -> bool {
        self.groups.iter().any(|group| Part(group.part.0.load(Ordering::SeqCst)).next().is_some())
    }
}

#[cfg(all(test, not(ridge_loom)))]
mod tests {
    use super::*;

    #[test]
    fn groups_take_their_own_parts_first_and_all_chunks_once() {
        let open = OpenChunks::new([12, 8].into_iter());
        assert_eq!(open.groups.iter().map(|group| group.end).collect::<Vec<_>>(), [6, 12, 20]);
        assert_eq!([0, 5, 6, 12, 19].map(|thread| open.group_of(thread)), [0, 0, 1, 2, 2]);
        for chunks in [1, 2, 3, 19, 20, 41, MAX_CHUNKS] {
            open.open(7, chunks);
            let (first, mut taken) = (usize::from(chunks) * 12 / 20, Vec::new());
            assert!(open.has_chunk());
            while let Some(chunk) = open.take(2) {
                assert_eq!((chunk.launch, chunk.group == 2), (7, usize::from(chunk.chunk) >= first));
                taken.push(chunk);
            }
            assert!(!open.has_chunk() && usize::from(taken[0].chunk) == first);
            let mut numbers: Vec<u16> = taken.iter().map(|taken| taken.chunk).collect();
            numbers.sort_unstable();
            assert_eq!(numbers, (0..chunks).collect::<Vec<_>>());
            let finished: Vec<bool> = taken.into_iter().map(|taken| open.finish(taken)).collect();
            assert_eq!(finished.iter().position(|last| *last), Some(usize::from(chunks) - 1));
        }
    }
}
