//! The memory ledger of a backend: bytes by owner, as predicted before a bucket is bound and as counted while memory is
//! allocated and freed.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What memory of a backend is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryOwner {
    /// Weights, in whatever layout kernels read them. What is read in a mapped file counts nothing.
    Weights,
    /// States.
    States,
    /// Values of the plan, scratch memory of launches and preparations of kernels: one block, which all buckets of a
    /// backend share, as large as the largest needs it.
    Workspace,
    /// Weights that are kept in memory of the host, where steps read them or copy them from.
    HostWeights,
    /// States that are kept in memory of the host, where steps read and write them.
    HostStates,
    /// Values that a step of the plan keeps in memory of the host meanwhile: one block, shared as the workspace is.
    HostWorkspace,
    /// Step inputs of a bucket.
    Inputs,
    /// Outputs of a bucket.
    Outputs,
    /// Constants of a bucket's launches.
    Constants,
    /// Page-locked memory of the host behind a bucket's inputs and outputs.
    HostStaging,
    /// Page-locked memory of the host that weights pass through on their way to a device.
    Upload,
    /// The workspace of a vendor's library, which all buckets of a backend share.
    Library,
    /// Working memory of threads, which grows to what kernels ask for in their first steps and stays.
    Threads,
    /// Operands of kernels that are timed while a bucket is bound, freed when the choice is made.
    Tuning,
}

impl MemoryOwner {
    /// All owners, in the order in which they are shown.
    pub const ALL: [Self; 14] = [
        Self::Weights,
        Self::States,
        Self::Workspace,
        Self::HostWeights,
        Self::HostStates,
        Self::HostWorkspace,
        Self::Inputs,
        Self::Outputs,
        Self::Constants,
        Self::HostStaging,
        Self::Upload,
        Self::Library,
        Self::Threads,
        Self::Tuning,
    ];

    /// Its name in lower case, such as `host staging`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::States => "states",
            Self::Workspace => "workspace",
            Self::HostWeights => "offloaded weights",
            Self::HostStates => "offloaded states",
            Self::HostWorkspace => "offloaded values",
            Self::Inputs => "inputs",
            Self::Outputs => "outputs",
            Self::Constants => "constants",
            Self::HostStaging => "host staging",
            Self::Upload => "upload buffers",
            Self::Library => "library workspace",
            Self::Threads => "thread workspace",
            Self::Tuning => "tuning",
        }
    }

    /// Is it memory of the host, where the device has memory of its own?
    pub fn is_host(self) -> bool {
        matches!(self, Self::HostWeights | Self::HostStates | Self::HostWorkspace | Self::HostStaging | Self::Upload)
    }

    /// Does each bucket have its own, rather than all of a backend one?
    pub fn is_per_bucket(self) -> bool {
        matches!(self, Self::Inputs | Self::Outputs | Self::Constants | Self::HostStaging)
    }
}

impl fmt::Display for MemoryOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Bytes by owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryBytes([usize; MemoryOwner::ALL.len()]);

impl MemoryBytes {
    /// Bytes of `owner`.
    pub fn get(&self, owner: MemoryOwner) -> usize {
        self.0[owner as usize]
    }

    /// These, with `bytes` more of `owner`.
    #[must_use]
    pub fn with(mut self, owner: MemoryOwner, bytes: usize) -> Self {
        self.0[owner as usize] += bytes;
        self
    }

    /// These and another bucket's of the same backend: what buckets share counts once, as large as the larger needs it.
    #[must_use]
    pub fn and_bucket(mut self, other: &Self) -> Self {
        for owner in MemoryOwner::ALL {
            let (mine, its) = (&mut self.0[owner as usize], other.get(owner));
            *mine = if owner.is_per_bucket() { *mine + its } else { its.max(*mine) };
        }
        self
    }

    /// The larger of both for each owner.
    #[must_use]
    pub fn max(mut self, other: &Self) -> Self {
        self.0.iter_mut().zip(other.0).for_each(|(mine, its)| *mine = its.max(*mine));
        self
    }

    /// Bytes in the memory of the device.
    pub fn on_device(&self) -> usize {
        MemoryOwner::ALL.into_iter().filter(|owner| !owner.is_host()).map(|owner| self.get(owner)).sum()
    }

    /// Bytes in memory of the host, where the device has memory of its own.
    pub fn on_host(&self) -> usize {
        MemoryOwner::ALL.into_iter().filter(|owner| owner.is_host()).map(|owner| self.get(owner)).sum()
    }

    /// Bytes in the memory of the device of owners that each bucket has its own of.
    pub fn staging_on_device(&self) -> usize {
        let own = MemoryOwner::ALL.into_iter().filter(|owner| !owner.is_host() && owner.is_per_bucket());
        own.map(|owner| self.get(owner)).sum()
    }

    /// Owners with their bytes, those of none left out.
    pub fn iter(&self) -> impl Iterator<Item = (MemoryOwner, usize)> + '_ {
        MemoryOwner::ALL.into_iter().map(|owner| (owner, self.get(owner))).filter(|(_, bytes)| *bytes > 0)
    }
}

/// What a backend has allocated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Now.
    pub live: MemoryBytes,
    /// The most of each owner at a time, since the backend was made.
    pub peak: MemoryBytes,
}

/// Counts what a backend allocates. Every allocation holds a [`MemoryCharge`].
#[derive(Debug, Default)]
pub struct MemoryLedger {
    live: [AtomicUsize; MemoryOwner::ALL.len()],
    peak: [AtomicUsize; MemoryOwner::ALL.len()],
}

impl MemoryLedger {
    /// Counts `bytes` of `owner` until the charge is dropped.
    pub fn charge(self: &Arc<Self>, owner: MemoryOwner, bytes: usize) -> MemoryCharge {
        let live = self.live[owner as usize].fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak[owner as usize].fetch_max(live, Ordering::Relaxed);
        MemoryCharge { ledger: Arc::clone(self), owner, bytes }
    }

    /// What is counted now, and the peaks.
    pub fn usage(&self) -> MemoryUse {
        let read = |counts: &[AtomicUsize; MemoryOwner::ALL.len()]| {
            MemoryBytes(std::array::from_fn(|owner| counts[owner].load(Ordering::Relaxed)))
        };
        MemoryUse { live: read(&self.live), peak: read(&self.peak) }
    }
}

/// An allocation as the ledger has it.
#[derive(Debug)]
pub struct MemoryCharge {
    ledger: Arc<MemoryLedger>,
    owner: MemoryOwner,
    bytes: usize,
}

impl Drop for MemoryCharge {
    fn drop(&mut self) {
        self.ledger.live[self.owner as usize].fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charges_are_counted_while_they_live() {
        let ledger = Arc::new(MemoryLedger::default());
        let states = ledger.charge(MemoryOwner::States, 100);
        let first = ledger.charge(MemoryOwner::Inputs, 30);
        drop(first);
        let second = ledger.charge(MemoryOwner::Inputs, 20);
        let usage = ledger.usage();
        assert_eq!(usage.live, MemoryBytes::default().with(MemoryOwner::States, 100).with(MemoryOwner::Inputs, 20));
        assert_eq!(usage.peak.get(MemoryOwner::Inputs), 30);
        drop((states, second));
        assert_eq!(ledger.usage().live, MemoryBytes::default());
    }

    #[test]
    fn buckets_share_workspace_and_have_inputs_of_their_own() {
        let bucket = |workspace, inputs| {
            MemoryBytes::default().with(MemoryOwner::Workspace, workspace).with(MemoryOwner::Inputs, inputs)
        };
        let both = bucket(100, 3).and_bucket(&bucket(70, 4));
        assert_eq!(both, bucket(100, 7));
        assert_eq!((both.on_device(), both.staging_on_device()), (107, 7));
        let all: Vec<_> = MemoryOwner::ALL.into_iter().map(|owner| owner as usize).collect();
        assert!(all.iter().copied().eq(0..all.len()), "owners are listed in the order of their declaration");
    }
}
