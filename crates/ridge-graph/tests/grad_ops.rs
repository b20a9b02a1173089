//! The gradient of every op in the registry, derived or explicit, against finite differences.

mod grad_common;

use grad_common::{Inputs, check, finish_with_loss};
use ridge_graph::ops::registry;
use ridge_graph::sample::{Rng, Sample};
use ridge_graph::{Bindings, Builder, DType, Gradient, Op, Value};

/// Elements in all inputs beyond which a sample is left to the smaller ones of its op.
const MOST_ELEMENTS: usize = 20_000;

fn check_sample(what: &str, sample: &Sample, rng: &mut Rng) -> bool {
    let Op::Composite(op) = &sample.op else { panic!("{what}: the registry holds composites") };
    let elements: usize = sample.inputs.iter().map(|v| v.ty().shape.as_const().unwrap().iter().product::<usize>()).sum();
    if matches!(op.gradient(), Gradient::None) || elements > MOST_ELEMENTS {
        return false;
    }
    let mut g = Builder::new();
    let (mut vars, mut wrt, mut inputs) = (Vec::new(), Vec::new(), Inputs::new());
    for (i, (ty, value)) in sample.types().into_iter().zip(&sample.inputs).enumerate() {
        let name = format!("input.{i}");
        if ty.dtype.is_float() && ty.format.is_none() {
            wrt.push(name.clone());
        }
        vars.push(match (ty.state, matches!(value, Value::Stored { .. })) {
            (true, _) => g.state(&name, ty).unwrap(),
            (false, true) => g.weight(&name, ty).unwrap(),
            (false, false) => g.step_input(&name, ty).unwrap(),
        });
        inputs.push((name, value.clone()));
    }
    let outputs = g.emit(sample.op.clone(), &vars).unwrap_or_else(|e| panic!("{what}: {e}"));
    let graph = finish_with_loss(g, &outputs, rng, &mut inputs).unwrap_or_else(|e| panic!("{what}: {e}"));
    check(what, &graph, &inputs, &wrt, &Bindings::new(), rng);
    true
}

#[test]
fn gradients_of_all_ops_equal_finite_differences() {
    for entry in registry() {
        let mut rng = Rng::new(7);
        let samples = (entry.samples)(&mut rng, DType::F32);
        let start = std::time::Instant::now();
        let mut checked = 0;
        for (i, sample) in samples.iter().enumerate() {
            checked += usize::from(check_sample(&format!("{} sample {i}", entry.name), sample, &mut rng));
        }
        println!("{}: {checked} of {} samples, {:?}", entry.name, samples.len(), start.elapsed());
    }
}
