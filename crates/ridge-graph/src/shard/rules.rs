//! The rules of any op.

use super::placement::{MeshAxis, ShardingRule};
use super::prim;
use crate::graph::Op;
use crate::types::Type;

/// Every rule of an op, in the order in which they are tried; that all is replicated is the last. A call has the rules
/// of what it calls, and gives none but the last here.
pub fn rules(op: &Op, inputs: &[Type], outputs: &[Type], axis: &MeshAxis) -> Vec<ShardingRule> {
    let mut rules = match op {
        Op::Prim(p) => prim::rules(p, inputs, outputs, axis),
        Op::Composite(c) => c.shard(inputs, outputs),
        Op::Arg(_) | Op::Call(_) | Op::Group(_) => Vec::new(),
    };
    rules.push(ShardingRule::replicated(inputs.len(), outputs.len()));
    rules
}
