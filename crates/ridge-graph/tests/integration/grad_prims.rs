//! The gradient of each primitive against finite differences, and where it is zero, shared or refused.

use crate::support::gradients::{Inputs, check, finish_with_loss, floats, run, total};
use ridge_graph::grad::gradient;
use ridge_graph::sample::Rng;
use ridge_graph::{
    Binary, Bindings, Builder, CollectiveKind, Combine, DType, Dim, Graph, GraphError, Op, Prim, Result, Shape, Tensor,
    Type, Unary, Value, Var, prim_registry,
};

type Build<'a> = &'a dyn Fn(&mut Builder, &[Var]) -> Result<Vec<Var>>;

fn float(shape: &[usize], values: &[f64]) -> Value {
    Tensor::float(DType::F32, shape, values.to_vec()).into()
}

fn index(shape: &[usize], values: &[i64]) -> Value {
    Tensor::int(DType::I32, shape, values.to_vec()).into()
}

/// Checks `build` applied to `values`, which become the arguments `x0`, `x1`, ...
fn check_build(what: &str, values: Vec<Value>, build: Build<'_>) {
    let mut rng = Rng::new(11);
    let mut g = Builder::new();
    let mut inputs: Inputs = Vec::new();
    let mut vars = Vec::new();
    let mut wrt = Vec::new();
    for (i, value) in values.into_iter().enumerate() {
        let name = format!("x{i}");
        let ty = value.ty();
        if ty.dtype.is_float() {
            wrt.push(name.clone());
        }
        vars.push(g.step_input(&name, ty).unwrap());
        inputs.push((name, value));
    }
    let outputs = build(&mut g, &vars).unwrap_or_else(|e| panic!("{what}: {e}"));
    let graph = finish_with_loss(g, &outputs, &mut rng, &mut inputs).unwrap();
    check(what, &graph, &inputs, &wrt, &Bindings::new(), &mut rng);
}

/// Checks one primitive.
fn check_prim(prim: &Prim, values: Vec<Value>) {
    check_build(prim.name(), values, &|g, inputs| g.prim(prim.clone(), inputs));
}

fn normal(seed: u64, shape: &[usize]) -> Value {
    Rng::new(seed).normal(DType::F32, shape).into()
}

/// Elements between 0.5 and 2: inside every function's domain, and away from its singularities.
fn positive(seed: u64, shape: &[usize]) -> Value {
    let mut rng = Rng::new(seed);
    let n = shape.iter().product();
    Tensor::float(DType::F32, shape, (0..n).map(|_| 0.5 + 1.5 * rng.unit()).collect()).into()
}

#[test]
fn elementwise_functions() {
    let smooth = [Unary::Neg, Unary::Abs, Unary::Exp, Unary::Sin, Unary::Cos, Unary::Tanh, Unary::Erf, Unary::Sigmoid];
    for op in smooth.into_iter().chain([Unary::Floor]) {
        check_prim(&Prim::Unary(op), vec![normal(1, &[3, 5])]);
    }
    for op in [Unary::Log, Unary::Sqrt, Unary::Rsqrt] {
        check_prim(&Prim::Unary(op), vec![positive(2, &[3, 5])]);
    }
    for op in [Binary::Add, Binary::Sub, Binary::Mul, Binary::Max, Binary::Min] {
        check_prim(&Prim::Binary(op), vec![normal(3, &[4, 3]), normal(4, &[4, 3])]);
    }
    for op in [Binary::Div, Binary::Rem, Binary::Pow] {
        check_prim(&Prim::Binary(op), vec![positive(5, &[4, 3]), positive(6, &[4, 3])]);
    }
    check_build("select", vec![normal(7, &[6]), normal(8, &[6])], &|g, x| {
        let limit = g.full_like(x[0], 0.1)?;
        let cond = g.lt(x[0], limit)?;
        Ok(vec![g.select(cond, x[0], x[1])?])
    });
    check_prim(&Prim::Cast(DType::BF16), vec![normal(9, &[4])]);
}

#[test]
fn reductions_and_scans() {
    for axis in 0..3 {
        for op in [Combine::Sum, Combine::Max, Combine::Min] {
            check_prim(&Prim::Reduce { op, axis }, vec![normal(1, &[2, 3, 4])]);
        }
        check_prim(&Prim::Scan { op: Combine::Sum, axis }, vec![normal(2, &[2, 3, 4])]);
    }
    check_prim(&Prim::Scan { op: Combine::Sum, axis: 0 }, vec![normal(2, &[0, 4])]);
    check_prim(&Prim::Reduce { op: Combine::Sum, axis: 0 }, vec![normal(2, &[0, 4])]);
}

#[test]
fn matrix_products_of_every_transposition() {
    for (trans_a, trans_b) in [(false, false), (false, true), (true, false), (true, true)] {
        for batch in [&[][..], &[3]] {
            let shape = |rows, cols, swapped| {
                let matrix = if swapped { [cols, rows] } else { [rows, cols] };
                [batch, &matrix].concat()
            };
            for out in [DType::F32, DType::BF16] {
                let a = normal(1, &shape(4, 5, trans_a));
                let b = normal(2, &shape(5, 2, trans_b));
                check_prim(&Prim::MatMul { trans_a, trans_b, out }, vec![a, b]);
            }
        }
    }
}

#[test]
fn rows_by_index() {
    // An index twice, and one out of range each side.
    let indices = || index(&[5], &[2, 0, 2, 9, -1]);
    for axis in 0..2 {
        check_prim(&Prim::Gather { axis }, vec![normal(1, &[4, 4]), indices()]);
        for add in [false, true] {
            let updates = if axis == 0 { normal(3, &[5, 4]) } else { normal(3, &[4, 5]) };
            check_prim(&Prim::Scatter { axis, add }, vec![normal(2, &[4, 4]), indices(), updates]);
        }
    }
    let matrix = || index(&[2, 3], &[1, 1, 0, 3, 1, 7]);
    check_prim(&Prim::Gather { axis: 1 }, vec![normal(1, &[2, 4, 2]), matrix()]);
    for add in [false, true] {
        check_prim(&Prim::Scatter { axis: 1, add }, vec![normal(2, &[2, 4, 2]), matrix(), normal(3, &[2, 2, 3, 2])]);
        check_prim(&Prim::Scatter { axis: 0, add }, vec![normal(2, &[4, 2]), index(&[], &[1]), normal(3, &[2])]);
    }
}

#[test]
fn shapes() {
    let x = || normal(1, &[2, 3, 4]);
    check_prim(&Prim::Slice { axis: 2, start: 1.into(), len: 2.into() }, vec![x()]);
    check_prim(&Prim::Pad { axis: 1, before: 2.into(), after: 1.into(), value: 7.0 }, vec![x()]);
    check_prim(&Prim::Concat { axis: 1 }, vec![x(), normal(2, &[2, 1, 4]), normal(3, &[2, 0, 4])]);
    check_prim(&Prim::Reshape([6, 4].into()), vec![x()]);
    check_prim(&Prim::Transpose(vec![2, 0, 1]), vec![x()]);
    check_prim(&Prim::Broadcast([5, 2, 3, 4].into()), vec![normal(1, &[2, 1, 4])]);
    check_prim(&Prim::Broadcast([2, 3].into()), vec![normal(1, &[])]);
}

#[test]
fn the_values_of_a_small_sort() {
    for (axis, descending) in [(0, true), (1, false), (1, true)] {
        check_prim(&Prim::Sort { axis, descending, keep: 2.into() }, vec![normal(1, &[3, 5])]);
    }
}

/// The loss is the sum of the outputs of `build`; gives the gradient for `x`.
fn slope(x: Value, build: Build<'_>) -> Result<Vec<f64>, GraphError> {
    let graph = summed(x.ty(), build)?;
    let outputs = run(&gradient(&graph, "loss", &["x"])?, &vec![("x".into(), x)], &Bindings::new())?;
    Ok(floats(&outputs, "grad.x"))
}

fn summed(ty: Type, build: Build<'_>) -> Result<Graph> {
    let mut g = Builder::new();
    let x = g.step_input("x", ty)?;
    let y = g.scoped("here", |g| build(g, &[x]))?[0];
    let loss = total(&mut g, y)?;
    g.finish(vec![("loss".into(), loss)])
}

#[test]
fn ties_of_a_maximum_share_and_the_first_of_two_takes_all() {
    let tied = || float(&[4], &[1.0, 3.0, 3.0, 2.0]);
    let shared = slope(tied(), &|g, x| Ok(vec![g.reduce_max(x[0], 0)?])).unwrap();
    assert_eq!(shared, [0.0, 0.5, 0.5, 0.0]);
    for op in [Binary::Max, Binary::Min] {
        let first = slope(float(&[1], &[0.0]), &|g, x| {
            let double = g.add(x[0], x[0])?;
            g.prim(Prim::Binary(op), &[x[0], double])
        });
        assert_eq!(first.unwrap(), [1.0]);
    }
}

#[test]
fn a_power_of_zero_has_a_finite_slope() {
    let bases = float(&[3], &[0.0, 0.0, 2.0]);
    let got = slope(bases, &|g, x| {
        let exponents = g.table(DType::F32, &[0.0, 2.0, 3.0])?;
        Ok(vec![g.pow(x[0], exponents)?])
    });
    assert_eq!(got.unwrap(), [0.0, 0.0, 12.0]);
}

#[test]
fn what_does_not_vary_has_a_gradient_of_zero() {
    let got = slope(float(&[2], &[0.3, 1.7]), &|g, x| {
        let whole = g.floor(x[0])?;
        let back = g.cast(x[0], DType::I32)?;
        let back = g.cast(back, DType::F32)?;
        let best = g.argmax(x[0], 0)?;
        let best = g.cast(best, DType::F32)?;
        let sum = g.add(whole, back)?;
        Ok(vec![g.add(sum, best)?])
    });
    assert_eq!(got.unwrap(), [0.0, 0.0]);
}

#[test]
fn linear_recurrences_over_ragged_steps() {
    let recurrences = prim_registry();
    let samples = recurrences.get("linear_recurrence").expect("is registered").samples(&mut Rng::new(7), DType::F32);
    for sample in samples {
        let Op::Prim(prim) = &sample.op else { panic!("a primitive") };
        let elements: usize = sample.inputs[4].ty().shape.as_const().expect("constant").iter().product();
        // Evaluation takes seconds for the others, which differ in nothing but their sizes.
        if elements <= 2000 {
            check_prim(prim, sample.inputs.clone());
        }
    }
}

#[test]
fn what_has_no_gradient_is_named_with_its_scope() {
    let ty = Type::tensor(DType::F32, [100]);
    let refused = |build: Build<'_>| {
        let graph = summed(ty.clone(), build).unwrap();
        gradient(&graph, "loss", &["x"]).unwrap_err().to_string()
    };
    let split = Prim::Collective { kind: CollectiveKind::Split(0), mesh: "tp".into(), ranks: 2 };
    assert_eq!(
        refused(&|g, x| g.prim(split.clone(), x)),
        "here: split(f32[100]): how the gradient of a slice of what every rank has is shared among them is not known; \
         shard after differentiating",
    );
    assert_eq!(
        refused(&|g, x| g.prim(Prim::Scan { op: Combine::Max, axis: 0 }, x)),
        "here: scan_max(f32[100]): the gradient of a running maximum or minimum is not defined",
    );
    assert_eq!(
        refused(&|g, x| Ok(vec![g.sort(x[0], 0, true, 100)?.0])),
        "here: sort(f32[100]): the gradient of more than 64 sorted values is not defined; keep fewer",
    );
}

#[test]
fn inside_a_function_it_is_named_with_the_scope_of_the_call() {
    let mut g = Builder::new();
    let ty = Type::tensor(DType::F32, [4]);
    let function = g.function("f", |g| {
        let x = g.arg("x", ty.clone());
        g.scoped("here", |g| g.prim(Prim::Scan { op: Combine::Max, axis: 0 }, &[x]))
    });
    let function = function.unwrap();
    let x = g.step_input("x", ty).unwrap();
    let y = g.scoped("layers.3", |g| g.call(function, &[x])).unwrap()[0];
    let loss = total(&mut g, y).unwrap();
    let graph = g.finish(vec![("loss".into(), loss)]).unwrap();
    let error = gradient(&graph, "loss", &["x"]).unwrap_err().to_string();
    assert!(error.starts_with("layers.3.here: scan_max(f32[4]): "), "{error}");
}

#[test]
fn extents_may_be_symbols() {
    let mut g = Builder::new();
    let tokens = Dim::sym("tokens");
    let x = g.step_input("x", Type::tensor(DType::F32, Shape(vec![tokens.clone(), 3.into()]))).unwrap();
    let indices = g.step_input("indices", Type::tensor(DType::I32, [tokens.clone()])).unwrap();
    let build = |g: &mut Builder| {
        let sums = g.scan_sum(x, 0)?;
        let picked = g.gather(sums, indices, 0)?;
        let replaced = g.scatter(x, indices, picked, 0)?;
        let tail = g.slice(replaced, 0, 1, tokens.clone() + -1)?;
        let mean = g.div_by_dim(tail, &tokens)?;
        let square = g.mul(mean, mean)?;
        total(g, square)
    };
    let loss = build(&mut g).unwrap();
    let graph = g.finish(vec![("loss".into(), loss)]).unwrap();
    let mut rng = Rng::new(3);
    let inputs =
        vec![("x".into(), rng.normal(DType::F32, &[5, 3]).into()), ("indices".into(), index(&[5], &[4, 0, 0, 2, 6]))];
    check("symbols", &graph, &inputs, &["x".into()], &Bindings::new().with("tokens", 5), &mut rng);
}
