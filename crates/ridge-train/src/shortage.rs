//! What is said of a run that does not fit into memory.

use std::fmt;

use ridge_hw::units::Bytes;

/// Memory that a run needs and does not get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryShortage {
    /// Of which memory: `device memory` or `host memory`; `memory` where they are one.
    pub of: &'static str,
    /// What weights, masters, gradients and states of the optimiser take of it.
    pub states: Bytes,
    /// What activations take, and all else that the programs of a step and of validation need.
    pub activations: Bytes,
    /// What there is.
    pub available: Bytes,
    /// What to do.
    pub remedy: String,
}

impl MemoryShortage {
    /// All that is needed.
    pub fn needed(&self) -> Bytes {
        Bytes(self.states.0.saturating_add(self.activations.0))
    }
}

impl fmt::Display for MemoryShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { of, states, activations, available, remedy } = self;
        let (needed, lacking) = (self.needed(), Bytes(self.needed().0.saturating_sub(available.0)));
        write!(
            f,
            "the run needs {needed} of {of}, {lacking} more than the {available} that is available to this process: weights, \
             gradients and optimizer take {states}, activations {activations}; {remedy}"
        )
    }
}
