//! The one definition of a model: types, formats, ops, gradient, sharding, passes, cost and f64 meaning.
//!
//! Read in this order: `dtype`, `dim`, `types` (what a value is), `prim` (the closed set of primitives), `graph`
//! (functions of nodes), `builder` (how one writes a model), `op` and one file of `ops` (how one adds an op), `eval`
//! (what a graph means), then the readings: `cost`, `text`, `grad`, `shard`, `passes`.

mod builder;
pub mod conformance;
mod cost;
mod dim;
mod dtype;
mod error;
mod eval;
pub mod format;
pub mod grad;
mod graph;
mod op;
pub mod ops;
pub mod passes;
mod poly;
mod prim;
pub mod sample;
pub mod shard;
mod tensor;
mod text;
mod types;

pub use builder::Builder;
pub use cost::Cost;
pub use dim::{Bindings, Dim, Sym, UnboundSymbol};
pub use dtype::{DType, f8e4m3_to_f64, f8e5m2_to_f64, f64_to_f8e4m3, f64_to_f8e5m2};
pub use error::{GraphError, Result, Why};
pub use eval::{Precision, evaluate, evaluate_function, evaluate_mesh, philox4x32, uniform};
pub use format::FormatRef;
pub use graph::{Arg, FuncId, Function, Graph, Group, GroupKind, Node, Op, Output, Role, Var};
pub use op::{Composite, CompositeRef, Gradient, Saved};
pub use poly::Poly;
pub use prim::{Binary, CollectiveKind, Combine, Compare, Literal, Prim, Unary, prim_registry};
pub use tensor::{Data, Tensor, Value};
pub use types::{Shape, Type};
