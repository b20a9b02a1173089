//! Each rank's share of the parameters of a model that is cut over ranks.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use ridge_graph::shard::{MeshAxis, Placement, component_place};
use ridge_graph::{DType, Type};
use ridge_runtime::WeightData;

use crate::error::{ModelError, Result};

/// How the parameters of a model are cut over the ranks of a mesh axis.
#[derive(Clone, Debug)]
pub struct Shares {
    axis: MeshAxis,
    /// The whole parameter, and where it is.
    whole: HashMap<Arc<str>, (Type, Placement)>,
}

impl Shares {
    /// Parameters that are so as a whole, and where they are.
    pub(crate) fn new(axis: MeshAxis, whole: HashMap<Arc<str>, (Type, Placement)>) -> Self {
        Self { axis, whole }
    }

    /// The axis that it is cut over.
    pub fn axis(&self) -> &MeshAxis {
        &self.axis
    }

    /// The whole of the parameter called `name`.
    pub(crate) fn whole(&self, name: &str) -> Option<&Type> {
        self.whole.get(name).map(|(ty, _)| ty)
    }

    /// Is the parameter the sum of what the ranks have?
    pub(crate) fn is_summand(&self, name: &str) -> bool {
        self.whole.get(name).is_some_and(|(_, placement)| *placement == Placement::Partial)
    }

    /// The share that `rank` has of the parameter called `name`, of which `parts` are the whole: the bytes of its
    /// components. Where the share lies in one piece, nothing is copied.
    ///
    /// # Errors
    /// When there is no such parameter, or its format is not cut so.
    pub(crate) fn of(&self, name: &str, parts: &[WeightData], rank: usize) -> Result<Vec<WeightData>> {
        let refused = |why: String| ModelError::Share { name: name.to_owned(), why };
        let (ty, placement) = self.whole.get(name).ok_or_else(|| refused("the model has no such weight".into()))?;
        let dim = match placement {
            Placement::Replicate => return Ok(parts.to_vec()),
            Placement::Partial if rank == 0 => return Ok(parts.to_vec()),
            Placement::Partial => {
                return Ok(parts.iter().map(|part| WeightData::Owned(vec![0; part.bytes().len()])).collect());
            }
            Placement::Shard { dim, .. } => *dim,
        };
        let ranks = self.axis.ranks;
        let slice = |(shape, dtype): (Vec<usize>, DType), dim: usize, part: &WeightData| {
            let outer: usize = shape[..dim].iter().product();
            let row = shape[dim..].iter().product::<usize>() * dtype.size_bytes();
            share(part, outer, row, (rank, ranks))
        };
        let symbolic = || refused("its extents depend on a symbol".into());
        match &ty.format {
            None => {
                let shape = ty.shape.as_const().ok_or_else(symbolic)?;
                Ok(parts.iter().map(|part| slice((shape.clone(), ty.dtype), dim, part)).collect())
            }
            Some(format) => {
                let components = format.components(&ty.shape).into_iter().zip(parts).enumerate();
                components
                    .map(|(i, (component, part))| {
                        let shape = component.shape.as_const().ok_or_else(symbolic)?;
                        match component_place(format, &ty.shape, dim, ranks, i) {
                            Some(Placement::Shard { dim, .. }) => Ok(slice((shape, component.dtype), dim, part)),
                            Some(_) => Ok(part.clone()),
                            None => Err(refused(format!("{} does not cut along axis {dim}", format.name()))),
                        }
                    })
                    .collect()
            }
        }
    }
}

/// The share of one rank of `outer` rows of `row` bytes, each cut over the ranks.
fn share(part: &WeightData, outer: usize, row: usize, (rank, ranks): (usize, usize)) -> WeightData {
    let bytes = row / ranks;
    let of = |row_index: usize| -> Range<usize> {
        let start = row_index * row + rank * bytes;
        start..start + bytes
    };
    match part {
        WeightData::Shared(owner, range) if outer == 1 => {
            let mine = of(0);
            WeightData::Shared(Arc::clone(owner), range.start + mine.start..range.start + mine.end)
        }
        _ => {
            let whole = part.bytes();
            let mut mine = Vec::with_capacity(outer * bytes);
            (0..outer).for_each(|row| mine.extend_from_slice(&whole[of(row)]));
            WeightData::Owned(mine)
        }
    }
}
