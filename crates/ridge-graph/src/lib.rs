//! The one definition of a model: types, formats, ops, gradient, sharding, passes, cost and f64 meaning.
mod dtype;

pub use dtype::DType;
