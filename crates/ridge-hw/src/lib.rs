//! Specification sheets, detection, topology and roofline of the machines that Ridge runs on.
//!
//! 1. [`units`]: bytes, FLOPs, seconds and their quotients, which every other crate speaks in;
//! 2. [`roofline`]: the least time that work can take, the yardstick of the whole program;
//! 3. [`figure`] and [`spec`]: numbers with their provenance, and the makers' sheets (`specs/*.toml`).

pub mod error;
pub mod figure;
pub mod roofline;
pub mod spec;
pub mod units;
