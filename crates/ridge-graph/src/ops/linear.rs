//! Matrix product with a parameter, and several that share their input.

use super::linear_gradient::LinearBackward;
use super::linear_group_gradient::LinearGroupBackward;
use super::require::{flat, takes, want_floats, want_weight};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::{GraphError, Result};
use crate::format::{self, CodeType, FormatRef, Q2K, Q4K, Q6K, Q8_0, ScaleLayout, ScaledFormat};
use crate::graph::{Builder, Composite, CompositeRef, Gradient, Saved, Var};
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule, rowwise_rules};
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;
use crate::work::Work;

/// `x w^T + bias`, summed in f32 at least and rounded once.
///
/// `x`: `[.., K]` and `w`: `[N, K]`, each of any float dtype or stored in a format, `bias`: `[N]` of any float dtype; gives
/// a plain `[.., N]` of the logical dtype of `x`. An x in a format is what [`Quantize`](super::Quantize) gives: its values
/// are multiplied as they decode to f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Linear {
    /// Is there a third input to add?
    pub bias: bool,
}

/// [`Linear`] as a differentiated graph has it: of many rows, whose bits need not be those that a row has alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearForward {
    /// Is there a third input to add?
    pub bias: bool,
}

/// [`Linear`]s of one input, which is read once: what passes make of a layer's q, k and v, or gate and up.
///
/// `x`, then `count` weights, then if `biases` as many biases; gives `count` outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearGroup {
    /// Number of linears.
    pub count: usize,
    /// Has each a bias?
    pub biases: bool,
}

/// [`LinearGroup`] as a differentiated graph has it: of many rows, whose bits need not be those that a row has alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearGroupForward(pub LinearGroup);

fn infer_one(x: &Type, w: &Type, bias: Option<&Type>, nth: &str) -> Result<Type, Why> {
    want_weight(&format!("w{nth}"), w, 2, "[out, in]")?;
    let (out, inner) = (&w.shape.0[0], &w.shape.0[1]);
    if x.shape.rank() == 0 || x.shape.last() != *inner {
        return Err(format!("w{nth} must be [out, {}] to follow x, got {w}", x.shape.last()));
    }
    if let Some(b) = bias {
        want_floats(&format!("bias{nth}"), b, 1, &format!("[{out}]"))?;
        if b.shape.0[0] != *out {
            return Err(format!("bias{nth} must be [{out}], got {b}"));
        }
    }
    let mut shape = x.shape.clone();
    if let Some(last) = shape.0.last_mut() {
        last.clone_from(out);
    }
    Ok(Type::tensor(x.dtype, shape))
}

fn check_x(x: &Type) -> Result<(), Why> {
    if !x.dtype.is_float() || x.state || x.shape.rank() == 0 {
        return Err(format!("x must be a float tensor [.., in], plain or stored in a format, got {x}"));
    }
    flat(&x.shape.0[..x.shape.rank() - 1]).map_err(|why| format!("x {x}: {why}"))?;
    Ok(())
}

fn cost(weights: &[Type], inputs: &[Type], outputs: &[Type], biases: bool) -> Cost {
    let mut cost = Cost::moving(inputs, outputs);
    for (w, y) in weights.iter().zip(outputs) {
        let inner = crate::Poly::from(&w.shape.0[1]);
        cost.matrix_flops += &(&y.shape.elements() * &(inner * 2));
        if biases {
            cost.vector_flops += &y.shape.elements();
        }
    }
    cost
}

/// Column parallel, row parallel (biases as summands, since every rank adds its own), then rows of `x`. Where formats keep
/// elements together, only what they allow is cut.
fn rules(x: &Shape, count: usize, biases: bool) -> Vec<ShardingRule> {
    let last = x.rank().saturating_sub(1);
    let places = |x, w, b: Option<Placement>| {
        let mut inputs = vec![x];
        inputs.extend(vec![w; count]);
        inputs.extend(b.filter(|_| biases).map(|b| vec![b; count]).unwrap_or_default());
        inputs
    };
    let (whole, rows) = (Placement::Replicate, Placement::shard(0));
    let terms = places(Placement::shard(last), Placement::shard(1), Some(Placement::Partial));
    let mut rules = vec![
        ShardingRule { inputs: places(whole, rows, Some(rows)), outputs: vec![Placement::shard(last); count] },
        ShardingRule { inputs: terms, outputs: vec![Placement::Partial; count] },
    ];
    let inputs = places(whole, whole, Some(whole)).len();
    rules.extend(rowwise_rules(x, inputs, count));
    rules
}

impl Composite for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let (x, w, bias) = match (inputs, self.bias) {
            ([x, w], false) => (x, w, None),
            ([x, w, bias], true) => (x, w, Some(bias)),
            (_, false) => return Err(takes("x and w", inputs)),
            (_, true) => return Err(takes("x, w and bias", inputs)),
        };
        check_x(x)?;
        Ok(vec![infer_one(x, w, bias, "")?])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let ty = g.ty(inputs[0])?.clone();
        let (rows, last) = ty.shape.0.split_at(ty.shape.rank() - 1);
        let (flat, inner) = (flat(rows).map_err(|why| GraphError::usage(g.scope(), why))?, last[0].clone());
        let mut shape = ty.shape.clone();
        shape.0[rows.len()] = g.ty(inputs[1])?.shape.0[0].clone();
        // In f32 throughout, so that the sum is rounded once.
        let x = g.dequantize(inputs[0])?;
        let x = g.reshape(x, Shape(vec![flat, inner]))?;
        let w = g.decoded(inputs[1], DType::F32)?;
        let mut y = g.matmul(x, w, false, true, DType::F32)?;
        if self.bias {
            let bias = g.cast(inputs[2], DType::F32)?;
            y = g.add(y, bias)?;
        }
        let y = g.cast(y, ty.dtype)?;
        Ok(vec![g.reshape(y, shape)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        cost(&inputs[1..2], inputs, outputs, self.bias)
    }

    fn work(&self) -> Work {
        Work::Product { weight: 1 }
    }

    fn gradient(&self) -> Gradient {
        let inputs = if self.bias { 3 } else { 2 };
        Gradient::Explicit {
            forward: CompositeRef::new(LinearForward { bias: self.bias }),
            saved: (0..inputs).map(Saved::Input).collect(),
            backward: CompositeRef::new(LinearBackward { bias: self.bias }),
            wrt: (0..inputs).collect(),
        }
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        rules(&inputs[0].shape, 1, self.bias)
    }
}

impl LinearForward {
    fn plain(self) -> Linear {
        Linear { bias: self.bias }
    }
}

impl Composite for LinearForward {
    fn name(&self) -> &'static str {
        "linear_forward"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        self.plain().infer(inputs)
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        g.composite(self.plain(), inputs)
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        self.plain().cost(inputs, outputs)
    }

    fn work(&self) -> Work {
        self.plain().work()
    }

    fn shard(&self, inputs: &[Type], outputs: &[Type]) -> Vec<ShardingRule> {
        self.plain().shard(inputs, outputs)
    }
}

impl Composite for LinearGroup {
    fn name(&self) -> &'static str {
        "linear_group"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let n = self.count;
        if n == 0 || inputs.len() != 1 + n * if self.biases { 2 } else { 1 } {
            let wanted =
                if self.biases { format!("x, {n} weights and {n} biases") } else { format!("x and {n} weights") };
            return Err(takes(&wanted, inputs));
        }
        check_x(&inputs[0])?;
        (0..n)
            .map(|i| {
                let bias = self.biases.then(|| &inputs[1 + n + i]);
                infer_one(&inputs[0], &inputs[1 + i], bias, &(i + 1).to_string())
            })
            .collect()
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        (0..self.count)
            .map(|i| {
                let bias = self.biases.then(|| inputs[1 + self.count + i]);
                let one = Linear { bias: self.biases };
                let inputs: Vec<Var> = [inputs[0], inputs[1 + i]].into_iter().chain(bias).collect();
                Ok(g.composite(one, &inputs)?[0])
            })
            .collect()
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        cost(&inputs[1..=self.count], inputs, outputs, self.biases)
    }

    /// Of its first weight: enough to tell that it is no pass over memory.
    fn work(&self) -> Work {
        Work::Product { weight: 1 }
    }

    fn gradient(&self) -> Gradient {
        let inputs = 1 + self.count * if self.biases { 2 } else { 1 };
        Gradient::Explicit {
            forward: CompositeRef::new(LinearGroupForward(*self)),
            saved: (0..inputs).map(Saved::Input).collect(),
            backward: CompositeRef::new(LinearGroupBackward { count: self.count, biases: self.biases }),
            wrt: (0..inputs).collect(),
        }
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        rules(&inputs[0].shape, self.count, self.biases)
    }
}

impl Composite for LinearGroupForward {
    fn name(&self) -> &'static str {
        "linear_group_forward"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        self.0.infer(inputs)
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        g.composite(self.0, inputs)
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        self.0.cost(inputs, outputs)
    }

    fn work(&self) -> Work {
        self.0.work()
    }

    fn shard(&self, inputs: &[Type], outputs: &[Type]) -> Vec<ShardingRule> {
        self.0.shard(inputs, outputs)
    }
}

impl Builder {
    /// `x w^T`; see [`Linear`].
    ///
    /// # Errors
    /// When `w` is not `[N, K]` for `x` of `[.., K]`.
    pub fn linear(&mut self, x: Var, w: Var) -> Result<Var> {
        self.linear_bias(x, w, None)
    }

    /// `x w^T + bias`; see [`Linear`].
    ///
    /// # Errors
    /// When `w` is not `[N, K]` for `x` of `[.., K]`, or `bias` is not `[N]`.
    pub fn linear_bias(&mut self, x: Var, w: Var, bias: Option<Var>) -> Result<Var> {
        let inputs: Vec<Var> = [x, w].into_iter().chain(bias).collect();
        Ok(self.composite(Linear { bias: bias.is_some() }, &inputs)?[0])
    }

    /// Several linears of one input; see [`LinearGroup`]. `biases` is empty or has one for each of `weights`.
    ///
    /// # Errors
    /// When a weight or a bias does not fit `x`, or their numbers differ.
    pub fn linear_group(&mut self, x: Var, weights: &[Var], biases: &[Var]) -> Result<Vec<Var>> {
        let inputs = [&[x], weights, biases].concat();
        let op = LinearGroup { count: weights.len(), biases: !biases.is_empty() };
        self.composite(op, &inputs)
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let cases: [(&[usize], usize, bool); 7] = [
        (&[0, 8], 5, false),
        (&[1, 1], 1, true),
        (&[3, 0], 2, true),
        (&[7], 3, false),
        (&[5, 33], 17, true),
        (&[2, 3, 64], 40, false),
        (&[65, 130], 100, false),
    ];
    let mut samples: Vec<Sample> = cases
        .into_iter()
        .map(|(x, n, bias)| {
            let k = x[x.len() - 1];
            let sample = Sample::new(Linear { bias }).input(rng.normal(dtype, x)).input(rng.normal(dtype, &[n, k]));
            if bias { sample.input(rng.normal(dtype, &[n])) } else { sample }
        })
        .collect();
    samples.push(
        Sample::new(Linear { bias: true })
            .input(rng.normal(DType::F32, &[4, 50]))
            .input(rng.normal(DType::BF16, &[9, 50]))
            .input(rng.normal(DType::F16, &[9])),
    );
    for format in format::all() {
        let inner = format.granularity(1)[0] * 3;
        // As many rows as are multiplied one by one, and more.
        for rows in [5, 17] {
            let stored = Sample::new(Linear::default()).input(rng.normal(dtype, &[rows, inner]));
            samples.push(stored.stored(&rng.normal(DType::F32, &[1280 / inner + 7, inner]), &format));
        }
    }
    samples.extend(samples_scaled(rng, dtype));
    samples.extend(samples_quantised(rng, dtype));
    samples
}

/// Products by weights of 8-bit codes with scales: of x as it is, and for whole numbers of x as codes; by one row, a few and
/// many, of K that fills vectors and such that does not.
fn samples_scaled(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    use ScaleLayout::{Block, Row, Tensor as Whole};
    let mut samples = Vec::new();
    for codes in [CodeType::Int8, CodeType::F8E4M3] {
        for scales in [Row, Whole, Block] {
            let format = ScaledFormat::new(codes, scales);
            for [rows, inner, columns] in [[1, 544, 41], [7, 288, 140], [27, 52, 37], [3, 33, 5]] {
                let w = rng.normal(DType::F32, &[columns, inner]);
                let sample = Sample::new(Linear { bias: true }).input(rng.normal(dtype, &[rows, inner]));
                samples.push(sample.stored(&w, &FormatRef::new(format)).input(rng.normal(dtype, &[columns])));
                if codes == CodeType::Int8 && scales != Block && inner % 32 == 0 {
                    let x = FormatRef::new(ScaledFormat::INT8_G256);
                    let sample = Sample::new(Linear { bias: true }).stored(&rng.normal(dtype, &[rows, inner]), &x);
                    samples.push(sample.stored(&w, &FormatRef::new(format)).input(rng.normal(dtype, &[columns])));
                }
            }
        }
    }
    samples
}

/// Products by quantised x: 8-bit codes by every block format, by one row, a few and many, in whole groups and ragged ones;
/// then 8-bit floats and other granularities.
fn samples_quantised(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let int8 = FormatRef::new(ScaledFormat::INT8_G256);
    let of = |bias, x: &Tensor, format: &FormatRef| Sample::new(Linear { bias }).stored(x, format);
    let mut samples = vec![
        of(true, &rng.normal(dtype, &[3, 40]), &int8).input(rng.normal(dtype, &[4, 40])).input(rng.normal(dtype, &[4])),
        of(false, &rng.normal(dtype, &[0, 64]), &int8).stored(&rng.normal(DType::F32, &[4, 64]), &FormatRef::new(Q8_0)),
        of(false, &Tensor::zeros(dtype, &[2, 64]), &int8).input(rng.normal(dtype, &[4, 64])),
    ];
    for format in format::all() {
        let least = format.granularity(1)[0];
        for (rows, inner) in [(1, 2 * least), (6, 288), (19, 768), (1, 1280)] {
            let columns = if rows == 1 { 41 } else { 18 };
            if inner % least == 0 {
                let x = of(false, &rng.normal(dtype, &[rows, inner]), &int8);
                samples.push(x.stored(&rng.normal(DType::F32, &[columns, inner]), &format));
            }
        }
    }
    use ScaleLayout::{Block, Group, Row, Tensor as Whole};
    for codes in [CodeType::Int8, CodeType::F8E4M3] {
        for (x, w) in [(Whole, Whole), (Row, Row), (Group(128), Block), (Whole, Row)] {
            for [rows, inner, columns] in [[1, 64, 48], [21, 192, 32]] {
                let [x, w] = [x, w].map(|scales| FormatRef::new(ScaledFormat::new(codes, scales)));
                let product = of(false, &rng.normal(dtype, &[rows, inner]), &x);
                samples.push(product.stored(&rng.normal(DType::F32, &[columns, inner]), &w));
            }
        }
    }
    samples
}

pub(super) fn samples_forward(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let cases: [(&[usize], usize, bool); 8] = [
        (&[0, 8], 5, false),
        (&[1, 1], 1, true),
        (&[3, 0], 2, true),
        (&[7], 3, false),
        (&[5, 33], 17, true),
        (&[2, 3, 64], 40, false),
        (&[230, 13], 35, true),
        (&[3, 1040], 200, false),
    ];
    let sample = |(x, n, bias): (&[usize], usize, bool)| {
        let sample = Sample::new(LinearForward { bias }).input(rng.normal(dtype, x));
        let sample = sample.input(rng.normal(dtype, &[n, x[x.len() - 1]]));
        if bias { sample.input(rng.normal(DType::F32, &[n])) } else { sample }
    };
    cases.into_iter().map(sample).collect()
}

pub(super) fn samples_group(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let cases: [(&[usize], &[usize], bool); 5] = [
        (&[0, 8], &[4, 4], false),
        (&[1, 1], &[1], true),
        (&[3, 64], &[64, 16, 16], true),
        (&[17, 33], &[20, 20], false),
        (&[2, 2, 10], &[3, 0, 1], false),
    ];
    let mut samples = Vec::new();
    for (x, outs, biases) in cases {
        let mut sample = Sample::new(LinearGroup { count: outs.len(), biases }).input(rng.normal(dtype, x));
        for n in outs {
            sample = sample.input(rng.normal(dtype, &[*n, x[x.len() - 1]]));
        }
        for n in outs.iter().filter(|_| biases) {
            sample = sample.input(rng.normal(dtype, &[*n]));
        }
        samples.push(sample);
    }
    samples.push(
        Sample::new(LinearGroup { count: 3, biases: false })
            .input(rng.normal(dtype, &[3, 256]))
            .stored(&rng.normal(DType::F32, &[5, 256]), &FormatRef::new(Q8_0))
            .input(rng.normal(DType::BF16, &[7, 256]))
            .stored(&rng.normal(DType::F32, &[9, 256]), &FormatRef::new(Q4K)),
    );
    for rows in [1, 18] {
        samples.push(
            Sample::new(LinearGroup { count: 3, biases: true })
                .stored(&rng.normal(dtype, &[rows, 512]), &FormatRef::new(ScaledFormat::INT8_G256))
                .stored(&rng.normal(DType::F32, &[5, 512]), &FormatRef::new(Q4K))
                .stored(&rng.normal(DType::F32, &[39, 512]), &FormatRef::new(Q6K))
                .stored(&rng.normal(DType::F32, &[33, 512]), &FormatRef::new(Q2K))
                .input(rng.normal(dtype, &[5]))
                .input(rng.normal(dtype, &[39]))
                .input(rng.normal(DType::F32, &[33])),
        );
    }
    samples
}

pub(super) fn samples_group_forward(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let cases: [(&[usize], &[usize], bool); 6] = [
        (&[0, 8], &[4, 4], false),
        (&[1, 1], &[1], true),
        (&[3, 64], &[64, 16, 16], true),
        (&[2, 2, 10], &[3, 0, 1], false),
        (&[230, 19], &[200, 7, 49], true),
        (&[3, 1040], &[65, 64], false),
    ];
    let sample = |(x, outs, biases): (&[usize], &[usize], bool)| {
        let op = LinearGroupForward(LinearGroup { count: outs.len(), biases });
        let sample = Sample::new(op).input(rng.normal(dtype, x));
        let weights = |sample: Sample, n: &usize| sample.input(rng.normal(dtype, &[*n, x[x.len() - 1]]));
        let sample = outs.iter().fold(sample, weights);
        outs.iter().filter(|_| biases).fold(sample, |sample, n| sample.input(rng.normal(DType::F32, &[*n])))
    };
    cases.into_iter().map(sample).collect()
}
