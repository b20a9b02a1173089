//! The graph of one rank of a mesh axis.

use super::local::local_type;
use super::placement::{MeshAxis, Placement, ShardingRule};
use super::propagate::Sharder;
use crate::error::{GraphError, Result};
use crate::graph::{Arg, Graph, Output};
use crate::passes::respecialise::respecialise;

/// A graph for each rank of a mesh axis, and where its main function's arguments and outputs are.
#[derive(Clone, Debug)]
pub struct Sharded {
    /// The graph of one rank, the same for all.
    pub graph: Graph,
    /// Placements of the main function's arguments, in their order.
    pub args: Vec<Placement>,
    /// Placements of the main function's outputs, in their order.
    pub outputs: Vec<Placement>,
}

/// The graph of one rank of `axis`, when the main function's arguments are placed by `place`. Outputs that come out as
/// summands are reduced; those that come out cut are gathered where `gather` holds, and else reported as they are.
/// States come back placed as they came.
///
/// # Errors
/// When an argument cannot be cut as it is placed, naming it, its shape, the ranks and what would fit; when an op has
/// no rule for the placements of its inputs, naming op, scope, placements and rules.
pub fn shard(
    graph: &Graph,
    axis: &MeshAxis,
    place: &dyn Fn(&Arg) -> Placement,
    gather: &dyn Fn(&Output) -> bool,
) -> Result<Sharded> {
    if axis.ranks == 0 {
        return Err(GraphError::usage(
            "shard",
            format!("mesh axis `{}` has no ranks; give it one at least", axis.name),
        ));
    }
    let main = graph.main();
    if axis.ranks == 1 {
        let replicated = ShardingRule::replicated(main.args.len(), main.outputs.len());
        return Ok(Sharded { graph: graph.clone(), args: replicated.inputs, outputs: replicated.outputs });
    }
    let mut args = Vec::with_capacity(main.args.len());
    for arg in &main.args {
        let placement = place(arg);
        local_type(&arg.ty, placement, axis).map_err(|why| GraphError::usage(&arg.name, why))?;
        args.push(placement);
    }
    let (graph, outputs) = respecialise(graph, args.clone(), &Sharder { axis, gather, seen: None })?;
    Ok(Sharded { graph, args, outputs })
}
