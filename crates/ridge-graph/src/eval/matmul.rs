//! Matrix products.

use super::precision::Precision;
use crate::tensor::{Data, Tensor};
use crate::why::Why;

/// The product of the last two axes, over equal leading ones: f64 elements if an operand is float, summed in f32 if
/// the precision is rounded; else integers.
pub(super) fn matmul(a: &Tensor, b: &Tensor, trans_a: bool, trans_b: bool, precision: Precision) -> Result<Data, Why> {
    let (Some(&[a0, a1]), Some(&[b0, b1])) = (a.shape.last_chunk(), b.shape.last_chunk()) else {
        return Err("operands need two axes".into());
    };
    let (m, k) = if trans_a { (a1, a0) } else { (a0, a1) };
    let n = if trans_b { b0 } else { b1 };
    let batch = a.shape[..a.shape.len() - 2].iter().product();
    let size = Size { batch, m, k, n, order: precision.order(k).collect() };
    Ok(match (&a.data, &b.data, precision) {
        (Data::Int(a), Data::Int(b), _) => {
            let product = |a: i64, b: i64, sum: i64| sum.wrapping_add(a.wrapping_mul(b));
            Data::Int(size.product(a, b, trans_a, trans_b, product))
        }
        (_, _, Precision::Exact) => {
            Data::Float(size.product(&floats(a), &floats(b), trans_a, trans_b, |a, b, sum| sum + a * b))
        }
        (_, _, Precision::Rounded | Precision::Reordered(_)) => {
            let narrow = |t: &Tensor| floats(t).into_iter().map(|x| x as f32).collect::<Vec<f32>>();
            let (a, b) = (narrow(a), narrow(b));
            let sums = if precision.fuses_products() {
                let fused = |a: f32, b, sum| (f64::from(sum) + f64::from(a) * f64::from(b)) as f32;
                size.product(&a, &b, trans_a, trans_b, fused)
            } else {
                size.product(&a, &b, trans_a, trans_b, |a, b, sum| sum + a * b)
            };
            Data::Float(sums.into_iter().map(f64::from).collect())
        }
    })
}

fn floats(t: &Tensor) -> Vec<f64> {
    match &t.data {
        Data::Float(v) => v.clone(),
        Data::Int(v) => v.iter().map(|x| *x as f64).collect(),
    }
}

struct Size {
    batch: usize,
    m: usize,
    k: usize,
    n: usize,
    /// The order in which each sum takes its terms.
    order: Vec<usize>,
}

impl Size {
    /// Each sum from the default.
    fn product<T: Copy + Default>(
        &self,
        a: &[T],
        b: &[T],
        trans_a: bool,
        trans_b: bool,
        step: impl Fn(T, T, T) -> T,
    ) -> Vec<T> {
        let &Self { batch, m, k, n, ref order } = self;
        let mut out = vec![T::default(); batch * m * n];
        for p in 0..batch {
            let a = turned(&a[p * m * k..][..m * k], m, k, trans_a);
            let b = turned(&b[p * k * n..][..k * n], k, n, trans_b);
            for i in 0..m {
                let row = &mut out[(p * m + i) * n..][..n];
                for &l in order {
                    let x = a[i * k + l];
                    for (sum, &y) in row.iter_mut().zip(&b[l * n..][..n]) {
                        *sum = step(x, y, *sum);
                    }
                }
            }
        }
        out
    }
}

/// A `[rows, cols]` matrix, from its transposed if so stored.
fn turned<T: Copy>(matrix: &[T], rows: usize, cols: usize, transposed: bool) -> Vec<T> {
    if transposed { (0..rows * cols).map(|i| matrix[i % cols * rows + i / cols]).collect() } else { matrix.to_vec() }
}
