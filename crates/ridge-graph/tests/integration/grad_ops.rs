//! The gradient of every op in the registry, derived or explicit, against finite differences.

use crate::support::gradients::{Inputs, check, differs_by_intent, finish_with_loss, floats, run, weighted_sum};
use ridge_graph::conformance::{ONLY, is_selected};
use ridge_graph::format::Format as _;
use ridge_graph::format::{CodeType, ScaleLayout, ScaledFormat};
use ridge_graph::grad::gradient;
use ridge_graph::ops::registry;
use ridge_graph::sample::{Rng, Sample};
use ridge_graph::{
    Arg, Bindings, Builder, DType, FormatRef, Gradient, Op, Precision, Result, Tensor, Type, Value, Var, evaluate,
};

/// Is the op applied in main, where the backward half sees every value, or in a function, where it sees residuals?
#[derive(Clone, Copy, Debug)]
enum Place {
    Main,
    Function,
}

/// Adds the op of `sample` to `g`, its inputs being arguments `input.0`, `input.1`, ... Gives its outputs.
fn apply(g: &mut Builder, sample: &Sample, place: Place) -> Result<Vec<Var>> {
    let types: Vec<(String, Type)> =
        sample.types().into_iter().enumerate().map(|(i, ty)| (format!("input.{i}"), ty)).collect();
    let given = |g: &mut Builder| {
        let var = |(name, ty): &(String, Type)| match (ty.state, &ty.format) {
            (true, _) => g.state(name, ty.clone()),
            (false, Some(_)) => g.weight(name, ty.clone()),
            (false, None) => g.step_input(name, ty.clone()),
        };
        types.iter().map(var).collect::<Result<Vec<_>>>()
    };
    let outputs = match place {
        Place::Main => {
            let inputs = given(g)?;
            g.emit(sample.op.clone(), &inputs)?
        }
        Place::Function => {
            let function = g.function("op", |g| {
                let tensor = |(name, ty): &(String, Type)| match ty.state {
                    true => g.state(name, ty.clone()),
                    false => Ok(g.arg(name, ty.clone())),
                };
                let inputs = types.iter().map(tensor).collect::<Result<Vec<_>>>()?;
                g.emit(sample.op.clone(), &inputs)?.into_iter().filter_map(|v| plain(g, v).transpose()).collect()
            })?;
            let inputs = given(g)?;
            let tensors: Vec<Var> =
                inputs.into_iter().filter_map(|v| plain(g, v).transpose()).collect::<Result<_>>()?;
            g.call(function, &tensors)?
        }
    };
    let mut all: Vec<Var> = outputs.into_iter().filter_map(|v| plain(g, v).transpose()).collect::<Result<_>>()?;
    for (name, ty) in types.iter().filter(|(_, ty)| ty.state) {
        all.push(g.state(name, ty.clone())?);
    }
    Ok(all)
}

/// `var`, unless it is a state.
fn plain(g: &Builder, var: Var) -> Result<Option<Var>> {
    Ok(if g.ty(var)?.state { None } else { Some(var) })
}

fn check_sample(what: &str, sample: &Sample, place: Place, rng: &mut Rng) -> bool {
    let Op::Composite(op) = &sample.op else { panic!("{what}: the registry holds composites") };
    // The gradient of a quantisation is not that of the steps it makes; see below.
    if matches!(op.gradient(), Gradient::None) || differs_by_intent(op) {
        return false;
    }
    let (mut wrt, mut inputs) = (Vec::new(), Inputs::new());
    for (i, value) in sample.inputs.iter().enumerate() {
        if matches!(value, Value::Plain(t) if t.dtype.is_float()) {
            wrt.push(format!("input.{i}"));
        }
        inputs.push((format!("input.{i}"), value.clone()));
    }
    let mut g = Builder::new();
    let outputs = apply(&mut g, sample, place).unwrap_or_else(|e| panic!("{what}: {e}"));
    let graph = finish_with_loss(g, &outputs, rng, &mut inputs).unwrap_or_else(|e| panic!("{what}: {e}"));
    check(what, &graph, &inputs, &wrt, &Bindings::new(), rng);
    true
}

fn check_registry(place: Place) {
    let mut checked = 0;
    let registry = registry();
    for entry in registry.iter().filter(|entry| is_selected(&entry.name)) {
        let mut rng = Rng::new(7);
        for (i, sample) in entry.samples(&mut rng, DType::F32).iter().enumerate() {
            let what = format!("{} sample {i} in {place:?}", entry.name);
            checked += usize::from(check_sample(&what, sample, place, &mut rng));
        }
    }
    assert!(checked > 0 || std::env::var(ONLY).is_ok(), "some ops have a gradient");
}

#[test]
fn gradients_of_all_ops_equal_finite_differences() {
    check_registry(Place::Main);
}

#[test]
fn gradients_of_all_ops_pass_through_functions() {
    check_registry(Place::Function);
}

/// Of `linear(x, w)`, perhaps of quantised x in a function: the gradients for x and w, from the same cotangent.
fn of_product(format: Option<ScaledFormat>, place: Place, x: &Value, w: &Value) -> [Vec<f64>; 2] {
    let mut g = Builder::new();
    let input = g.step_input("x", x.ty()).unwrap();
    let weight = g.weight("w", w.ty()).unwrap();
    let product = |g: &mut Builder, x: Var, w: Var| {
        let x = format.map_or(Ok(x), |format| g.quantize(x, format))?;
        Ok(vec![g.linear(x, w)?])
    };
    let y = match place {
        Place::Main => product(&mut g, input, weight).unwrap(),
        Place::Function => {
            let function = g.function("product", |g| {
                let (x, w) = (g.arg("x", x.ty()), g.arg("w", w.ty()));
                product(g, x, w)
            });
            g.call(function.unwrap(), &[input, weight]).unwrap()
        }
    };
    let mut inputs = vec![("x".into(), x.clone()), ("w".into(), w.clone())];
    let graph = finish_with_loss(g, &y, &mut Rng::new(3), &mut inputs).unwrap();
    let outputs = run(&gradient(&graph, "loss", &["x", "w"].map(String::from)).unwrap(), &inputs, &Bindings::new());
    let outputs = outputs.unwrap();
    ["grad.x", "grad.w"].map(|name| floats(&outputs, name))
}

#[test]
fn gradients_pass_straight_through_a_quantisation() {
    let mut rng = Rng::new(5);
    let x = rng.normal(DType::F32, &[3, 40]);
    let (x, w): (Value, Value) = (x.into(), rng.normal(DType::F32, &[6, 40]).into());
    for format in [
        ScaledFormat::INT8_G256,
        ScaledFormat::new(CodeType::F8E4M3, ScaleLayout::Row),
        ScaledFormat::new(CodeType::F8E4M3, ScaleLayout::Tensor),
    ] {
        let stored = Value::stored(x.tensor(), &FormatRef::new(format));
        let Value::Stored { components, .. } = &stored else { unreachable!("stored") };
        let bytes: Vec<Vec<u8>> = components.iter().map(Tensor::to_bytes).collect();
        let bytes: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
        let values = format.values(&bytes, &[3, 40]).into_iter().map(f64::from).collect();
        let rounded = Value::Plain(Tensor::float(DType::F32, &[3, 40], values));
        for place in [Place::Main, Place::Function] {
            let [of_x, of_w] = of_product(Some(format), place, &x, &w);
            // That for x is of the product, whatever x is; that for w is of the values that it was multiplied by.
            let [exact_x, exact_w] = of_product(None, place, &rounded, &w);
            assert_eq!(of_x, exact_x, "{format:?} in {place:?}");
            let near = of_w.iter().zip(&exact_w).all(|(a, b)| (a - b).abs() <= 1e-5 * b.abs().max(0.1));
            assert!(near, "{format:?} in {place:?}: {of_w:?} and not {exact_w:?}");
        }
    }
}

/// `sum(log p(x) * weights)` and its gradient for x, where logits are 1e4 apart.
fn gradient_of_log_probabilities(
    log_probabilities: impl Fn(&mut Builder, Var) -> Result<Var>,
    precision: Precision,
) -> Vec<f64> {
    let row = || Type::tensor(DType::F32, [1, 3]);
    let mut g = Builder::new();
    let x = g.step_input("x", row()).expect("is new");
    let weights = g.step_input("weights", row()).expect("is new");
    let y = log_probabilities(&mut g, x).expect("is float");
    let loss = weighted_sum(&mut g, y, weights).expect("has a shape");
    let graph = g.finish(vec![("loss".into(), loss)]).expect("finishes");
    let graph = gradient(&graph, "loss", &["x"]).expect("has a gradient");
    let given = |arg: &Arg| {
        let values = if &*arg.name == "x" { [1e4, 0.0, -1e4] } else { [0.5, 2.0, 0.25] };
        Some(Tensor::float(DType::F32, &[1, 3], values.to_vec()).into())
    };
    let outputs = evaluate(&graph, &given, &Bindings::new(), precision).expect("evaluates");
    floats(&outputs, "grad.x")
}

#[test]
fn log_softmax_has_a_finite_gradient_where_the_derived_one_is_nan() {
    for precision in [Precision::Exact, Precision::Rounded] {
        let explicit = gradient_of_log_probabilities(Builder::log_softmax, precision);
        // The first logit has probability 1: `dy - p * sum(dy)`.
        assert_eq!(explicit, [0.5 - 2.75, 2.0, 0.25], "{precision:?}");
        let derived = |g: &mut Builder, x: Var| {
            let p = g.softmax(x)?;
            g.log(p)
        };
        let derived = gradient_of_log_probabilities(derived, precision);
        assert!(derived.iter().any(|x| x.is_nan()), "{precision:?}: {derived:?}");
    }
}
