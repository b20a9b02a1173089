//! One step of Adafactor (Shazeer and Stern 2018, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost",
//! algorithms 4 and 5), as `torch.optim.Adafactor` has it.

use super::optimizer::{sample_rate, sample_variance, sum_of_squares, want_alike, want_scalars, with_decay};
use super::require::{takes, want};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::dyn_eq::eq_by_bits;
use crate::error::Result;
use crate::graph::{Builder, Composite, Gradient, Var};
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::ShardingRule;
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;

/// The next parameter and second moment, of which a parameter with two axes or more keeps the means of rows and columns
/// only:
///
/// ```text
/// beta = 1 - step^beta2_decay           alpha = max(eps2, rms(param)) min(lr, step^-0.5)
/// row' = beta row + (1 - beta) mean_columns(grad^2)      column' = beta column + (1 - beta) mean_rows(grad^2)
/// u = grad / sqrt(max(row' column' / max(mean(row'), eps1), eps1^2))
/// param' = param (1 - lr weight_decay) - alpha u / max(1, rms(u) / d)
/// ```
///
/// with `eps1` the distance from 1 to the next f32. `param`, `grad`: f32 `[.., r, c]`; `row`: f32 `[.., r, 1]`; `column`:
/// f32 `[.., 1, c]`; `lr`, `step`: f32 scalars, steps counted from 1; gives `(param', row', column')`. Of a parameter with
/// fewer axes the second moment is whole: takes `param`, `grad`, `v`, `lr`, `step`, gives `(param', v')`.
#[derive(Clone, Copy, Debug)]
pub struct Adafactor {
    /// Exponent of the step in the decay of the second moment; below 0.
    pub beta2_decay: f64,
    /// The least root mean square that the step is relative to.
    pub eps2: f64,
    /// Root mean square above which updates are scaled down.
    pub d: f64,
    /// Decay of the parameter, times the learning rate.
    pub weight_decay: f64,
}

eq_by_bits!(Adafactor { beta2_decay, eps2, d, weight_decay });

impl Adafactor {
    /// The settings of `torch.optim.Adafactor`.
    pub const USUAL: Self = Self { beta2_decay: -0.8, eps2: 1e-3, d: 1.0, weight_decay: 0.0 };

    /// Shapes of the means of rows and of columns of a parameter of this shape, if it has two axes or more.
    pub fn factored(shape: &Shape) -> Option<[Shape; 2]> {
        let rank = shape.rank();
        (rank >= 2).then(|| {
            [rank - 1, rank - 2].map(|axis| {
                let mut of = shape.clone();
                of.0[axis] = 1.into();
                of
            })
        })
    }
}

/// `old + rate (new - old)`.
fn moved(g: &mut Builder, old: Var, new: Var, rate: Var) -> Result<Var> {
    let by = g.sub(new, old)?;
    let by = g.mul(by, rate)?;
    g.add(old, by)
}

/// The root of the mean of squares, f32 of rank 0.
fn rms(g: &mut Builder, x: Var) -> Result<Var> {
    let elements = g.ty(x)?.shape.clone();
    let mut mean = sum_of_squares(g, x)?;
    for extent in &elements.0 {
        mean = g.div_by_dim(mean, extent)?;
    }
    g.sqrt(mean)
}

impl Composite for Adafactor {
    fn name(&self) -> &'static str {
        "adafactor"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let param = inputs.first().ok_or_else(|| takes("param, grad, moments, lr and step", inputs))?;
        want_alike(&["param", "grad"], inputs)?;
        match (Self::factored(&param.shape), inputs) {
            (Some([rows, columns]), [param, _, row, column, _, _]) => {
                want("row", row, DType::F32, rows)?;
                want("column", column, DType::F32, columns)?;
                want_scalars(&["lr", "step"], &inputs[4..])?;
                Ok(vec![param.clone(), row.clone(), column.clone()])
            }
            (None, [param, _, v, _, _]) => {
                want("v", v, DType::F32, param.shape.clone())?;
                want_scalars(&["lr", "step"], &inputs[3..])?;
                Ok(vec![param.clone(), v.clone()])
            }
            (Some(_), _) => Err(takes("param, grad, row, column, lr and step", inputs)),
            (None, _) => Err(takes("param, grad, v, lr and step", inputs)),
        }
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let (param, grad) = (inputs[0], inputs[1]);
        let [lr, step] = [inputs[inputs.len() - 2], inputs[inputs.len() - 1]];
        let eps1 = f64::from(f32::EPSILON);
        let power = g.constant(DType::F32, self.beta2_decay)?;
        let rate = g.pow(step, power)?;
        let square = g.mul(grad, grad)?;
        let rank = g.ty(param)?.shape.rank();
        let (mut moments, estimate) = if let [row, column] = inputs[2..inputs.len() - 2] {
            let shape = g.ty(param)?.shape.clone();
            let mut means = [row, column];
            for (mean, axis) in means.iter_mut().zip([rank - 1, rank - 2]) {
                let sum = g.reduce_sum(square, axis)?;
                let new = g.div_by_dim(sum, &shape.0[axis])?;
                *mean = moved(g, *mean, new, rate)?;
            }
            let whole = g.reduce_sum(means[0], rank - 2)?;
            let whole = g.div_by_dim(whole, &shape.0[rank - 2])?;
            let least = g.constant(DType::F32, eps1)?;
            let whole = g.max(whole, least)?;
            let product = g.mul(means[0], means[1])?;
            (means.to_vec(), g.div(product, whole)?)
        } else {
            let v = moved(g, inputs[2], square, rate)?;
            (vec![v], v)
        };
        let least = g.constant(DType::F32, eps1 * eps1)?;
        let estimate = g.max(estimate, least)?;
        let root = g.sqrt(estimate)?;
        let update = g.div(grad, root)?;

        let one = g.constant(DType::F32, 1.0)?;
        let d = g.constant(DType::F32, self.d)?;
        let size = rms(g, update)?;
        let size = g.div(size, d)?;
        let size = g.max(size, one)?;
        let root_of_step = g.sqrt(step)?;
        let inverse = g.div(one, root_of_step)?;
        let relative = g.min(lr, inverse)?;
        let eps2 = g.constant(DType::F32, self.eps2)?;
        let scale = rms(g, param)?;
        let scale = g.max(scale, eps2)?;
        let alpha = g.mul(scale, relative)?;
        let alpha = g.div(alpha, size)?;
        let change = g.mul(update, alpha)?;
        let kept = with_decay(g, param, lr, self.weight_decay)?;
        let mut outputs = vec![g.sub(kept, change)?];
        outputs.append(&mut moments);
        Ok(outputs)
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let elements = inputs[0].shape.elements();
        // The square and both its sums, the estimate, the update and its square, the parameter's, and the change; a quotient
        // and a root.
        Cost { vector_flops: elements.clone() * 14, special_flops: elements * 3, ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::None
    }

    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        // The means of the whole parameter and of its update set the size of the step.
        Vec::new()
    }
}

pub(super) fn samples(rng: &mut Rng, _dtype: DType) -> Vec<Sample> {
    let decaying = Adafactor { weight_decay: 0.1, ..Adafactor::USUAL };
    let cases: [(Adafactor, &[usize], f64); 6] = [
        (Adafactor::USUAL, &[], 2.0),
        (decaying, &[65], 1.0),
        (Adafactor::USUAL, &[1, 1], 1.0),
        (decaying, &[33, 7], 3.0),
        (Adafactor::USUAL, &[3, 5, 17], 1000.0),
        (decaying, &[64, 48], 10.0),
    ];
    let mut sample = |(op, shape, step): (Adafactor, &[usize], f64)| {
        let mut sample = Sample::new(op).input(rng.normal(DType::F32, shape)).input(rng.normal(DType::F32, shape));
        let moments = match Adafactor::factored(&Shape::new(shape.iter().copied())) {
            Some(shapes) => shapes.map(|of| of.as_const().unwrap_or_default()).to_vec(),
            None => vec![shape.to_vec()],
        };
        for moment in moments {
            sample = sample.input(sample_variance(rng, &moment));
        }
        sample.input(sample_rate()).input(Tensor::float(DType::F32, &[], vec![step]))
    };
    cases.into_iter().map(&mut sample).collect()
}
