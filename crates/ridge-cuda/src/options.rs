//! How a GPU is used.

/// How a GPU is used.
#[derive(Clone, Debug, Default)]
pub struct CudaOptions {
    /// Index among the GPUs that the process sees, from 0.
    pub ordinal: usize,
    /// For tests: fills workspace and outputs with NaN before each step, and inputs after it, so that a kernel shows that
    /// reads uninitialised memory or leaves a part of its output unwritten.
    pub poison: bool,
    /// Synchronises after every launch, so that an error names the kernel that failed. Slow.
    pub check_launches: bool,
}
