//! Placing a graph on one axis of a device mesh. Applied once for each axis; every application gives an ordinary
//! graph for one rank, with the collectives that it needs.

use crate::types::Shape;

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

/// One way an op runs on shares: placements of its inputs, and those its outputs then have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// One for each input.
    pub inputs: Vec<Placement>,
    /// One for each output.
    pub outputs: Vec<Placement>,
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
