//! The gradient of linears that share their input: its cotangent is one sum over all of them.

use super::linear_gradient::{LinearBackward, LinearInputGradient, LinearWeightGradient, SumRows};
use super::require::takes;
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Var};
use crate::poly::Poly;
use crate::sample::{Rng, Sample};
use crate::shard::{Placement, ShardingRule};
use crate::types::Type;
use crate::why::Why;

/// Gradient of [`LinearGroup`](super::LinearGroup), from [`LinearGroupInputGradient`] and the ops of a single linear.
///
/// `x`: `[.., K]`, then `count` weights `[N, K]`, then if `biases` as many biases `[N]`, as there, then a cotangent `[.., N]`
/// of each output. Gives the cotangents of x, the weights and the biases, plain, of their logical dtypes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearGroupBackward {
    /// Number of linears.
    pub count: usize,
    /// Has each a bias?
    pub biases: bool,
}

/// The sum over `count` linears of `dy w`, each product summed in f32 at least: the cotangent of the input that they share.
///
/// `count` cotangents `[.., N]` of one dtype and the same rows, then as many weights `[N, K]` of any float dtype or stored in
/// a format; gives `[.., K]` of the dtype of the cotangents. The sum so far may be rounded to that dtype between products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearGroupInputGradient {
    /// Number of linears.
    pub count: usize,
}

impl LinearGroupBackward {
    /// The inputs that belong to linear `i`, as [`LinearBackward`] takes them.
    fn one<T: Clone>(&self, inputs: &[T], i: usize) -> Vec<T> {
        let parameters = if self.biases { vec![1 + i, 1 + self.count + i] } else { vec![1 + i] };
        let dy = inputs.len() - self.count + i;
        [0].into_iter().chain(parameters).chain([dy]).map(|at| inputs[at].clone()).collect()
    }

    fn takes(&self, inputs: &[Type]) -> Result<(), Why> {
        let (n, each) = (self.count, if self.biases { 3 } else { 2 });
        if n == 0 || inputs.len() != 1 + n * each {
            let biases = if self.biases { format!(", {n} biases") } else { String::new() };
            return Err(takes(&format!("x, {n} weights{biases} and {n} cotangents"), inputs));
        }
        Ok(())
    }
}

impl Composite for LinearGroupBackward {
    fn name(&self) -> &'static str {
        "linear_group_backward"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        self.takes(inputs)?;
        let of = LinearBackward { bias: self.biases };
        for i in 0..self.count {
            of.infer(&self.one(inputs, i)).map_err(|why| format!("linear {}: {why}", i + 1))?;
        }
        Ok(inputs[..inputs.len() - self.count].iter().map(Type::plain).collect())
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let n = self.count;
        let (x, cotangents) = (inputs[0], &inputs[inputs.len() - n..]);
        let dx = g.linear_group_input_gradient(cotangents, &inputs[1..=n])?;
        let mut all = vec![g.cast(dx, g.ty(x)?.dtype)?];
        for (w, dy) in inputs[1..=n].iter().zip(cotangents) {
            let dtype = g.ty(*w)?.dtype;
            all.extend(g.composite(LinearWeightGradient { dtype }, &[*dy, x])?);
        }
        for (bias, dy) in inputs[1 + n..].iter().zip(cotangents).take(if self.biases { n } else { 0 }) {
            let dtype = g.ty(*bias)?.dtype;
            all.extend(g.composite(SumRows { dtype }, &[*dy])?);
        }
        Ok(all)
    }

    fn is_shorthand(&self) -> bool {
        true
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let of = LinearBackward { bias: self.biases };
        let mut cost = Cost::moving(inputs, outputs);
        for i in 0..self.count {
            let one = of.cost(&self.one(inputs, i), &[]);
            cost.matrix_flops += &one.matrix_flops;
            cost.vector_flops += &one.vector_flops;
        }
        cost
    }
}

impl Composite for LinearGroupInputGradient {
    fn name(&self) -> &'static str {
        "linear_group_input_gradient"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let n = self.count;
        if n == 0 || inputs.len() != 2 * n {
            return Err(takes(&format!("{n} cotangents and {n} weights"), inputs));
        }
        let mut first = None;
        for (i, (dy, w)) in inputs[..n].iter().zip(&inputs[n..]).enumerate() {
            let mut dx = LinearInputGradient
                .infer(&[dy.clone(), w.clone()])
                .map_err(|why| format!("linear {}: {why}", i + 1))?;
            let dx = dx.swap_remove(0);
            match &first {
                Some(first) if *first != dx => {
                    return Err(format!("linear {} gives {dx}, and the first gives {first}", i + 1));
                }
                Some(_) => {}
                None => first = Some(dx),
            }
        }
        Ok(first.into_iter().collect())
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let (cotangents, weights) = inputs.split_at(self.count);
        let mut sum = None;
        for (dy, w) in cotangents.iter().zip(weights) {
            let dx = g.composite(LinearInputGradient, &[*dy, *w])?[0];
            sum = Some(match sum {
                Some(sum) => g.add(sum, dx)?,
                None => dx,
            });
        }
        Ok(sum.into_iter().collect())
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let mut cost = Cost::moving(inputs, outputs);
        for w in &inputs[self.count..] {
            cost.matrix_flops += &(&outputs[0].shape.elements() * &(Poly::from(&w.shape.0[0]) * 2));
        }
        cost
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let (rank, whole, cut) = (inputs[0].shape.rank(), Placement::Replicate, Placement::shard);
        let rule = |dy, w, dx| ShardingRule {
            inputs: [vec![dy; self.count], vec![w; self.count]].concat(),
            outputs: vec![dx],
        };
        let mut rules = vec![rule(cut(rank - 1), cut(0), Placement::Partial), rule(whole, cut(1), cut(rank - 1))];
        rules.extend((0..rank - 1).map(|axis| rule(cut(axis), whole, cut(axis))));
        rules
    }
}

impl Builder {
    /// The cotangent of the input of several linears; see [`LinearGroupInputGradient`].
    ///
    /// # Errors
    /// When a weight does not follow its cotangent, or the products differ in type.
    pub fn linear_group_input_gradient(&mut self, cotangents: &[Var], weights: &[Var]) -> Result<Var> {
        let op = LinearGroupInputGradient { count: cotangents.len() };
        Ok(self.composite(op, &[cotangents, weights].concat())?[0])
    }
}

/// Rows, K, and N of each linear.
const CASES: [(&[usize], usize, &[usize]); 7] = [
    (&[0], 8, &[4, 4]),
    (&[1], 1, &[1]),
    (&[3], 0, &[2, 5]),
    (&[], 7, &[3, 3, 1]),
    (&[2, 3], 40, &[64, 16, 16]),
    (&[230], 35, &[13, 21]),
    (&[5], 300, &[33, 0, 40]),
];

fn rows(leading: &[usize], last: usize) -> Vec<usize> {
    [leading, &[last]].concat()
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let sample = |(i, (leading, k, outs)): (usize, (&[usize], usize, &[usize]))| {
        let biases = i % 2 == 1;
        let mut sample = Sample::new(LinearGroupBackward { count: outs.len(), biases });
        sample = sample.input(rng.normal(dtype, &rows(leading, k)));
        sample = outs.iter().fold(sample, |sample, n| sample.input(rng.normal(dtype, &[*n, k])));
        if biases {
            sample = outs.iter().fold(sample, |sample, n| sample.input(rng.normal(DType::F32, &[*n])));
        }
        outs.iter().fold(sample, |sample, n| sample.input(rng.normal(dtype, &rows(leading, *n))))
    };
    CASES.into_iter().enumerate().map(sample).collect()
}

pub(super) fn samples_input(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let cases = CASES.into_iter().chain([(&[9][..], 50, &[20, 11][..])]).enumerate();
    let sample = |(i, (leading, k, outs)): (usize, (&[usize], usize, &[usize]))| {
        let weight = if i == CASES.len() { DType::BF16 } else { dtype };
        let sample = Sample::new(LinearGroupInputGradient { count: outs.len() });
        let sample = outs.iter().fold(sample, |sample, n| sample.input(rng.normal(dtype, &rows(leading, *n))));
        outs.iter().fold(sample, |sample, n| sample.input(rng.normal(weight, &[*n, k])))
    };
    cases.map(sample).collect()
}
