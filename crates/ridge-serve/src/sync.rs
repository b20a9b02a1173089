//! Atomics of the hand-written protocols: loom's where they are model-checked, otherwise those of the standard library.
//!
//! The cfg is not called `loom`, as elsewhere: tokio has no `net` under that name, without which no server compiles.
//! Run the models with `RUSTFLAGS="--cfg ridge_loom" cargo test -p ridge-serve --lib --profile loom --target-dir target/loom loom`.

#[cfg(ridge_loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, AtomicUsize};
#[cfg(not(ridge_loom))]
pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize};
