//! Where values are over the ranks of a mesh axis, and the rules by which ops run on shares.

use std::fmt;
use std::sync::Arc;

use crate::shape::Shape;

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
///
/// A rule of cuts in multiples of 1 says that the op treats what lies along these axes one by one, wherever it lies, and
/// [`take_rows_early`](crate::passes::take_rows_early) takes it so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardingRule {
    /// One for each input.
    pub inputs: Vec<Placement>,
    /// One for each output.
    pub outputs: Vec<Placement>,
}

impl ShardingRule {
    /// Every input and output whole on every rank.
    pub fn replicated(inputs: usize, outputs: usize) -> Self {
        Self { inputs: vec![Placement::Replicate; inputs], outputs: vec![Placement::Replicate; outputs] }
    }
}

impl fmt::Display for ShardingRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}) -> ({})", list(&self.inputs), list(&self.outputs))
    }
}

pub(super) fn list(placements: &[Placement]) -> String {
    placements.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Rules for an op that treats the rows of its first input independently: each axis but the last can be cut in the
/// first input and in every output, the other inputs replicated. `inputs` and `outputs` are their numbers.
pub fn rowwise_rules(shape: &Shape, inputs: usize, outputs: usize) -> Vec<ShardingRule> {
    (0..shape.rank().saturating_sub(1))
        .map(|dim| {
            let cut = Placement::Shard { dim, multiple: 1 };
            let mut places = vec![Placement::Replicate; inputs];
            places[0] = cut;
            ShardingRule { inputs: places, outputs: vec![cut; outputs] }
        })
        .collect()
}
