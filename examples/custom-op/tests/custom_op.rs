//! The op conforms, fuses, and trains.

use std::sync::Arc;

use custom_op::{GatedSquaredRelu, kernels, registry};
use ridge_cpu::{Cpu, CpuOptions};
use ridge_graph::conformance::{judge, samples_of};
use ridge_graph::grad::{Differentiated, gradient};
use ridge_graph::sample::Rng;
use ridge_graph::{Arg, Bindings, Builder, DType, Graph, Op, Precision, Role, Shape, Tensor, Type, Value, evaluate};
use ridge_runtime::{Backend, Session, WeightData, lower};

/// A CPU with the kernels of this crate, and memory that is poisoned before each step.
fn cpu(threads: usize) -> Arc<Cpu> {
    let options = CpuOptions { threads: Some(threads), poison: true, kernels: kernels(), ..CpuOptions::default() };
    Arc::new(Cpu::new(options).expect("starts"))
}

/// The outputs called `names` of one step.
fn run(cpu: &Arc<Cpu>, graph: &Graph, names: &[&str], value: &dyn Fn(&Arg) -> Tensor) -> Vec<Tensor> {
    let mut session = Session::new(Arc::clone(cpu) as Arc<dyn Backend>);
    for arg in graph.args(Role::Weight) {
        session.load(&arg.name, &arg.ty, vec![WeightData::Owned(value(arg).to_bytes())]).expect("fits");
    }
    let compiled = session.compile(graph, names).expect("compiles");
    let mut bucket = compiled.bucket(&Bindings::new()).expect("binds");
    for arg in graph.args(Role::StepInput) {
        bucket.set(&arg.name, &value(arg)).expect("has its type");
    }
    bucket.submit().expect("starts");
    bucket.wait().expect("ends");
    names.iter().map(|name| bucket.tensor(name).expect("is an output")).collect()
}

#[test]
fn op_conforms_on_the_cpu() {
    let cpus = [cpu(1), cpu(3)];
    let mut checked = 0;
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F8E4M3, DType::F8E5M2] {
        let samples = samples_of(&registry().expect("names are new"), dtype, 5);
        for (name, sample) in samples.iter().filter(|(name, _)| name.starts_with("gated_squared_relu")) {
            let graph = sample.graph().expect("is valid");
            let outputs: Vec<&str> = graph.main().outputs.iter().map(|o| &*o.name).collect();
            let value = |arg: &Arg| sample.inputs[arg.name.parse::<usize>().expect("a number")].tensor().clone();
            let results = cpus.each_ref().map(|cpu| run(cpu, &graph, &outputs, &value));
            judge(sample, &results[0]).unwrap_or_else(|why| panic!("{name} in {dtype}: {why}"));
            assert_eq!(results[0], results[1], "{name} in {dtype} depends on the number of threads");
            checked += 1;
        }
    }
    assert_eq!(checked, 5 * 2 * 6);
}

const WIDTH: usize = 24;

/// `loss = sum((op(linear(x, w_gate) + r, linear(x, w_up)) - wanted)^2)`.
fn model() -> Graph {
    let rows = || Type::tensor(DType::F32, [5, WIDTH]);
    let matrix = || Type::tensor(DType::F32, [WIDTH, WIDTH]);
    let build = |g: &mut Builder| {
        let (x, r, wanted) = (g.step_input("x", rows())?, g.step_input("r", rows())?, g.step_input("wanted", rows())?);
        let (w_gate, w_up) = (g.weight("w_gate", matrix())?, g.weight("w_up", matrix())?);
        let gate = g.linear(x, w_gate)?;
        let gate = g.add(gate, r)?;
        let up = g.linear(x, w_up)?;
        let y = g.composite(GatedSquaredRelu, &[gate, up])?[0];
        let off = g.sub(y, wanted)?;
        let square = g.mul(off, off)?;
        let sum = g.reduce_sum(square, 1)?;
        let sum = g.reduce_sum(sum, 0)?;
        g.reshape(sum, Shape::default())
    };
    let mut g = Builder::new();
    let loss = build(&mut g).expect("types fit");
    g.finish(vec![("loss".into(), loss)]).expect("finishes")
}

fn value(name: &str) -> Tensor {
    let (seed, rows) = match name {
        "x" => (1, 5),
        "r" => (2, 5),
        "wanted" => (3, 5),
        "up" => (6, 5),
        "w_gate" => (4, WIDTH),
        _ => (5, WIDTH),
    };
    let drawn = Rng::new(seed).normal(DType::F32, &[rows, WIDTH]);
    let scale = if rows == WIDTH { 0.2 } else { 1.0 };
    Tensor::float(DType::F32, &drawn.shape, drawn.floats().iter().map(|v| scale * v).collect()).rounded()
}

#[test]
fn sum_ahead_of_the_op_is_fused_into_its_kernel() {
    let shape = || Type::tensor(DType::F32, [5, WIDTH]);
    let mut g = Builder::new();
    let [x, r, up] = ["x", "r", "up"].map(|name| g.step_input(name, shape()).expect("is new"));
    let gate = g.add(x, r).expect("adds");
    let y = g.composite(GatedSquaredRelu, &[gate, up]).expect("types fit")[0];
    let graph = g.finish(vec![("y".into(), y)]).expect("finishes");
    let cpu = cpu(2);
    let lowered = lower(&graph, &["y"], cpu.kernels()).expect("lowers");
    let groups: Vec<&str> =
        lowered.main().nodes.iter().filter(|n| matches!(n.op, Op::Group(_))).map(|n| n.op_name()).collect();
    assert_eq!(groups, ["add_gated_squared_relu"]);
    let got = run(&cpu, &graph, &["y"], &|arg| value(&arg.name));
    let [x, r, up] = ["x", "r", "up"].map(|name| value(name).floats().to_vec());
    for (i, got) in got[0].floats().iter().enumerate() {
        let open = (x[i] + r[i]).max(0.0);
        assert!((got - open * open * up[i]).abs() <= 1e-6 * (1.0 + got.abs()), "element {i}: {got}");
    }
}

/// The exact loss with `by` added to element `at` of the weight `name`.
fn loss_at(graph: &Graph, name: &str, at: usize, by: f64) -> f64 {
    let given = |arg: &Arg| {
        let tensor = value(&arg.name);
        let mut values = tensor.floats().to_vec();
        if *arg.name == *name {
            values[at] += by;
        }
        Some(Value::from(Tensor::float(DType::F32, &tensor.shape, values)))
    };
    let outputs = evaluate(graph, &given, &Bindings::new(), Precision::Exact).expect("evaluates");
    outputs[0].1.tensor().floats()[0]
}

#[test]
fn gradient_on_the_cpu_equals_finite_differences() {
    let graph = model();
    let with_gradient = gradient(&graph, "loss", &["w_gate", "w_up"]).expect("is differentiable");
    let names = ["grad.w_gate", "grad.w_up"];
    let gradients = run(&cpu(2), &with_gradient, &names, &|arg| value(&arg.name));
    for (name, gradient) in ["w_gate", "w_up"].iter().zip(&gradients) {
        for at in (0..WIDTH * WIDTH).step_by(37) {
            let wanted = (loss_at(&graph, name, at, 1e-5) - loss_at(&graph, name, at, -1e-5)) / 2e-5;
            let got = gradient.floats()[at];
            assert!((got - wanted).abs() <= 1e-3 * (1.0 + wanted.abs()), "{name}[{at}]: {got} is not {wanted}");
        }
    }
}

#[test]
fn step_of_gradient_descent_lowers_the_loss() {
    const RATE: f64 = 1e-6;
    let weights = ["w_gate", "w_up"];
    let mut step = Differentiated::training(&model(), "loss", &weights).expect("is differentiable");
    for parameter in step.parameters.clone() {
        let rate = step.g.constant(DType::F32, RATE).expect("is a number");
        let change = step.g.mul(parameter.gradient, rate).expect("fits");
        let next = step.g.sub(parameter.value, change).expect("fits");
        step.update(&parameter.name, next).expect("has the parameter's type");
    }
    let graph = step.finish(Vec::new()).expect("finishes");

    let cpu = cpu(2);
    let mut session = Session::new(Arc::clone(&cpu) as Arc<dyn Backend>);
    session.allocate_states(&graph, &Bindings::new()).expect("fits");
    for name in weights {
        cpu.write(&session.state(name).expect("is allocated"), &value(name).to_bytes()).expect("fits");
    }
    let compiled = session.compile(&graph, &["loss"]).expect("compiles");
    let mut bucket = compiled.bucket(&Bindings::new()).expect("binds");
    let mut losses = Vec::new();
    for _ in 0..2 {
        for name in ["x", "r", "wanted"] {
            bucket.set(name, &value(name)).expect("has its type");
        }
        bucket.submit().expect("starts");
        bucket.wait().expect("ends");
        losses.push(bucket.tensor("loss").expect("is an output").floats()[0]);
    }
    let exact = loss_at(&model(), "none", 0, 0.0);
    assert!((losses[0] - exact).abs() <= 1e-4 * exact, "the first loss is {}, exactly {exact}", losses[0]);
    assert!(losses[1] < losses[0], "{losses:?}");
}
