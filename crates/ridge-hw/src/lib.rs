//! Specification sheets, detection, topology and roofline of the machines that Ridge runs on.
//!
//! Nothing here computes, measures, starts a thread or loads a library: it reads files and says what they state.
//! Read in this order:
//!
//! 1. [`units`]: bytes, FLOPs, seconds and their quotients, which every other crate speaks in;
//! 2. [`roofline`]: the least time that work can take, the yardstick of the whole program;
//! 3. [`figure`] and [`spec`]: numbers with their provenance, and the makers' sheets (`specs/*.toml`);
//! 4. [`environment`]: the files and variables that detection reads, real or a test's;
//! 5. [`topology`] and [`cpu`]: the machine's nodes, cores, caches, features and a container's real allowance;
//! 6. [`gpu`]: NVIDIA's GPUs, driver and libraries, found as files.
//!
//! What a machine does not tell is `None`, never a guess; [`error`] is for sheets, names and given texts alone.

pub mod cpu;
pub mod environment;
pub mod error;
pub mod figure;
pub mod gpu;
pub mod roofline;
pub mod spec;
pub mod topology;
pub mod units;
