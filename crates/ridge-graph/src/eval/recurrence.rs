//! Linear recurrences whose state is a matrix.

use super::precision::Precision;
use crate::tensor::{Data, Tensor};
use crate::why::Why;

/// `y` and the state after the step; see [`Prim::LinearRecurrence`](crate::Prim::LinearRecurrence).
pub(super) fn run(inputs: &[&Tensor], precision: Precision) -> Result<[Data; 2], Why> {
    let [q, k, v, decay, state, starts, low_rank @ ..] = inputs else { return Err("takes six inputs or eight".into()) };
    let round = |x: f64| if precision == Precision::Exact { x } else { f64::from(x as f32) };
    let (tokens, groups, key) = (q.shape[0], q.shape[1], q.shape[2]);
    let (heads, value, decays) = (v.shape[1], v.shape[2], decay.shape[2]);
    let (mut y, mut after) = (vec![0.0; v.len()], state.floats().to_vec());
    let order = precision.order(key);
    // `x^T S`, a sum over the keys.
    let read = |x: &[f64], s: &[f64], column: usize| {
        order.clone().fold(0.0, |sum, i| round(sum + round(x[i] * s[i * value + column])))
    };
    for (row, bounds) in starts.ints().windows(2).enumerate() {
        let of_row = bounds[0].max(0) as usize..(bounds[1].max(0) as usize).min(tokens);
        for head in 0..heads {
            let s = &mut after[(row * heads + head) * key * value..][..key * value];
            for token in of_row.clone() {
                let at = token * heads + head;
                let of_group = (token * groups + head * groups / heads) * key;
                let (q, k) = (&q.floats()[of_group..][..key], &k.floats()[of_group..][..key]);
                let v = &v.floats()[at * value..][..value];
                let kept = |i: usize| round(decay.floats()[at * decays + if decays == 1 { 0 } else { i }].exp());
                let of_head = |x: &Tensor, i: usize| x.floats()[at * key + i];
                for column in 0..value {
                    let erased = low_rank.first().map(|erase| read(&erase.floats()[at * key..][..key], s, column));
                    for i in 0..key {
                        let x = &mut s[i * value + column];
                        *x = round(kept(i) * *x);
                        if let (Some(erased), Some(write)) = (erased, low_rank.get(1)) {
                            *x = round(*x + round(of_head(write, i) * erased));
                        }
                        *x = round(*x + round(k[i] * v[column]));
                    }
                    y[at * value + column] = read(q, s, column);
                }
            }
        }
    }
    Ok([Data::Float(y), Data::Float(after)])
}
