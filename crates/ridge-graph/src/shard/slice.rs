//! Cuts whole values into the ranks' shares, and puts shares together: what a loader does with a checkpoint, and a
//! test with its inputs and outputs.

use super::local::{component_place, local_type};
use super::placement::{MeshAxis, Placement};
use crate::tensor::{Data, Tensor, Value};
use crate::why::Why;

/// The share that `rank` has of `value`. Of a value placed as [`Placement::Partial`], the first rank has all and the
/// others have zeros.
///
/// # Errors
/// When the value does not cut as it is placed, saying what would fit, or there is no such rank.
pub fn slice_for_rank(value: &Value, placement: Placement, axis: &MeshAxis, rank: usize) -> Result<Value, Why> {
    if rank >= axis.ranks {
        return Err(format!("`{}` has ranks 0 to {}, not {rank}", axis.name, axis.ranks.saturating_sub(1)));
    }
    let local = local_type(&value.ty(), placement, axis)?;
    match (value, placement) {
        (Value::Stored { .. }, Placement::Partial) => Err("a stored parameter is not a sum".into()),
        (Value::Plain(t), Placement::Partial) if rank > 0 => Ok(Tensor::zeros(t.dtype, &t.shape).into()),
        (_, Placement::Replicate | Placement::Partial) => Ok(value.clone()),
        (Value::Plain(t), Placement::Shard { dim, .. }) => Ok(part(t, dim, axis.ranks, rank).into()),
        (Value::Stored { format, dtype, components, .. }, Placement::Shard { dim, .. }) => {
            let shape = value.ty().shape;
            let cut = |(i, whole): (usize, &Tensor)| match component_place(format, &shape, dim, axis.ranks, i) {
                Some(Placement::Shard { dim, .. }) => Ok(part(whole, dim, axis.ranks, rank)),
                Some(_) => Ok(whole.clone()),
                None => Err(format!("component {i} of {} does not cut along axis {dim}", format.name())),
            };
            Ok(Value::Stored {
                format: format.clone(),
                dtype: *dtype,
                shape: local.shape.as_const().unwrap_or_default(),
                components: components.iter().enumerate().map(cut).collect::<Result<_, _>>()?,
            })
        }
    }
}

/// The whole tensor of which each rank has one of `shares`.
///
/// # Panics
/// When there are no shares.
pub fn unite(shares: &[Tensor], placement: Placement) -> Tensor {
    let first = &shares[0];
    match placement {
        Placement::Replicate => first.clone(),
        Placement::Partial => {
            let data = shares[1..].iter().fold(first.data.clone(), |sum, t| match (sum, &t.data) {
                (Data::Float(a), Data::Float(b)) => Data::Float(a.iter().zip(b).map(|(x, y)| x + y).collect()),
                (Data::Int(a), Data::Int(b)) => Data::Int(a.iter().zip(b).map(|(x, y)| x + y).collect()),
                (sum, _) => sum,
            });
            Tensor { data, ..first.clone() }
        }
        Placement::Shard { dim, .. } => {
            let mut shape = first.shape.clone();
            shape[dim] = shares.iter().map(|t| t.shape[dim]).sum();
            let outer: usize = shape[..dim].iter().product();
            let rows = |t: &Tensor| t.shape[dim..].iter().product::<usize>();
            let spans = || (0..outer).flat_map(|o| shares.iter().map(move |t| (t, o * rows(t)..(o + 1) * rows(t))));
            let data = match first.data {
                Data::Float(_) => Data::Float(spans().flat_map(|(t, r)| t.floats()[r].to_vec()).collect()),
                Data::Int(_) => Data::Int(spans().flat_map(|(t, r)| t.ints()[r].to_vec()).collect()),
            };
            Tensor { dtype: first.dtype, shape, data }
        }
    }
}

fn part(whole: &Tensor, dim: usize, ranks: usize, rank: usize) -> Tensor {
    fn spans<T: Copy>(values: &[T], row: usize, (start, len): (usize, usize)) -> Vec<T> {
        values.chunks(row.max(1)).flat_map(|c| c[start..start + len].iter().copied()).collect()
    }
    let mut shape = whole.shape.clone();
    shape[dim] /= ranks;
    let row: usize = whole.shape[dim..].iter().product();
    let len = row / ranks;
    let span = (rank * len, len);
    let data = match &whole.data {
        Data::Float(v) => Data::Float(spans(v, row, span)),
        Data::Int(v) => Data::Int(spans(v, row, span)),
    };
    Tensor { dtype: whole.dtype, shape, data }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::format::all;
    use crate::sample::Rng;

    #[test]
    fn shares_put_together_are_the_whole() {
        let axis = MeshAxis::new("tp", 3);
        let whole = Rng::new(1).normal(DType::F32, &[6, 2, 9]);
        for placement in [Placement::shard(0), Placement::shard(2), Placement::Replicate, Placement::Partial] {
            let shares: Vec<Tensor> = (0..3)
                .map(|r| slice_for_rank(&whole.clone().into(), placement, &axis, r).unwrap().tensor().clone())
                .collect();
            assert_eq!(unite(&shares, placement), whole, "{placement}");
        }
    }

    #[test]
    fn a_share_of_a_stored_parameter_is_the_stored_share() {
        let axis = MeshAxis::new("tp", 2);
        let whole = Rng::new(2).normal(DType::F32, &[4, 1024]);
        for format in all() {
            for placement in [Placement::shard(0), Placement::shard(1)] {
                let whole = Value::Plain(whole.clone());
                let share = slice_for_rank(&whole, placement, &axis, 1).unwrap();
                let stored = slice_for_rank(&Value::stored(whole.tensor(), &format), placement, &axis, 1).unwrap();
                assert_eq!(stored, Value::stored(share.tensor(), &format), "{} {placement}", format.name());
            }
        }
    }

    #[test]
    fn a_cut_through_a_block_says_what_fits() {
        let whole = Value::stored(&Rng::new(3).normal(DType::F32, &[4, 96]), &all()[0]);
        let why = slice_for_rank(&whole, Placement::shard(1), &MeshAxis::new("tp", 2), 0).unwrap_err();
        assert!(why.contains("3 pieces of 32") && why.contains("divides 3"), "{why}");
    }
}
