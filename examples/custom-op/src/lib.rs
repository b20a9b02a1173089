//! An op and its CPU kernel, added to Ridge from outside.
//!
//! `op` says what is true of the op on every machine, `kernel` how the CPU computes it.

mod kernel;
mod op;

pub use kernel::kernels;
pub use op::{GatedSquaredRelu, GatedSquaredReluBackward, registry};
