//! How a GPU is used.

use std::collections::HashMap;
use std::sync::Arc;

use ridge_runtime::Collectives;

/// How a GPU is used.
#[derive(Clone, Default)]
pub struct CudaOptions {
    /// Index among the GPUs that the process sees, from 0.
    pub ordinal: usize,
    /// For tests: fills workspace and outputs with NaN before each step, and inputs after it, so that a kernel shows that
    /// reads uninitialised memory or leaves a part of its output unwritten.
    pub poison: bool,
    /// Synchronises after every launch, so that an error names the kernel that failed; ranks compare every collective
    /// before it is begun, and not only those of a whole step. Slow.
    pub check_launches: bool,
    /// Gives each row of a step the same bits whatever is computed beside it: sums have one order at all numbers of rows, and
    /// nothing that is timed changes it. What has no such kernel does not compile.
    pub deterministic: bool,
    /// Attention of prompts over a cache of int8 takes scores from products of int8: each row of a head of q is rounded to int8 with one
    /// scale, an error of some 0.8 % of its root mean square. Of effect on Hopper; tokens that are computed one by one have exact queries.
    pub int8_attention: bool,
    /// This rank's groups, by the name of the mesh axis, for graphs that communicate. Each rank has a GPU of its own. The
    /// groups serve to meet and to agree, and tell when a rank is lost; what graphs communicate goes from GPU to GPU by
    /// NCCL.
    pub mesh: HashMap<String, Arc<dyn Collectives>>,
    /// Bytes of the GPU's memory within which kernels are timed: where their operands would exceed it, candidates are guessed
    /// rather than timed. What programs need is for who binds them to count.
    pub memory_limit: Option<usize>,
}
