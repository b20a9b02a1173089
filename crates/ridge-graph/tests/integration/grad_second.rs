//! Derivatives along tangents, and of gradients, of every op in the registry against differences; loops; gradients of a user's own.

use crate::support::gradients::{Inputs, check, differs_by_intent, finish_with_loss, floats, run, total, weighted_sum};
use ridge_graph::conformance::{ONLY, is_selected};
use ridge_graph::grad::gradient;
use ridge_graph::ops::{StraightThrough, UserGradient, registry};
use ridge_graph::sample::{Rng, Sample};
use ridge_graph::{Bindings, Builder, DType, Gradient, Graph, GraphError, Op, Result, Shape, Tensor, Type, Value, jvp};

/// The loss of a sample in main, and the names of its float inputs; `None` if it has no gradient.
fn with_loss(sample: &Sample, rng: &mut Rng) -> Option<(Graph, Inputs, Vec<String>)> {
    let Op::Composite(op) = &sample.op else { panic!("the registry holds composites") };
    let straight = differs_by_intent(op) || op.downcast::<StraightThrough>().is_some();
    if matches!(op.gradient(), Gradient::None) || straight || sample.types().iter().any(|ty| ty.state) {
        return None;
    }
    let mut g = Builder::new();
    let (mut inputs, mut vars, mut wrt) = (Inputs::new(), Vec::new(), Vec::new());
    for (i, value) in sample.inputs.iter().enumerate() {
        let name = format!("input.{i}");
        let var = match value {
            Value::Plain(_) => g.step_input(&name, value.ty()),
            Value::Stored { .. } => g.weight(&name, value.ty()),
        };
        vars.push(var.expect("is new"));
        if matches!(value, Value::Plain(t) if t.dtype.is_float()) {
            wrt.push(name.clone());
        }
        inputs.push((name, value.clone()));
    }
    let outputs = g.emit(sample.op.clone(), &vars).expect("fits");
    let graph = finish_with_loss(g, &outputs, rng, &mut inputs).expect("builds");
    Some((graph, inputs, wrt))
}

/// `inputs` with a tangent for each of `wrt`.
fn with_tangents(inputs: &Inputs, wrt: &[String], rng: &mut Rng) -> Inputs {
    let of = |name: &String| {
        let value = &inputs.iter().find(|(n, _)| n == name).expect("is named").1;
        let Value::Plain(tensor) = value else { unreachable!("is plain") };
        (format!("tangent.{name}"), rng.normal(tensor.dtype, &tensor.shape).into())
    };
    inputs.iter().cloned().chain(wrt.iter().map(of)).collect()
}

/// The slope of the gradient, or of the loss, and what rounding may come to.
fn dot(outputs: &Inputs, inputs: &Inputs, wrt: &[String]) -> (f64, f64) {
    let (mut sum, mut size) = (0.0, 0.0);
    for name in wrt {
        let of = |all: &Inputs, name: &str| floats(all, name);
        let products = of(outputs, &format!("grad.{name}"));
        for (g, t) in products.iter().zip(of(inputs, &format!("tangent.{name}"))) {
            sum += g * t;
            size += (g * t).abs();
        }
    }
    (sum, size)
}

#[test]
fn derivatives_along_tangents_are_what_gradients_say_of_every_op() {
    let mut checked = 0;
    for entry in registry().iter().filter(|entry| is_selected(&entry.name)) {
        let mut rng = Rng::new(11);
        for (i, sample) in entry.samples(&mut rng, DType::F32).iter().enumerate().take(8) {
            let what = format!("{} sample {i}", entry.name);
            let Some((graph, inputs, wrt)) = with_loss(sample, &mut rng) else { continue };
            if wrt.is_empty() {
                continue;
            }
            let inputs = with_tangents(&inputs, &wrt, &mut rng);
            let forward = jvp(&graph, "loss", &wrt).unwrap_or_else(|e| panic!("{what}: {e}"));
            let reverse = gradient(&graph, "loss", &wrt).unwrap_or_else(|e| panic!("{what}: {e}"));
            let run = |graph: &Graph| run(graph, &inputs, &Bindings::new()).unwrap_or_else(|e| panic!("{what}: {e}"));
            let got = floats(&run(&forward), "tangent.loss")[0];
            let (wanted, size) = dot(&run(&reverse), &inputs, &wrt);
            assert!((got - wanted).abs() <= 1e-6 * size + 1e-12, "{what}: {got}, and its gradient says {wanted}");
            checked += 1;
        }
    }
    assert!(checked > 50 || std::env::var(ONLY).is_ok(), "{checked} samples");
}

/// `sum(grad * tangent)` as the output `loss` of a graph: its gradient is the second derivative along the tangent.
fn gradient_along(graph: &Graph, wrt: &[String]) -> Result<Graph> {
    let (mut g, outputs) = Builder::reopen(gradient(graph, "loss", wrt)?);
    let mut loss = g.constant(DType::F32, 0.0)?;
    let mut size = loss;
    for name in wrt {
        let grad = outputs.iter().find(|(n, _)| *n == format!("grad.{name}")).expect("was asked for").1;
        let ty = g.ty(grad)?.clone();
        let tangent = g.step_input(&format!("tangent.{name}"), ty)?;
        let tangent = g.cast(tangent, DType::F32)?;
        let part = weighted_sum(&mut g, grad, tangent)?;
        loss = g.add(loss, part)?;
        let (grad, tangent) = (g.abs(grad)?, g.abs(tangent)?);
        let part = weighted_sum(&mut g, grad, tangent)?;
        size = g.add(size, part)?;
    }
    g.finish(vec![("loss".into(), loss), ("size".into(), size)])
}

#[test]
fn gradients_of_gradients_of_every_op_equal_finite_differences() {
    let mut checked = 0;
    for entry in registry().iter().filter(|entry| is_selected(&entry.name)) {
        let mut rng = Rng::new(13);
        for (i, sample) in entry.samples(&mut rng, DType::F32).iter().enumerate().take(6) {
            let what = format!("{} sample {i}, differentiated twice", entry.name);
            let Some((graph, inputs, wrt)) = with_loss(sample, &mut rng) else { continue };
            if wrt.is_empty() {
                continue;
            }
            let inputs = with_tangents(&inputs, &wrt, &mut rng);
            let along = gradient_along(&graph, &wrt).unwrap_or_else(|e| panic!("{what}: {e}"));
            check(&what, &along, &inputs, &wrt, &Bindings::new(), &mut rng);
            checked += 1;
        }
    }
    assert!(checked > 40 || std::env::var(ONLY).is_ok(), "{checked} samples");
}

fn row(n: usize) -> Type {
    Type::tensor(DType::F32, [n])
}

/// A scan: `h' = tanh(h * w + x)`, which also gives `h' * x`, over five rows.
fn recurrence() -> Graph {
    let mut g = Builder::new();
    let body = g.function("cell", |g| {
        let (h, w, x) = (g.arg("h", row(3)), g.arg("w", row(3)), g.arg("x", row(3)));
        let kept = g.mul(h, w)?;
        let sum = g.add(kept, x)?;
        let next = g.tanh(sum)?;
        Ok(vec![next, w, g.mul(next, x)?])
    });
    let body = body.unwrap();
    let h = g.step_input("h", row(3)).unwrap();
    let w = g.step_input("w", row(3)).unwrap();
    let xs = g.step_input("xs", Type::tensor(DType::F32, [5, 3])).unwrap();
    let (carried, stacked) = g.scan_function(body, &[h, w], &[xs]).unwrap();
    let all = total(&mut g, stacked[0]).unwrap();
    let last = total(&mut g, carried[0]).unwrap();
    let loss = g.add(all, last).unwrap();
    g.finish(vec![("loss".into(), loss), ("stacked".into(), stacked[0])]).unwrap()
}

#[test]
fn a_scan_is_its_turns_and_has_their_gradient() {
    let graph = recurrence();
    let mut rng = Rng::new(3);
    let inputs: Inputs = [("h", vec![3]), ("w", vec![3]), ("xs", vec![5, 3])]
        .map(|(name, shape)| (name.to_owned(), rng.normal(DType::F32, &shape).into()))
        .to_vec();
    let (mut h, w, xs) = (floats(&inputs, "h"), floats(&inputs, "w"), floats(&inputs, "xs"));
    let mut wanted = Vec::new();
    for x in xs.chunks(3) {
        h = (0..3).map(|i| (h[i] * w[i] + x[i]).tanh()).collect();
        wanted.extend((0..3).map(|i| h[i] * x[i]));
    }
    let got = floats(&run(&graph, &inputs, &Bindings::new()).unwrap(), "stacked");
    assert!(got.iter().zip(&wanted).all(|(a, b)| (a - b).abs() < 1e-12), "{got:?}, not {wanted:?}");
    let wrt = ["h", "w", "xs"].map(String::from);
    check("a scan", &graph, &inputs, &wrt, &Bindings::new(), &mut rng);
    // Two functions, forward and backward, for all turns but the last, whose `w` goes nowhere, and two for that.
    assert_eq!(gradient(&graph, "loss", &wrt).unwrap().functions.len(), 5);
    let inputs = with_tangents(&inputs, &wrt, &mut rng);
    check("a scan, twice", &gradient_along(&graph, &wrt).unwrap(), &inputs, &wrt, &Bindings::new(), &mut rng);
}

/// Doubles `x` while the sum of its elements is below 100, `most` times at most.
fn doubling(most: usize) -> Graph {
    let mut g = Builder::new();
    let condition = g.function("small", |g| {
        let x = g.arg("x", row(2));
        let sum = total(g, x)?;
        let bound = g.constant(DType::F32, 100.0)?;
        Ok(vec![g.lt(sum, bound)?])
    });
    let body = g.function("double", |g| {
        let x = g.arg("x", row(2));
        Ok(vec![g.add(x, x)?])
    });
    let x = g.step_input("x", row(2)).unwrap();
    let y = g.while_loop(condition.unwrap(), body.unwrap(), &[x], most).unwrap();
    let loss = total(&mut g, y[0]).unwrap();
    g.finish(vec![("loss".into(), loss)]).unwrap()
}

#[test]
fn a_loop_ends_where_its_condition_says_and_has_the_gradient_of_its_turns() {
    let inputs = |x: f64| vec![("x".to_owned(), Tensor::float(DType::F32, &[2], vec![x, 1.0]).into())];
    let at = |graph: &Graph, x: f64, name: &str| floats(&run(graph, &inputs(x), &Bindings::new()).unwrap(), name);
    let graph = doubling(10);
    assert_eq!(at(&graph, 2.0, "loss"), [192.0]);
    assert_eq!(at(&graph, 99.0, "loss"), [100.0]);
    assert_eq!(at(&doubling(3), 2.0, "loss"), [24.0]);
    assert_eq!(at(&doubling(0), 2.0, "loss"), [3.0]);
    let gradient = gradient(&graph, "loss", &["x"]).unwrap();
    assert_eq!(at(&gradient, 2.0, "grad.x"), [64.0, 64.0]);
    assert_eq!(at(&gradient, 99.0, "grad.x"), [1.0, 1.0]);
}

/// `round(x * scale)`, through which the gradient for `x` passes as through `x * scale`.
fn rounded(cotangents: usize) -> UserGradient {
    UserGradient::new(
        "round_through",
        [2, 1],
        |g, inputs| {
            let scaled = g.mul(inputs[0], inputs[1])?;
            let half = g.constant(DType::F32, 0.5)?;
            let above = g.add(scaled, half)?;
            Ok(vec![g.floor(above)?])
        },
        move |g, inputs| Ok(vec![g.mul(inputs[2], inputs[1])?; cotangents]),
    )
}

#[test]
fn a_gradient_of_ones_own_takes_the_place_of_the_derived_one() {
    let built = |op: UserGradient| {
        let mut g = Builder::new();
        let x = g.step_input("x", row(3))?;
        let scale = g.step_input("scale", row(3))?;
        let y = g.composite(op, &[x, scale])?[0];
        let y = g.mul(y, y)?;
        let loss = total(&mut g, y)?;
        g.finish(vec![("loss".into(), loss)])
    };
    let graph = built(rounded(1)).unwrap();
    let of = |values: [f64; 3]| Value::from(Tensor::float(DType::F32, &[3], values.to_vec()));
    let inputs = vec![("x".to_owned(), of([0.4, 1.2, -2.0])), ("scale".to_owned(), of([2.0, 3.0, 0.5]))];
    let outputs = run(&gradient(&graph, "loss", &["x"]).unwrap(), &inputs, &Bindings::new()).unwrap();
    assert_eq!(floats(&outputs, "loss"), [1.0 + 16.0 + 1.0]);
    // 2 y scale, with y = 1, 4, -1.
    assert_eq!(floats(&outputs, "grad.x"), [4.0, 24.0, -1.0]);
    let wrong = gradient(&built(rounded(2)).unwrap(), "loss", &["x"]).expect_err("gives two").to_string();
    assert!(wrong.contains("the gradient of round_through gives f32[3], f32[3], which must be f32[3]"), "{wrong}");
    let mut g = Builder::new();
    let asking =
        UserGradient::new("asking", [1, 1], |g, _| Ok(vec![g.weight("w", row(3))?]), |_, inputs| Ok(inputs.to_vec()));
    let x = g.step_input("x", row(3)).unwrap();
    let error = g.composite(asking, &[x]).expect_err("asks for a weight").to_string();
    assert!(error.contains("asks for 1 weights, states or step inputs; pass them in"), "{error}");
}

#[test]
fn loops_over_what_does_not_fit_are_refused() {
    let error = |build: &dyn Fn(&mut Builder) -> Result<()>| -> GraphError {
        build(&mut Builder::new()).expect_err("does not fit")
    };
    let identity = |g: &mut Builder| {
        g.function("same", |g| {
            let x = g.arg("x", row(3));
            Ok(vec![x])
        })
    };
    let text = error(&|g| {
        let body = identity(g)?;
        g.scan_function(body, &[], &[]).map(|_| ())
    });
    assert!(text.to_string().contains("over tensors whose first extent is a constant above 0"), "{text}");
    let text = error(&|g| {
        let body = identity(g)?;
        let x = g.step_input("x", row(3))?;
        g.while_loop(body, body, &[x], 2).map(|_| ())
    });
    assert!(text.to_string().contains("the condition of a loop must be bool[], got f32[3]"), "{text}");
    let scalar = Type::tensor(DType::F32, Shape::default());
    let text = error(&|g| {
        let body = identity(g)?;
        let x = g.step_input("x", scalar.clone())?;
        g.scan_function(body, &[], &[x]).map(|_| ())
    });
    assert!(text.to_string().contains("first extent"), "{text}");
}
