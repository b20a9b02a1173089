//! Gradients against finite differences, in f64.

use ridge_graph::grad::{Differentiated, float_weights, gradient};
use ridge_graph::ops::{
    AdamW, Fp8Linears, Fp8LinearsBackward, GatedRecurrence, Quantize, QuantizeDelayed, StatefulConv1d,
    StatefulRecurrence,
};
use ridge_graph::sample::Rng;
use ridge_graph::{
    Arg, Bindings, Builder, CompositeRef, DType, Data, Graph, GraphError, Precision, Result, Shape, Tensor, Type,
    Value, Var, evaluate,
};

/// Is the gradient of `op` by intent not that of all it makes? Steps of quantisation pass cotangents as if there were none, which is tested
/// in `grad_ops.rs` and `fp8.rs`; states that are written to lines of a table pass none, and what a recurrence or a convolution over them gives is
/// tested where models are trained (`training_graph.rs` of ridge-models).
pub(crate) fn differs_by_intent(op: &CompositeRef) -> bool {
    op.downcast::<StatefulRecurrence>().is_some()
        || op.downcast::<GatedRecurrence>().is_some()
        || op.downcast::<StatefulConv1d>().is_some()
        || op.downcast::<Quantize>().is_some()
        || op.downcast::<QuantizeDelayed>().is_some()
        || op.downcast::<Fp8Linears>().is_some()
        || op.downcast::<Fp8LinearsBackward>().is_some()
}

/// Named inputs of a graph.
pub(crate) type Inputs = Vec<(String, Value)>;

/// Random directions tried for each input.
const DIRECTIONS: usize = 3;
/// Step of the wider difference, for inputs of size 1.
const STEP: f64 = 2e-5;

/// `x` as a scalar: the sum of its elements, weighted by `weights` of its shape.
pub(crate) fn weighted_sum(g: &mut Builder, x: Var, weights: Var) -> Result<Var> {
    let x = g.cast(x, DType::F32)?;
    let product = g.mul(x, weights)?;
    total(g, product)
}

/// The sum of all elements, a scalar.
pub(crate) fn total(g: &mut Builder, x: Var) -> Result<Var> {
    let mut sum = x;
    for axis in 0..g.ty(x)?.shape.rank() {
        sum = g.reduce_sum(sum, axis)?;
    }
    g.reshape(sum, Shape::default())
}

/// Adds a loss to what is built: every float value of `outputs`, weighted at random. Gives outputs `loss`, and `size`,
/// the sum of the magnitudes that the loss adds up.
pub(crate) fn finish_with_loss(mut g: Builder, outputs: &[Var], rng: &mut Rng, inputs: &mut Inputs) -> Result<Graph> {
    let mut loss = g.constant(DType::F32, 0.0)?;
    let mut size = loss;
    for var in outputs {
        let ty = g.ty(*var)?.clone();
        // Codes of a cache, beside which are their scales, jump as integers do.
        let codes = ty.state && ty.dtype == DType::F8E4M3 && outputs.len() > 1;
        if !ty.dtype.is_float() || codes {
            continue;
        }
        let value = if ty.state { g.state_read(*var)? } else { *var };
        let shape = ty.shape.as_const().expect("samples have constant shapes");
        let name = format!("cotangent.{}", inputs.len());
        inputs.push((name.clone(), rng.normal(DType::F32, &shape).into()));
        let weights = g.step_input(&name, Type::tensor(DType::F32, ty.shape))?;
        let part = weighted_sum(&mut g, value, weights)?;
        loss = g.add(loss, part)?;
        let (a, b) = (g.abs(value)?, g.abs(weights)?);
        let part = weighted_sum(&mut g, a, b)?;
        size = g.add(size, part)?;
    }
    g.finish(vec![("loss".into(), loss), ("size".into(), size)])
}

/// Outputs of `graph` by name, in f64.
pub(crate) fn run(graph: &Graph, inputs: &Inputs, bindings: &Bindings) -> Result<Inputs, GraphError> {
    let given = |arg: &Arg| inputs.iter().find(|(name, _)| **name == *arg.name).map(|(_, value)| value.clone());
    evaluate(graph, &given, bindings, Precision::Exact)
}

/// The elements of output `name`.
pub(crate) fn floats(outputs: &Inputs, name: &str) -> Vec<f64> {
    let found = outputs.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("no output {name}"));
    found.1.tensor().floats().to_vec()
}

fn moved(inputs: &Inputs, name: &str, direction: &[f64], by: f64) -> Inputs {
    let mut inputs = inputs.clone();
    for (n, value) in &mut inputs {
        if let (true, Value::Plain(Tensor { data: Data::Float(data), .. })) = (n == name, value) {
            data.iter_mut().zip(direction).for_each(|(x, d)| *x += by * d);
        }
    }
    inputs
}

/// Compares the gradient of `loss` with respect to each of `wrt` with differences along random directions. A central
/// difference at two steps gives a value of fourth order and, by how the two differ, its error; `size` gives the
/// rounding error.
pub(crate) fn check(what: &str, graph: &Graph, inputs: &Inputs, wrt: &[String], bindings: &Bindings, rng: &mut Rng) {
    let with_gradient = gradient(graph, "loss", wrt).unwrap_or_else(|e| panic!("{what}: {e}"));
    let outputs = run(&with_gradient, inputs, bindings).unwrap_or_else(|e| panic!("{what}: {e}"));
    let plain = run(graph, inputs, bindings).unwrap();
    assert_eq!(floats(&outputs, "loss"), floats(&plain, "loss"), "{what}: the loss changed");
    let size = outputs.iter().find(|(n, _)| n == "size").map_or(1.0, |(_, v)| v.tensor().floats()[0]);
    for name in wrt {
        let value = &inputs.iter().find(|(n, _)| n == name).expect("inputs are named").1;
        let gradient = outputs.iter().find(|(n, _)| *n == format!("grad.{name}")).expect("asked for").1.tensor();
        assert_eq!(gradient.ty(), value.ty(), "{what}: type of the gradient for {name}");
        let norm = gradient.floats().iter().map(|x| x * x).sum::<f64>().sqrt();
        for _ in 0..DIRECTIONS {
            let direction: Vec<f64> = (0..gradient.len()).map(|_| rng.gauss()).collect();
            let slope = |step: f64| {
                let at = |by| floats(&run(graph, &moved(inputs, name, &direction, by), bindings).unwrap(), "loss")[0];
                (at(step) - at(-step)) / (2.0 * step)
            };
            let (wide, near) = (slope(STEP), slope(STEP / 2.0));
            let expected = (4.0 * near - wide) / 3.0;
            let noise = 64.0 * f64::EPSILON * size / STEP;
            let bend = (wide - near).abs();
            let got: f64 = gradient.floats().iter().zip(&direction).map(|(g, d)| g * d).sum();
            assert!(
                bend <= 1e-3 * norm + noise,
                "{what}: differences for {name} do not settle: {wide} then {near}; the sample lies at a jump",
            );
            assert!(
                (got - expected).abs() <= 1e-7 * norm + bend + noise,
                "{what}: slope for {name} is {expected}, its gradient says {got} (norm {norm}, noise {noise})",
            );
        }
    }
}

/// A training step of `forward`: its loss, gradients, and the updates of all weights and their moments, which are
/// states `adamw.m.<weight>` and `adamw.v.<weight>`. Step inputs `lr` and `step` are scalars.
pub(crate) fn adamw_step(forward: &Graph, adamw: AdamW) -> Result<Graph> {
    let mut step = Differentiated::training(forward, "loss", &float_weights(forward))?;
    let scalar = Type::tensor(DType::F32, Shape::default());
    let (lr, count) = (step.g.step_input("lr", scalar.clone())?, step.g.step_input("step", scalar)?);
    for p in step.parameters.clone() {
        let ty = step.g.ty(p.value)?.clone();
        let (m_name, v_name) = (format!("adamw.m.{}", p.name), format!("adamw.v.{}", p.name));
        let (m, v) = (step.g.state(&m_name, ty.clone())?, step.g.state(&v_name, ty)?);
        let (m, v) = (step.g.state_read(m)?, step.g.state_read(v)?);
        let next = step.g.composite(adamw, &[p.value, p.gradient, m, v, lr, count])?;
        for (name, value) in [(&p.name, next[0]), (&m_name, next[1]), (&v_name, next[2])] {
            step.update(name, value)?;
        }
    }
    step.finish(Vec::new())
}
