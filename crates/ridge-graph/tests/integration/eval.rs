//! Evaluation: the meaning of graphs, functions, states, stored parameters and meshes.

use ridge_graph::format::Q8_0;
use ridge_graph::{
    Arg, Bindings, Builder, CollectiveKind, DType, Dim, FormatRef, Graph, Precision, Prim, Result, Shape, Tensor, Type,
    Value, evaluate, evaluate_function, evaluate_mesh,
};

fn f32s(shape: &[usize], values: &[f64]) -> Value {
    Tensor::float(DType::F32, shape, values.to_vec()).into()
}

fn by_name<'a>(args: &'a [(&str, Value)]) -> impl Fn(&Arg) -> Option<Value> + 'a {
    move |arg| args.iter().find(|(name, _)| *name == &*arg.name).map(|(_, value)| value.clone())
}

fn floats(outputs: &[(String, Value)], index: usize) -> Vec<f64> {
    outputs[index].1.tensor().floats().to_vec()
}

/// `x @ w` in a function called for two layers, each of which adds what came in.
fn layers() -> Result<Graph> {
    let mut g = Builder::new();
    let ty = Type::tensor(DType::F32, [Dim::sym("tokens"), Dim::from(2)]);
    let layer = g.function("layer", |g| {
        let x = g.arg("x", ty.clone());
        let w = g.weight("w", Type::tensor(DType::F32, [2, 2]))?;
        let product = g.matmul(x, w, false, true, DType::F32)?;
        Ok(vec![g.add(x, product)?])
    })?;
    let mut x = g.step_input("x", ty)?;
    for i in 0..2 {
        x = g.scoped(&format!("layers.{i}"), |g| g.call(layer, &[x]))?[0];
    }
    g.finish(vec![("y".into(), x)])
}

#[test]
fn a_function_is_evaluated_once_for_each_call_with_its_own_weights() {
    let graph = layers().unwrap();
    let args = [
        ("x", f32s(&[1, 2], &[1.0, 2.0])),
        ("layers.0.w", f32s(&[2, 2], &[0.0, 1.0, 10.0, 0.0])),
        ("layers.1.w", f32s(&[2, 2], &[1.0, 0.0, 0.0, 0.0])),
    ];
    let bindings = Bindings::new().with("tokens", 1);
    let outputs = evaluate(&graph, &by_name(&args), &bindings, Precision::Exact).unwrap();
    assert_eq!(outputs[0].0, "y");
    assert_eq!(floats(&outputs, 0), [6.0, 12.0]);
}

#[test]
fn an_argument_that_is_missing_or_misfit_is_named() {
    let graph = layers().unwrap();
    let bindings = Bindings::new().with("tokens", 3);
    let fail = |args: &[(&str, Value)], bindings: &Bindings| {
        evaluate(&graph, &by_name(args), bindings, Precision::Exact).unwrap_err().to_string()
    };
    assert_eq!(fail(&[], &bindings), "x: argument is missing; give it as f32[tokens, 2]");
    assert_eq!(
        fail(&[("x", f32s(&[1, 2], &[1.0, 2.0]))], &bindings),
        "x: argument must be f32[tokens, 2], with extents [3, 2] under the bindings, got f32[1, 2]"
    );
    let unbound = fail(&[("x", f32s(&[1, 2], &[1.0, 2.0]))], &Bindings::new());
    assert!(unbound.contains("`tokens` is not bound"), "{unbound}");
    let mut broken = Tensor::zeros(DType::F32, &[3, 2]);
    broken.shape = vec![3, 2];
    broken.data = ridge_graph::Data::Float(vec![0.0; 5]);
    assert!(fail(&[("x", broken.into())], &bindings).contains("5 float elements"));
}

#[test]
fn an_op_without_a_result_names_its_scope() {
    let mut g = Builder::new();
    let n = Dim::sym("n");
    let x = g.arg("x", Type::tensor(DType::F32, [n.clone()]));
    let y = g.scoped("head", |g| g.slice(x, 0, n, 1)).unwrap();
    let graph = g.finish(vec![("y".into(), y)]).unwrap();
    let bindings = Bindings::new().with("n", 4);
    let args = [("x", f32s(&[4], &[0.0; 4]))];
    let error = evaluate(&graph, &by_name(&args), &bindings, Precision::Exact).unwrap_err();
    assert_eq!(error.to_string(), "head: slice(f32[n]): slice 4..5 of an extent of 4");
}

#[test]
fn a_state_comes_back_as_its_last_version() {
    let mut g = Builder::new();
    let state = g.state("count", Type::state(DType::I32, [2])).unwrap();
    let now = g.state_read(state).unwrap();
    let next = g.add(now, now).unwrap();
    g.state_write(state, next).unwrap();
    let graph = g.finish(vec![("was".into(), now)]).unwrap();
    let args = [("count", Value::from(Tensor::int(DType::I32, &[2], vec![3, -4])))];
    let outputs = evaluate(&graph, &by_name(&args), &Bindings::new(), Precision::Rounded).unwrap();
    assert_eq!((outputs[0].0.as_str(), outputs[0].1.tensor().ints()), ("was", &[3, -4][..]));
    assert_eq!((outputs[1].0.as_str(), outputs[1].1.tensor().ints()), ("count", &[6, -8][..]));
}

#[test]
fn a_composite_means_its_decomposition_under_symbols_too() {
    let mut g = Builder::new();
    let x = g.arg("x", Type::tensor(DType::F32, [Dim::sym("tokens"), Dim::sym("hidden")]));
    let w = g.arg("w", Type::tensor(DType::F32, [Dim::sym("hidden")]));
    let y = g.rms_norm(x, w, 0.0).unwrap();
    let graph = g.finish(vec![("y".into(), y)]).unwrap();
    let bindings = Bindings::new().with("tokens", 1).with("hidden", 2);
    let args = vec![f32s(&[1, 2], &[3.0, 4.0]), f32s(&[2], &[1.0, 2.0])];
    let outputs = evaluate_function(&graph.functions, graph.main, args, &bindings, Precision::Exact).unwrap();
    let rms = 12.5f64.sqrt();
    for (got, want) in outputs[0].tensor().floats().iter().zip([3.0 / rms, 8.0 / rms]) {
        assert!((got - want).abs() < 1e-14, "{got} {want}");
    }
}

#[test]
fn a_stored_parameter_decodes() {
    let mut g = Builder::new();
    let format = FormatRef::new(Q8_0);
    let w = g.weight("w", Type::tensor(DType::F32, [1, 32]).stored_as(format.clone())).unwrap();
    let y = g.decoded(w, DType::F32).unwrap();
    let graph = g.finish(vec![("y".into(), y)]).unwrap();
    let values: Vec<f64> = (0..32).map(|i| f64::from(i) * 4.0 + 3.0).collect();
    let stored = Value::stored(&Tensor::float(DType::F32, &[1, 32], values.clone()), &format);
    let args = [("w", stored)];
    let outputs = evaluate(&graph, &by_name(&args), &Bindings::new(), Precision::Exact).unwrap();
    assert_eq!(floats(&outputs, 0), values);
}

#[test]
fn rounded_sums_round_at_each_step_and_exact_ones_do_not() {
    let mut g = Builder::new();
    let x = g.arg("x", Type::tensor(DType::F32, [3]));
    let y = g.reduce_sum(x, 0).unwrap();
    let graph = g.finish(vec![("y".into(), y)]).unwrap();
    let args = [("x", f32s(&[3], &[16_777_216.0, 1.0, 1.0]))];
    let sum = |precision| floats(&evaluate(&graph, &by_name(&args), &Bindings::new(), precision).unwrap(), 0);
    assert_eq!(sum(Precision::Exact), [16_777_218.0]);
    assert_eq!(sum(Precision::Rounded), [16_777_216.0]);
}

fn collective(kind: CollectiveKind, mesh: &str, ranks: usize, shape: [usize; 2]) -> Graph {
    let mut g = Builder::new();
    let x = g.arg("x", Type::tensor(DType::F32, shape));
    let y = g.prim(Prim::Collective { kind, mesh: mesh.into(), ranks }, &[x]).unwrap()[0];
    g.finish(vec![("y".into(), y)]).unwrap()
}

fn on_mesh(graph: &Graph, mesh: &[(&str, usize)]) -> Result<Vec<Vec<f64>>> {
    let shape = graph.main().args[0].ty.shape.as_const().unwrap();
    // Element `i` of rank `r` is `10 r + i`.
    let args = |rank: usize, _: &Arg| {
        let n: usize = shape.iter().product();
        Some(f32s(&shape, &(0..n).map(|i| (10 * rank + i) as f64).collect::<Vec<_>>()))
    };
    let by_rank = evaluate_mesh(graph, mesh, &args, &Bindings::new(), Precision::Rounded)?;
    Ok(by_rank.iter().map(|outputs| floats(outputs, 0)).collect())
}

#[test]
fn collectives_act_over_one_axis() {
    let mesh = [("tp", 2)];
    let all_reduce = collective(CollectiveKind::AllReduce, "tp", 2, [1, 2]);
    assert_eq!(on_mesh(&all_reduce, &mesh).unwrap(), [[10.0, 12.0], [10.0, 12.0]]);
    let rows = collective(CollectiveKind::AllGather(0), "tp", 2, [1, 2]);
    assert_eq!(on_mesh(&rows, &mesh).unwrap(), [[0.0, 1.0, 10.0, 11.0], [0.0, 1.0, 10.0, 11.0]]);
    let columns = collective(CollectiveKind::AllGather(1), "tp", 2, [2, 1]);
    assert_eq!(on_mesh(&columns, &mesh).unwrap(), [[0.0, 10.0, 1.0, 11.0], [0.0, 10.0, 1.0, 11.0]]);
    let scattered = collective(CollectiveKind::ReduceScatter(1), "tp", 2, [2, 2]);
    assert_eq!(on_mesh(&scattered, &mesh).unwrap(), [[10.0, 14.0], [12.0, 16.0]]);
    // The second half of each rank's columns, one below the other, goes to rank 1.
    let moved = collective(CollectiveKind::AllToAll { split: 1, concat: 0 }, "tp", 2, [1, 4]);
    assert_eq!(on_mesh(&moved, &mesh).unwrap(), [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]]);
    let beside = collective(CollectiveKind::AllToAll { split: 0, concat: 1 }, "tp", 2, [2, 1]);
    assert_eq!(on_mesh(&beside, &mesh).unwrap(), [[0.0, 10.0], [1.0, 11.0]]);
    let of_one = collective(CollectiveKind::Broadcast(1), "tp", 2, [1, 2]);
    assert_eq!(on_mesh(&of_one, &mesh).unwrap(), [[10.0, 11.0], [10.0, 11.0]]);
    let to_one = collective(CollectiveKind::Reduce(1), "tp", 2, [1, 2]);
    assert_eq!(on_mesh(&to_one, &mesh).unwrap(), [[0.0, 0.0], [10.0, 12.0]]);
    let sent = collective(CollectiveKind::Send { from: 1, to: 0 }, "tp", 2, [1, 2]);
    assert_eq!(on_mesh(&sent, &mesh).unwrap(), [[10.0, 11.0], [0.0, 0.0]]);
}

#[test]
fn collectives_act_within_groups_of_a_larger_mesh() {
    let mesh = [("dp", 2), ("tp", 2)];
    let over_tp = collective(CollectiveKind::AllReduce, "tp", 2, [1, 1]);
    assert_eq!(on_mesh(&over_tp, &mesh).unwrap(), [[10.0], [10.0], [50.0], [50.0]]);
    let over_dp = collective(CollectiveKind::AllReduce, "dp", 2, [1, 1]);
    assert_eq!(on_mesh(&over_dp, &mesh).unwrap(), [[20.0], [40.0], [20.0], [40.0]]);
}

#[test]
fn a_collective_needs_its_axis() {
    let graph = collective(CollectiveKind::AllReduce, "tp", 2, [1, 1]);
    let error = on_mesh(&graph, &[("dp", 2)]).unwrap_err().to_string();
    assert!(error.contains("no axis `tp`"), "{error}");
    let error = on_mesh(&graph, &[("tp", 4)]).unwrap_err().to_string();
    assert!(error.contains("over 2 ranks of `tp`, but the mesh has 4"), "{error}");
    let mut g = Builder::new();
    let x = g.arg("x", Type::tensor(DType::F32, [1, 1]));
    let kind = CollectiveKind::Send { from: 0, to: 2 };
    let error = g.prim(Prim::Collective { kind, mesh: "tp".into(), ranks: 2 }, &[x]).unwrap_err().to_string();
    assert!(error.contains("there is no rank 2 among the 2 of `tp`"), "{error}");
    let alone = collective(CollectiveKind::AllReduce, "tp", 1, [1, 1]);
    assert_eq!(on_mesh(&alone, &[]).unwrap(), [[0.0]]);
}

/// One primitive on given tensors.
fn apply(prim: Prim, inputs: &[Tensor]) -> Vec<Tensor> {
    let mut g = Builder::new();
    let vars: Vec<_> = inputs.iter().map(|t| g.arg("x", t.ty())).collect();
    let outputs = g.prim(prim, &vars).unwrap();
    let graph = g.finish(outputs.into_iter().map(|v| (String::new(), v)).collect()).unwrap();
    let args = inputs.iter().cloned().map(Value::from).collect();
    let outputs = evaluate_function(&graph.functions, graph.main, args, &Bindings::new(), Precision::Rounded).unwrap();
    outputs.iter().map(|v| v.tensor().clone()).collect()
}

fn ints(dtype: DType, values: &[i64]) -> Tensor {
    Tensor::int(dtype, &[values.len()], values.to_vec())
}

fn reals(values: &[f64]) -> Tensor {
    Tensor::float(DType::F32, &[values.len()], values.to_vec())
}

#[test]
fn integer_division_rounds_down_and_by_zero_gives_zero() {
    use ridge_graph::Binary;
    let (a, b) = (ints(DType::I32, &[7, -7, 7, -7, 5, 0]), ints(DType::I32, &[2, 2, -2, -2, 0, 0]));
    assert_eq!(apply(Prim::Binary(Binary::Div), &[a.clone(), b.clone()])[0].ints(), [3, -4, -4, 3, 0, 0]);
    assert_eq!(apply(Prim::Binary(Binary::Rem), &[a, b])[0].ints(), [1, 1, -1, -1, 0, 0]);
    let (low, one) = (ints(DType::I8, &[-128]), ints(DType::I8, &[-1]));
    assert_eq!(apply(Prim::Binary(Binary::Div), &[low.clone(), one.clone()])[0].ints(), [-128]);
    assert_eq!(apply(Prim::Binary(Binary::Add), &[low, one])[0].ints(), [127]);
}

#[test]
fn casts_to_integers_truncate_and_saturate_and_between_them_wrap() {
    let x = reals(&[1.9, -1.9, 1e9, -1e9, f64::NAN, f64::INFINITY]);
    assert_eq!(apply(Prim::Cast(DType::I8), std::slice::from_ref(&x))[0].ints(), [1, -1, 127, -128, 0, 127]);
    assert_eq!(apply(Prim::Cast(DType::U8), std::slice::from_ref(&x))[0].ints(), [1, 0, 255, 0, 0, 255]);
    assert_eq!(apply(Prim::Cast(DType::Bool), &[x])[0].ints(), [1; 6]);
    assert_eq!(apply(Prim::Cast(DType::I8), &[ints(DType::I32, &[300, -1])])[0].ints(), [44, -1]);
    assert_eq!(apply(Prim::Cast(DType::BF16), &[ints(DType::I32, &[257])])[0].floats(), [256.0]);
}

#[test]
fn sorting_is_stable_and_puts_nan_last_either_way() {
    let x = reals(&[2.0, f64::NAN, 1.0, 2.0, f64::INFINITY]);
    let sort = |descending, keep: usize| {
        let out = apply(Prim::Sort { axis: 0, descending, keep: keep.into() }, std::slice::from_ref(&x));
        out[1].ints().to_vec()
    };
    assert_eq!(sort(false, 5), [2, 0, 3, 4, 1]);
    assert_eq!(sort(true, 5), [4, 0, 3, 2, 1]);
    assert_eq!(sort(true, 2), [4, 0]);
    assert_eq!(apply(Prim::ArgMax { axis: 0 }, &[x])[0].ints(), [1]);
    assert_eq!(apply(Prim::ArgMax { axis: 0 }, &[reals(&[1.0, 3.0, 3.0])])[0].ints(), [1]);
}

#[test]
fn scatter_drops_what_is_out_of_range_and_keeps_the_last_of_equals() {
    let data = Tensor::float(DType::F32, &[3, 1], vec![1.0, 2.0, 3.0]);
    let indices = ints(DType::I32, &[2, -1, 2, 3]);
    let updates = Tensor::float(DType::F32, &[4, 1], vec![10.0, 20.0, 30.0, 40.0]);
    let inputs = [data.clone(), indices.clone(), updates];
    assert_eq!(apply(Prim::Scatter { axis: 0, add: false }, &inputs)[0].floats(), [1.0, 2.0, 30.0]);
    assert_eq!(apply(Prim::Scatter { axis: 0, add: true }, &inputs)[0].floats(), [1.0, 2.0, 43.0]);
    assert_eq!(apply(Prim::Gather { axis: 0 }, &[data, indices])[0].floats(), [3.0, 0.0, 3.0, 0.0]);
}

#[test]
fn a_gather_by_a_matrix_of_indices_adds_an_axis() {
    let data = Tensor::float(DType::F32, &[2, 3], vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    let indices = Tensor::int(DType::I64, &[2, 2], vec![2, 0, 1, 9]);
    let out = apply(Prim::Gather { axis: 1 }, &[data, indices]);
    assert_eq!(out[0].shape, [2, 2, 2]);
    assert_eq!(out[0].floats(), [2.0, 0.0, 1.0, 0.0, 5.0, 3.0, 4.0, 0.0]);
}

#[test]
fn matrix_products_agree_over_all_transpositions() {
    let a = Tensor::float(DType::F32, &[2, 2, 3], (0..12).map(f64::from).collect());
    let b = Tensor::float(DType::F32, &[2, 3, 2], (0..12).map(|i| f64::from(i) - 5.0).collect());
    let turned = |t: &Tensor| apply(Prim::Transpose(vec![0, 2, 1]), std::slice::from_ref(t)).remove(0);
    // By the definition, one sum for each element.
    let at = |p: usize, i: usize, j: usize| {
        (0..3).map(|k| a.floats()[p * 6 + i * 3 + k] * b.floats()[p * 6 + k * 2 + j]).sum()
    };
    let want = Tensor::float(DType::F32, &[2, 2, 2], (0..8).map(|e| at(e / 4, e / 2 % 2, e % 2)).collect());
    for (trans_a, trans_b) in [(false, false), (true, false), (false, true), (true, true)] {
        let a = if trans_a { turned(&a) } else { a.clone() };
        let b = if trans_b { turned(&b) } else { b.clone() };
        let out = apply(Prim::MatMul { trans_a, trans_b, out: DType::F32 }, &[a, b]);
        assert_eq!(out[0], want, "{trans_a} {trans_b}");
    }
}

#[test]
fn views_pads_and_scans_move_the_right_elements() {
    let x = Tensor::float(DType::F32, &[2, 3], (1..7).map(f64::from).collect());
    let one = std::slice::from_ref(&x);
    assert_eq!(apply(Prim::Transpose(vec![1, 0]), one)[0].floats(), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    let pad = Prim::Pad { axis: 1, before: 1.into(), after: 0.into(), value: -1.0 };
    assert_eq!(apply(pad, one)[0].floats(), [-1.0, 1.0, 2.0, 3.0, -1.0, 4.0, 5.0, 6.0]);
    let scan = |axis| apply(Prim::Scan { op: ridge_graph::Combine::Sum, axis }, one)[0].floats().to_vec();
    assert_eq!(scan(0), [1.0, 2.0, 3.0, 5.0, 7.0, 9.0]);
    assert_eq!(scan(1), [1.0, 3.0, 6.0, 4.0, 9.0, 15.0]);
    let column = Tensor::float(DType::F32, &[2, 1], vec![1.0, 2.0]);
    let wide = apply(Prim::Broadcast(Shape::from([2, 2, 2])), &[column]);
    assert_eq!(wide[0].floats(), [1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0]);
    let iota = apply(Prim::Iota { shape: Shape::from([2, 2]), axis: 0, dtype: DType::I64 }, &[]);
    assert_eq!(iota[0].ints(), [0, 0, 1, 1]);
    let joined = apply(Prim::Concat { axis: 1 }, &[x.clone(), Tensor::float(DType::F32, &[2, 1], vec![9.0, 8.0])]);
    assert_eq!(joined[0].floats(), [1.0, 2.0, 3.0, 9.0, 4.0, 5.0, 6.0, 8.0]);
}

#[test]
fn a_large_matrix_product_takes_no_minutes() {
    let a = Tensor::zeros(DType::F32, &[128, 256]);
    let b = Tensor::zeros(DType::F32, &[256, 160]);
    let out = apply(Prim::MatMul { trans_a: false, trans_b: false, out: DType::BF16 }, &[a, b]);
    assert_eq!(out[0].shape, [128, 160]);
}
