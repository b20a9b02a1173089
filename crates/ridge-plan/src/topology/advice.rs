//! Placements of a layout beside each other: the best, and what it is compared with.

use ridge_hw::topology::{Matrix, PathType};
use serde::Serialize;

use super::degrees::Degrees;
use super::links::Rates;
use super::place::{PlacementSearch, RankPlacement};
use crate::error::PlanError;

/// Ranks on the GPUs of `nodes` machines like `matrix`.
#[derive(Clone, Debug, Serialize)]
pub struct PlacementAdvice {
    /// Degrees.
    pub degrees: Degrees,
    /// Machines.
    pub nodes: usize,
    /// Ranks of each.
    pub ranks_per_node: usize,
    /// Which rank of a node sits where, and what each axis has.
    pub best: RankPlacement,
    /// The same with ranks numbered the other way round, pipeline parallelism innermost.
    pub reversed: RankPlacement,
    /// The same with the GPUs of a node in the order that suits the axes least.
    pub shuffled: RankPlacement,
}

impl PlacementAdvice {
    /// PlacementAdvice for these degrees.
    ///
    /// # Errors
    /// [`PlanError::Setting`] where the degrees do not fill the machines.
    pub fn new(matrix: &Matrix, rates: &Rates, degrees: Degrees, nodes: usize) -> Result<Self, PlanError> {
        if nodes == 0 {
            return Err(PlanError::setting("nodes", 0, "is not a number of machines", "set 1 or more"));
        }
        let local = degrees.check(matrix.gpus.len(), nodes)?;
        let place = PlacementSearch { matrix, rates, degrees, local, nodes };
        Ok(Self {
            degrees,
            nodes,
            ranks_per_node: local,
            best: place.best(),
            reversed: place.reversed(),
            shuffled: place.shuffled(),
        })
    }
}

/// Ways of a machine's GPU pairs, each with how many have it, the shortest first.
pub fn ways(matrix: &Matrix) -> Vec<(PathType, usize)> {
    let mut all: Vec<PathType> = (0..matrix.gpus.len()).flat_map(|i| matrix.between[i][..i].iter().copied()).collect();
    // More links before fewer.
    all.sort_by_key(|w| if let PathType::NvLink(n) = w { (*w.min(&PathType::Pix), u32::MAX - n) } else { (*w, 0) });
    all.chunk_by(|a, b| a == b).map(|same| (same[0], same.len())).collect()
}
