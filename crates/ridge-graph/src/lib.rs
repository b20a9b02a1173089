//! The one definition of a model: types, formats, ops, gradient, sharding, passes, cost and f64 meaning.
//!
//! Files form layers; a file uses those of its own layer and the ones below it, never in a circle:
//!
//! 1. `dtype`, `dim`, `poly`, `shape`: elements and extents. `dyn_eq`, `why`: equality of trait objects, refusals.
//! 2. `prim`: the closed set of primitives. `format`: how parameters are stored, and their decoding as primitives.
//! 3. `types`: the type of a value, then `tensor`: concrete values. `cost` and `error`, which are stated in types.
//!    `prim/infer` and `prim/cost`. `shard/placement`: placements and rules.
//! 4. `graph`: functions of nodes, the trait of composite ops, and the builder's state.
//! 5. `builder`: how one writes a model. `text`: a graph as text. `sample` and `registry`: ops with random instances.
//! 6. `ops`: the composite ops, one a file, and the registry of them. `prim/samples`: instances of the primitives.
//! 7. `eval`: what a graph means. `passes`, then `grad` and `shard`: rewrites.
//! 8. `conformance`: what is right.
//!
//! Read them in this order; `graph` says how to add an op and one file of `ops` shows it.

mod builder;
pub mod conformance;
mod cost;
mod dim;
mod dtype;
mod dyn_eq;
mod error;
mod eval;
pub mod format;
pub mod grad;
mod graph;
mod jvp;
pub mod ops;
pub mod passes;
mod poly;
mod prim;
mod registry;
pub mod sample;
mod sampler_settings;
mod shape;
pub mod shard;
mod tensor;
mod text;
mod types;
mod why;
mod work;

pub use cost::Cost;
pub use dim::{Bindings, Dim, Sym, UnboundSymbol};
pub use dtype::{DType, f8e4m3_to_f64, f8e5m2_to_f64, f64_to_f8e4m3, f64_to_f8e5m2};
pub use dyn_eq::{DynEq, DynHash};
pub use error::{GraphError, Result};
pub use eval::{Precision, evaluate, evaluate_function, evaluate_mesh, philox4x32, uniform};
pub use format::FormatRef;
pub use graph::{
    Arg, Builder, Composite, CompositeRef, FuncId, Function, Gradient, Graph, Group, GroupKind, Node, Op, Output, Role,
    Saved, Var,
};
pub use jvp::jvp;
pub use poly::Poly;
pub use prim::samples::prim_registry;
pub use prim::{Binary, CollectiveKind, Combine, Compare, Fetch, Literal, Memory, Prim, Unary};
pub use registry::{OpEntry, OpRegistry, SampleFn};
pub use sampler_settings::{MAX_SETTING, SAMPLER_SETTINGS};
pub use shape::Shape;
pub use tensor::{Data, Tensor, Value};
pub use types::Type;
pub use why::Why;
pub use work::{AttentionWork, Work};
