//! Placing a graph on one axis of a device mesh. Applied once for each axis; every application gives an ordinary
//! graph for one rank, with the collectives that it needs.
//!
//! Placements of the main function's arguments are given; those of all other values follow. For each node the rules
//! of its op ([`rules`]) say on which placements it can run; the first that its inputs have already is taken, or else
//! the one that the fewest bytes of communication lead to. Propagation fills in and verifies. It never searches:
//! a better plan for the whole graph comes from placing arguments otherwise.
//!
//! Read `shard/prim.rs` for the primitives' rules, `shard/propagate.rs` for how one is chosen, `shard/convert.rs`
//! for what brings a value from one placement to another, `shard/local.rs` for shapes and attributes of one rank's
//! share, and `shard/slice.rs` for cutting tensors.

mod convert;
mod local;
mod prim;
mod propagate;
mod reshape;
mod slice;

use std::fmt;
use std::sync::Arc;

use crate::error::{GraphError, Result};
use crate::graph::{Arg, Graph, Op, Output};
use crate::passes::respecialise::respecialise;
use crate::types::{Shape, Type};

pub use slice::{slice_for_rank, unite};

/// One axis of a mesh of devices, such as `tp` of 8 ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshAxis {
    /// Its name, which its collectives carry.
    pub name: Arc<str>,
    /// How many ranks it has.
    pub ranks: usize,
}

impl MeshAxis {
    /// The axis called `name` of `ranks` ranks.
    pub fn new(name: &str, ranks: usize) -> Self {
        Self { name: name.into(), ranks }
    }
}

/// Where the elements of a value are, over the ranks of one mesh axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Every rank has the whole value.
    Replicate,
    /// Rank `r` of `n` has the `r`-th of `n` equal slices along axis `dim`, cut at multiples of `multiple` elements.
    Shard {
        /// The axis that is cut.
        dim: usize,
        /// Elements that stay together, such as a head's.
        multiple: usize,
    },
    /// Every rank has a summand; the value is their sum.
    Partial,
}

impl Placement {
    /// Cut along axis `dim` between any two elements.
    pub const fn shard(dim: usize) -> Self {
        Self::Shard { dim, multiple: 1 }
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replicate => f.write_str("replicate"),
            Self::Shard { dim, multiple: 1 } => write!(f, "shard({dim})"),
            Self::Shard { dim, multiple } => write!(f, "shard({dim} by {multiple})"),
            Self::Partial => f.write_str("partial"),
        }
    }
}

/// One way an op runs on shares: placements of its inputs, and those its outputs then have. The `multiple` of an
/// input is what its share must be a multiple of; where the input's own multiple is larger, those of the outputs grow
/// by the same factor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// One for each input.
    pub inputs: Vec<Placement>,
    /// One for each output.
    pub outputs: Vec<Placement>,
}

impl Rule {
    /// Every input and output whole on every rank.
    pub fn replicated(inputs: usize, outputs: usize) -> Self {
        Self { inputs: vec![Placement::Replicate; inputs], outputs: vec![Placement::Replicate; outputs] }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}) -> ({})", list(&self.inputs), list(&self.outputs))
    }
}

fn list(placements: &[Placement]) -> String {
    placements.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Rules for an op that treats the rows of its first input independently: each axis but the last can be cut in the
/// first input and in every output, the other inputs replicated. `inputs` and `outputs` are their numbers.
pub fn rowwise_rules(shape: &Shape, inputs: usize, outputs: usize) -> Vec<Rule> {
    (0..shape.rank().saturating_sub(1))
        .map(|dim| {
            let cut = Placement::Shard { dim, multiple: 1 };
            let mut places = vec![Placement::Replicate; inputs];
            places[0] = cut;
            Rule { inputs: places, outputs: vec![cut; outputs] }
        })
        .collect()
}

/// Every rule of an op, in the order in which they are tried; that all is replicated is the last. A call has the rules
/// of what it calls, and gives none but the last here.
pub fn rules(op: &Op, inputs: &[Type], outputs: &[Type], axis: &MeshAxis) -> Vec<Rule> {
    let mut rules = match op {
        Op::Prim(p) => prim::rules(p, inputs, outputs, axis),
        Op::Composite(c) => c.shard(inputs, outputs),
        Op::Arg(_) | Op::Call(_) | Op::Group(_) => Vec::new(),
    };
    rules.push(Rule::replicated(inputs.len(), outputs.len()));
    rules
}

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
        let replicated = Rule::replicated(main.args.len(), main.outputs.len());
        return Ok(Sharded { graph: graph.clone(), args: replicated.inputs, outputs: replicated.outputs });
    }
    let mut args = Vec::with_capacity(main.args.len());
    for arg in &main.args {
        let placement = place(arg);
        local::local_type(&arg.ty, placement, axis).map_err(|why| GraphError::usage(&arg.name, why))?;
        args.push(placement);
    }
    let (graph, outputs) = respecialise(graph, args.clone(), &propagate::Sharder { axis, gather })?;
    Ok(Sharded { graph, args, outputs })
}
