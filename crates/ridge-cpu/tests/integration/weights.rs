//! Products of weights in any layout and memory.

use crate::common::{poisoned, run};
use ridge_graph::conformance::judge_graph;
use ridge_graph::format::ScaledFormat;
use ridge_graph::passes::{Activations, round_activations};
use ridge_graph::sample::Rng;
use ridge_graph::{Arg, Bindings, Builder, DType, Dim, FormatRef, Graph, Tensor, Type, Value};

/// Weights of bf16 that nothing else reads are repacked, where there are matrix tiles; those that an embedding reads are
/// not. Products of both are right, and the same.
#[test]
fn products_of_weights_in_any_layout_are_right_and_the_same() {
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum With {
        Biases,
        Residual,
        Gate,
    }
    // Rows and K that fill tiles and such that do not, up to more than one block of either.
    for (inner, columns, all_rows) in [
        (32, vec![1, 33, 64], vec![1, 2, 5, 6, 8, 9, 17]),
        (70, vec![31, 64, 5], vec![3, 5, 6, 15, 31, 49]),
        (41, vec![40], vec![257, 289, 600]),
        (2048, vec![33], vec![1, 20]),
        (2081, vec![40, 7], vec![1, 4, 9, 33]),
        (4130, vec![35, 70], vec![3, 18]),
    ] {
        for (dtype, with) in [DType::F32, DType::F16, DType::BF16]
            .into_iter()
            .flat_map(|dtype| [With::Biases, With::Residual, With::Gate].map(|with| (dtype, with)))
        {
            let columns = if with == With::Biases { &columns[..] } else { &columns[..1] };
            let build = |read: bool| -> ridge_graph::Result<Graph> {
                let mut g = Builder::new();
                let rows = Dim::sym("rows");
                let x = g.step_input("x", Type::tensor(dtype, [rows.clone(), inner.into()]))?;
                let weight = |g: &mut Builder, name: String, columns: usize| {
                    g.weight(&name, Type::tensor(DType::BF16, [columns, inner]))
                };
                let mut outputs = Vec::new();
                let mut weights = Vec::new();
                match with {
                    With::Biases => {
                        for (i, columns) in columns.iter().enumerate() {
                            let w = weight(&mut g, format!("w{i}"), *columns)?;
                            let b = g.weight(&format!("b{i}"), Type::tensor(dtype, [*columns]))?;
                            outputs.push(g.linear_bias(x, w, Some(b))?);
                            weights.push(w);
                        }
                    }
                    With::Residual => {
                        let w = weight(&mut g, "w".into(), columns[0])?;
                        let r = g.step_input("r", Type::tensor(dtype, [rows.clone(), columns[0].into()]))?;
                        let y = g.linear(x, w)?;
                        outputs.push(g.add(r, y)?);
                        weights.push(w);
                    }
                    With::Gate => {
                        let gate = weight(&mut g, "gate".into(), columns[0])?;
                        let up = weight(&mut g, "up".into(), columns[0])?;
                        weights.extend([gate, up]);
                        let (gate, up) = (g.linear(x, gate)?, g.linear(x, up)?);
                        outputs.push(g.swiglu(gate, up)?);
                    }
                }
                if read {
                    let ids = g.step_input("ids", Type::tensor(DType::I32, [1]))?;
                    for w in weights {
                        outputs.push(g.embedding(w, ids, dtype)?);
                    }
                }
                g.finish(outputs.into_iter().enumerate().map(|(i, y)| (format!("y{i}"), y)).collect())
            };
            let [alone, read] = [false, true].map(|read| build(read).unwrap());
            for rows in all_rows.iter().copied() {
                let bindings = Bindings::new().with("rows", rows);
                let value = |arg: &Arg| {
                    let name = arg.name.bytes().fold(rows as u64, |sum, byte| sum * 31 + u64::from(byte));
                    let shape = arg.ty.shape.eval(&bindings).unwrap();
                    Value::Plain(match arg.ty.dtype {
                        DType::I32 => Tensor::int(DType::I32, &shape, vec![0]),
                        float => Rng::new(name).normal(float, &shape),
                    })
                };
                let got = run(&poisoned(1 + rows % 3), &alone, &bindings, &value).expect("runs");
                let mut other = run(&poisoned(2), &read, &bindings, &value).expect("runs");
                other.truncate(got.len());
                let what = format!("{rows} rows of {inner} by {columns:?}, {dtype}, {with:?}");
                assert!(crate::common::same_bits(&got, &other), "{what}");
                // The arithmetic is that of the same rows: some stand for all where there are many.
                if rows * inner < 10_000 {
                    judge_graph(&alone, &|arg| Some(value(arg)), &bindings, &got)
                        .unwrap_or_else(|why| panic!("{what}: {why}"));
                }
            }
        }
    }
}

/// Weights of codes with scales are interleaved where products want them so, unless something reads their rows.
#[test]
fn products_of_codes_with_scales_are_the_same_in_any_layout() {
    let formats = ["int8_row", "int8_tensor", "f8e4m3_row", "f8e4m3_tensor", "f8e4m3_b128"];
    for (format, [inner, columns]) in formats.into_iter().flat_map(|f| [[288, 37], [1312, 150]].map(|size| (f, size))) {
        let format = FormatRef::new(ScaledFormat::from_name(format).expect("a format"));
        for (activations, dtype) in [Activations::Exact, Activations::Int8]
            .into_iter()
            .flat_map(|activations| [DType::F32, DType::BF16].map(|dtype| (activations, dtype)))
        {
            let w = Value::stored(&Rng::new(5).normal(DType::F32, &[columns, inner]), &format);
            let build = |read: bool| -> ridge_graph::Result<Graph> {
                let mut g = Builder::new();
                let x = g.step_input("x", Type::tensor(dtype, [Dim::sym("rows"), inner.into()]))?;
                let weight = g.weight("w", w.ty())?;
                let y = g.linear(x, weight)?;
                let mut outputs = vec![("y".into(), y)];
                if read {
                    let ids = g.step_input("ids", Type::tensor(DType::I32, [1]))?;
                    outputs.push(("row".into(), g.embedding(weight, ids, dtype)?));
                }
                let mut graph = g.finish(outputs)?;
                round_activations(&mut graph, activations);
                Ok(graph)
            };
            let [alone, read] = [false, true].map(|read| build(read).unwrap());
            for rows in [1, 2, 9, 33] {
                let bindings = Bindings::new().with("rows", rows);
                let value = |arg: &Arg| match &*arg.name {
                    "w" => w.clone(),
                    "ids" => Value::Plain(Tensor::int(DType::I32, &[1], vec![3])),
                    _ => Value::Plain(Rng::new(rows as u64).normal(dtype, &[rows, inner])),
                };
                let got = run(&poisoned(2), &alone, &bindings, &value).expect("runs");
                let mut other = run(&poisoned(1), &read, &bindings, &value).expect("runs");
                other.truncate(1);
                let what = format!("{rows} rows of {inner} by {columns}, {dtype}, {}, {activations:?}", format.name());
                assert!(crate::common::same_bits(&got, &other), "{what}");
                judge_graph(&alone, &|arg| Some(value(arg)), &bindings, &got)
                    .unwrap_or_else(|why| panic!("{what}: {why}"));
            }
        }
    }
}

#[test]
fn memory_that_is_written_may_be_bound_as_a_weight() {
    let mut rng = Rng::new(3);
    let (x, w) = (rng.normal(DType::BF16, &[3, 64]), rng.normal(DType::BF16, &[40, 64]));
    let mut g = Builder::new();
    let input = g.step_input("x", x.ty()).unwrap();
    let weight = g.weight("w", w.ty()).unwrap();
    let y = g.linear(input, weight).unwrap();
    let graph = g.finish(vec![("y".into(), y)]).unwrap();
    let backend = poisoned(2);
    let lowered = ridge_runtime::lower(&graph, &["y"], backend.kernels()).unwrap();
    let program = backend.compile(std::sync::Arc::new(lowered)).unwrap();
    let buffer = backend.allocate(w.to_bytes().len()).unwrap();
    for factor in [1.0, -2.0] {
        // What is written after it was bound counts too.
        let mut bucket = program.bind(&Bindings::new(), std::slice::from_ref(&buffer), &[]).unwrap();
        let w = Tensor::float(w.dtype, &w.shape, w.floats().iter().map(|x| x * factor).collect());
        backend.write(&buffer, &w.to_bytes()).unwrap();
        bucket.input(0, 0).copy_from_slice(&x.to_bytes());
        let staged = ridge_runtime::Staged { input: 0, bytes: x.to_bytes().len() };
        bucket.submit(0, &[staged], false).unwrap();
        bucket.wait(0).unwrap();
        let value = |arg: &Arg| Value::Plain(if &*arg.name == "x" { x.clone() } else { w.clone() });
        let expected = run(&backend, &graph, &Bindings::new(), &value).unwrap();
        assert_eq!(bucket.output(0, 0), expected[0].to_bytes());
    }
}

/// A device whose memory is the host's takes weights that are kept there as all others, those of ranks too.
#[test]
fn weights_in_memory_of_the_host_give_the_same_bits() {
    let cpu: std::sync::Arc<dyn ridge_runtime::Backend> =
        std::sync::Arc::new(ridge_cpu::Cpu::new(ridge_cpu::CpuOptions::default()).unwrap());
    crate::host_weights::hold(&cpu);
}

#[test]
fn shares_of_ranks_are_kept_in_memory_of_the_host_too() {
    let cpu = ridge_cpu::Cpu::new(ridge_cpu::CpuOptions::default()).unwrap();
    let mut session = ridge_runtime::Session::new(std::sync::Arc::new(cpu));
    let ty = Type::tensor(DType::F32, [4]);
    let bytes: Vec<u8> = (0..16).collect();
    session.keep_on_host(["weight"]);
    session.load_shares("weight", &ty, vec![vec![ridge_runtime::WeightData::Owned(bytes.clone())]]).unwrap();
    let buffer = session.state("weight").unwrap();
    assert_eq!(session.backend().read(&buffer).unwrap(), bytes);
}

/// A state is loaded where it is kept, by which the memory of the device and of the host is told apart.
#[test]
fn states_that_are_loaded_into_memory_of_the_host_are_counted_as_such() {
    let cpu = ridge_cpu::Cpu::new(ridge_cpu::CpuOptions::default()).unwrap();
    let mut session = ridge_runtime::Session::new(std::sync::Arc::new(cpu));
    let ty = Type::tensor(DType::F32, [4]);
    let bytes: Vec<u8> = (0..16).collect();
    session.keep_states_on_host(["moment"]);
    session.load("moment", &ty, vec![ridge_runtime::WeightData::Owned(bytes.clone())]).unwrap();
    let live = session.backend().memory().live;
    // With what aligns it.
    assert!(live.get(ridge_runtime::MemoryOwner::HostStates) >= 16);
    assert_eq!(live.get(ridge_runtime::MemoryOwner::HostWeights), 0);
    assert_eq!(session.backend().read(&session.state("moment").unwrap()).unwrap(), bytes);
}
