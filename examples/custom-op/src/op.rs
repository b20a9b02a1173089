//! The op: types, meaning, cost, gradient and samples.

use ridge_graph::sample::{Rng, Sample};
use ridge_graph::{
    Builder, Composite, CompositeRef, Cost, DType, Gradient, OpEntry, OpRegistry, Result, Saved, Type, Var, Why, ops,
};

/// `max(gate, 0)^2 * up`, computed in f32. `gate` and `up` have one float type, which the result has too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatedSquaredRelu;

/// Gradient of [`GatedSquaredRelu`]: `(2 * max(gate, 0) * up * dy, max(gate, 0)^2 * dy)`, computed in f32. `gate`, `up`
/// and `dy` have one float type, which both results have too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatedSquaredReluBackward;

/// Requires `N` inputs of one float type, and gives it.
fn one_type<const N: usize>(names: &str, inputs: &[Type]) -> Result<Type, Why> {
    let inputs: &[Type; N] = inputs.try_into().map_err(|_| format!("takes {names}, got {} inputs", inputs.len()))?;
    let first = &inputs[0];
    if !first.dtype.is_float() || first.format.is_some() || first.state {
        return Err(format!("{names} must be plain float tensors, got {first}"));
    }
    match inputs.iter().find(|ty| *ty != first) {
        Some(other) => Err(format!("{names} must have one type, got {first} and {other}")),
        None => Ok(first.clone()),
    }
}

/// `max(gate, 0)` in f32.
fn opened(g: &mut Builder, gate: Var) -> Result<Var> {
    let gate = g.cast(gate, DType::F32)?;
    let zero = g.constant(DType::F32, 0.0)?;
    g.max(gate, zero)
}

impl Composite for GatedSquaredRelu {
    fn name(&self) -> &'static str {
        "gated_squared_relu"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        Ok(vec![one_type::<2>("gate and up", inputs)?])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let dtype = g.ty(inputs[0])?.dtype;
        let open = opened(g, inputs[0])?;
        let up = g.cast(inputs[1], DType::F32)?;
        let square = g.mul(open, open)?;
        let y = g.mul(square, up)?;
        Ok(vec![g.cast(y, dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        Cost { vector_flops: inputs[0].shape.elements() * 3, ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::Explicit {
            forward: CompositeRef::new(*self),
            saved: vec![Saved::Input(0), Saved::Input(1)],
            backward: CompositeRef::new(GatedSquaredReluBackward),
            wrt: vec![0, 1],
        }
    }
}

impl Composite for GatedSquaredReluBackward {
    fn name(&self) -> &'static str {
        "gated_squared_relu_backward"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        Ok(vec![one_type::<3>("gate, up and dy", inputs)?; 2])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let dtype = g.ty(inputs[0])?.dtype;
        let open = opened(g, inputs[0])?;
        let up = g.cast(inputs[1], DType::F32)?;
        let dy = g.cast(inputs[2], DType::F32)?;
        let slope = g.add(open, open)?;
        let slope = g.mul(slope, up)?;
        let dgate = g.mul(slope, dy)?;
        let square = g.mul(open, open)?;
        let dup = g.mul(square, dy)?;
        Ok(vec![g.cast(dgate, dtype)?, g.cast(dup, dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        Cost { vector_flops: inputs[0].shape.elements() * 6, ..Cost::moving(inputs, outputs) }
    }
}

const SHAPES: [&[usize]; 6] = [&[0, 8], &[1], &[7], &[5, 64], &[2, 3, 33], &[17, 1000]];

fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let sample = |shape: &[usize]| {
        let (gate, up) = (rng.normal(dtype, shape), rng.normal(dtype, shape));
        Sample::new(GatedSquaredRelu).input(gate).input(up)
    };
    SHAPES.into_iter().map(sample).collect()
}

fn samples_backward(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let sample = |shape: &[usize]| {
        let [gate, up, dy] = [(); 3].map(|()| rng.normal(dtype, shape));
        Sample::new(GatedSquaredReluBackward).input(gate).input(up).input(dy)
    };
    SHAPES.into_iter().map(sample).collect()
}

/// Ridge's ops and these two.
///
/// # Errors
/// When Ridge has an op of one of their names.
pub fn registry() -> Result<OpRegistry> {
    let mut registry = ops::registry();
    registry.add(OpEntry::new("gated_squared_relu", samples))?;
    registry.add(OpEntry::new("gated_squared_relu_backward", samples_backward))?;
    Ok(registry)
}
