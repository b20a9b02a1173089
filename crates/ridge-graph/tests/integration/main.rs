//! Integration tests, one module a subject.

mod builder;
mod conformance;
mod eval;
mod formats;
mod fp8;
mod grad_collectives;
mod grad_functions;
mod grad_llama;
mod grad_ops;
mod grad_prims;
mod grad_second;
mod ops_meaning;
mod random_keys;
mod registry;
mod reopen;
mod retype;
mod shard_decoder;
mod shard_mesh;
mod shard_rules;
mod shard_training;
mod support;
mod text;
mod vmap;
