//! Links between processes of one machine: a ring of bytes in shared memory for each direction.
//!
//! The only unsafe code of the crate is here.

#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::MmapRaw;

use crate::link::Link;

/// Bytes of a ring's data.
const RING: usize = 256 << 10;
/// Where the counters of a ring are, each on a cache line of its own, and where its data begin.
const WRITTEN: usize = 0;
const READ: usize = 128;
const DATA: usize = 256;
const STRIDE: usize = DATA + RING;

/// The shared memory of one group: a ring for each ordered pair of ranks.
pub(crate) struct Segment {
    map: Arc<MmapRaw>,
    ranks: usize,
}

impl Segment {
    /// Where segments are made.
    fn folder() -> PathBuf {
        let shm = Path::new("/dev/shm");
        if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() }
    }

    /// Makes a segment for `ranks` ranks, in a new file that only this user may open.
    ///
    /// # Errors
    /// When there is no room.
    pub(crate) fn create(name: &str, ranks: usize) -> io::Result<(Self, PathBuf)> {
        let path = Self::folder().join(name);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = options.open(&path)?;
        let segment = file.set_len((ranks * ranks * STRIDE) as u64).and_then(|()| Self::map(&file, ranks));
        match segment {
            Ok(segment) => Ok((segment, path)),
            Err(error) => {
                let _ = std::fs::remove_file(&path);
                Err(error)
            }
        }
    }

    /// Opens the segment that another rank has made.
    ///
    /// # Errors
    /// When it is not there, or not of `ranks` ranks.
    pub(crate) fn open(path: &Path, ranks: usize) -> io::Result<Self> {
        Self::map(&OpenOptions::new().read(true).write(true).open(path)?, ranks)
    }

    fn map(file: &File, ranks: usize) -> io::Result<Self> {
        if file.metadata()?.len() != (ranks * ranks * STRIDE) as u64 {
            return Err(io::Error::other(format!("the shared memory is not for {ranks} ranks")));
        }
        Ok(Self { map: Arc::new(MmapRaw::map_raw(file)?), ranks })
    }

    /// The link between ranks `me` and `other`. Each end of a link is made once.
    pub(crate) fn link(&self, me: usize, other: usize) -> Box<dyn Link> {
        let ring = |from: usize, to: usize| {
            assert!(from < self.ranks && to < self.ranks, "ranks of the segment");
            Ring { map: Arc::clone(&self.map), at: (from * self.ranks + to) * STRIDE }
        };
        Box::new(RingLink { to: ring(me, other), from: ring(other, me) })
    }
}

/// Bytes from one rank to another. `written` and `read` count all bytes ever; the writer changes the first, the reader
/// the second.
struct Ring {
    map: Arc<MmapRaw>,
    at: usize,
}

impl Ring {
    fn counter(&self, which: usize) -> &AtomicU64 {
        // SAFETY: within the map, which has a stride for each ring and lives as long as `self`; aligned, since maps are
        // aligned to pages and strides to 64 bytes; all processes access counters atomically only.
        unsafe { &*self.map.as_mut_ptr().add(self.at + which).cast::<AtomicU64>() }
    }

    /// Bytes written and not yet read, and both counters.
    ///
    /// # Errors
    /// When the counters cannot be right.
    fn filled(&self) -> io::Result<(usize, u64, u64)> {
        let (written, read) =
            (self.counter(WRITTEN).load(Ordering::Acquire), self.counter(READ).load(Ordering::Acquire));
        match usize::try_from(written.wrapping_sub(read)) {
            Ok(filled) if filled <= RING => Ok((filled, written, read)),
            _ => Err(io::Error::other("its shared memory is damaged")),
        }
    }

    /// The stretches of `len` bytes from byte `count` on.
    fn stretches(count: u64, len: usize) -> [(usize, usize); 2] {
        let start = (count % RING as u64) as usize;
        let first = len.min(RING - start);
        [(start, first), (0, len - first)]
    }
}

struct RingLink {
    to: Ring,
    from: Ring,
}

impl Link for RingLink {
    fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (filled, written, _) = self.to.filled()?;
        let len = bytes.len().min(RING - filled);
        let mut rest = &bytes[..len];
        for (start, len) in Ring::stretches(written, len) {
            let (now, later) = rest.split_at(len);
            // SAFETY: within the ring's data; the reader reads none of these bytes before `written` says that they are
            // there, and only this end writes.
            unsafe {
                let to = self.to.map.as_mut_ptr().add(self.to.at + DATA + start);
                std::ptr::copy_nonoverlapping(now.as_ptr(), to, len);
            }
            rest = later;
        }
        self.to.counter(WRITTEN).store(written + len as u64, Ordering::Release);
        Ok(len)
    }

    fn receive(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let (filled, _, read) = self.from.filled()?;
        let len = bytes.len().min(filled);
        let mut rest = &mut bytes[..len];
        for (start, len) in Ring::stretches(read, len) {
            let (now, later) = rest.split_at_mut(len);
            // SAFETY: within the ring's data; the writer has written these bytes and writes none of them before `read`
            // says that they were read, and only this end reads.
            unsafe {
                let from = self.from.map.as_mut_ptr().add(self.from.at + DATA + start);
                std::ptr::copy_nonoverlapping(from, now.as_mut_ptr(), len);
            }
            rest = later;
        }
        self.from.counter(READ).store(read + len as u64, Ordering::Release);
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_ring_gives_what_was_sent_in_order(sizes in prop::collection::vec((0usize..RING * 2, 1usize..RING * 2), 1..20)) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("segment");
            let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
            file.set_len((4 * STRIDE) as u64).unwrap();
            let (here, there) = (Segment::map(&file, 2).unwrap(), Segment::open(&path, 2).unwrap());
            let (mut to, mut from) = (here.link(0, 1), there.link(1, 0));
            let (mut sent, mut received) = (0usize, 0usize);
            for (send, receive) in sizes {
                let bytes: Vec<u8> = (0..send).map(|i| ((sent + i) % 251) as u8).collect();
                let taken = to.send(&bytes).unwrap();
                prop_assert_eq!(taken, send.min(RING - (sent - received)));
                sent += taken;
                let mut bytes = vec![0; receive];
                let got = from.receive(&mut bytes).unwrap();
                prop_assert_eq!(got, receive.min(sent - received));
                prop_assert!(bytes[..got].iter().enumerate().all(|(i, b)| usize::from(*b) == (received + i) % 251));
                received += got;
            }
        }
    }

    #[test]
    fn damaged_counters_and_other_sizes_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("segment");
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
        file.set_len((4 * STRIDE) as u64).unwrap();
        assert!(Segment::open(&path, 3).is_err_and(|e| e.to_string().contains("not for 3 ranks")));
        let segment = Segment::open(&path, 2).unwrap();
        let mut link = segment.link(0, 1);
        Ring { map: Arc::clone(&segment.map), at: STRIDE }.counter(READ).store(9, Ordering::Relaxed);
        assert!(link.send(&[1]).is_err());
    }
}
