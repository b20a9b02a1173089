//! Results of hand-written kernels depend on a row's own values and position alone: not on the rows beside it, on
//! threads, or on where a prompt is cut.

mod common;

use common::{cuts_agree, poisoned, run};
use ridge_graph::conformance::judge_graph;
use ridge_graph::format;
use ridge_graph::ops::{Activations, SampleToken};
use ridge_graph::passes::round_activations;
use ridge_graph::sample::Rng;
use ridge_graph::{Arg, Bindings, Builder, DType, Dim, FormatRef, Graph, Tensor, Type, Value, uniform};

#[test]
fn a_product_is_the_same_for_one_row_and_for_many() {
    for (inner, columns, rows) in [
        (8, 5, 75),
        (33, 40, 300),
        (64, 37, 75),
        (172, 64, 75),
        (288, 40, 75),
        (512, 9, 75),
        (768, 40, 75),
        (1056, 50, 75),
        (2112, 33, 90),
        (4160, 200, 100),
        (8192, 33, 150),
    ] {
        let plain = [
            (DType::F32, DType::F32, None),
            (DType::BF16, DType::F32, None),
            (DType::BF16, DType::F16, None),
            (DType::BF16, DType::BF16, None),
            (DType::F16, DType::F32, None),
            (DType::F8E4M3, DType::F32, None),
            (DType::F8E5M2, DType::F32, None),
        ];
        // Long rows take time: two formats stand for all.
        let of_long = |f: &FormatRef| inner == 8192 && ["q8_0", "q4_k"].contains(&f.name());
        let fits = |f: &FormatRef| (inner < 1000 || of_long(f)) && inner % f.granularity(1)[0] == 0;
        let stored = format::all()
            .into_iter()
            .filter(fits)
            .flat_map(|f| [DType::F32, DType::BF16].map(|of_x| (DType::F32, of_x, Some(f.clone()))));
        let by_codes = stored.clone().map(|case| (case, Activations::Int8));
        let exact = plain.into_iter().chain(stored).map(|case| (case, Activations::Exact));
        for ((dtype, of_x, stored), activations) in exact.chain(by_codes) {
            let mut rng = Rng::new(inner as u64);
            let (x, w) = (rng.normal(of_x, &[rows, inner]), rng.normal(dtype, &[columns, inner]));
            let w = stored.map_or_else(|| Value::Plain(w.clone()), |format| Value::stored(&w, &format));
            let mut g = Builder::new();
            let input = g.step_input("x", Type::tensor(of_x, [Dim::sym("rows"), inner.into()])).unwrap();
            let weight = g.weight("w", w.ty()).unwrap();
            let y = g.linear(input, weight).unwrap();
            let mut graph = g.finish(vec![("y".into(), y)]).unwrap();
            round_activations(&mut graph, activations);
            let values = |name: &str| if name == "x" { Value::Plain(x.clone()) } else { w.clone() };
            cuts_agree(&graph, "rows", &values, &["x"], &[0, 1, 2, 4, 7, 11, 16, 25, rows - 1, rows]);
        }
    }
}

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
                assert!(common::same_bits(&got, &other), "{what}");
                // The arithmetic is that of the same rows: some stand for all where there are many.
                if rows * inner < 10_000 {
                    judge_graph(&alone, &|arg| Some(value(arg)), &bindings, &got)
                        .unwrap_or_else(|why| panic!("{what}: {why}"));
                }
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
        bucket.input(0).copy_from_slice(&x.to_bytes());
        bucket.submit().unwrap();
        bucket.wait().unwrap();
        let value = |arg: &Arg| Value::Plain(if &*arg.name == "x" { x.clone() } else { w.clone() });
        let expected = run(&backend, &graph, &Bindings::new(), &value).unwrap();
        assert_eq!(bucket.output(0), expected[0].to_bytes());
    }
}

/// Sums of codes times scales of 2^127 are no numbers; those of values, by x that are small, are.
#[test]
fn products_by_mxfp4_are_right_for_every_exponent() {
    let (columns, inner) = (35, 288);
    let format = format::all().into_iter().find(|f| f.name() == "mxfp4").expect("is a format");
    for exponent in 0..=255u8 {
        let mut rng = Rng::new(exponent.into());
        let mut blocks = rng.integers(DType::U8, &[columns, inner / 32 * 17], 0, 256).to_bytes();
        blocks.chunks_exact_mut(17).for_each(|block| block[0] = exponent);
        let blocks = Tensor::from_bytes(DType::U8, &[columns, inner / 32 * 17], &blocks);
        let shape = vec![columns, inner];
        let w = Value::Stored { format: format.clone(), dtype: DType::F32, shape, components: vec![blocks] };
        for rows in [1, 2] {
            let factor = if exponent < 128 { 2f64.powi(30) } else { 2f64.powi(-30) };
            let x = rng.normal(DType::F32, &[rows, inner]).floats().iter().map(|x| x * factor).collect();
            let x = Value::Plain(Tensor::float(DType::F32, &[rows, inner], x));
            let mut g = Builder::new();
            let input = g.step_input("x", x.ty()).unwrap();
            let weight = g.weight("w", w.ty()).unwrap();
            let y = g.linear(input, weight).unwrap();
            let mut graph = g.finish(vec![("y".into(), y)]).unwrap();
            round_activations(&mut graph, Activations::Int8);
            let value = |arg: &Arg| if &*arg.name == "x" { x.clone() } else { w.clone() };
            let got = run(&poisoned(1), &graph, &Bindings::new(), &value).expect("runs");
            if let Err(why) = judge_graph(&graph, &|arg| Some(value(arg)), &Bindings::new(), &got) {
                panic!("exponent {exponent}, {rows} rows: {why}");
            }
        }
    }
}

/// Tokens sampled from equal logits, one a seed, and the random number that each came from.
fn of_equals(vocab: usize, top_k: i64, top_p: f64) -> Vec<(usize, f64)> {
    let n = 50;
    let mut g = Builder::new();
    let column = |dtype| Type::tensor(dtype, [n]);
    let logits = g.step_input("logits", Type::tensor(DType::F32, [n, vocab])).unwrap();
    let keys: Vec<_> =
        SampleToken::KEYS.iter().map(|(name, dtype)| g.step_input(name, column(*dtype)).unwrap()).collect();
    let token = g.sample_token(logits, keys.try_into().unwrap()).unwrap();
    let graph = g.finish(vec![("token".into(), token)]).unwrap();
    let value = |arg: &Arg| {
        Value::Plain(match &*arg.name {
            "logits" => Tensor::float(DType::F32, &[n, vocab], vec![-3.5; n * vocab]),
            "temperature" => Tensor::float(DType::F32, &[n], vec![0.7; n]),
            "top_p" => Tensor::float(DType::F32, &[n], vec![top_p; n]).rounded(),
            "min_p" => Tensor::float(DType::F32, &[n], vec![0.0; n]),
            "typical_p" => Tensor::float(DType::F32, &[n], vec![1.0; n]),
            "top_k" => Tensor::int(DType::I32, &[n], vec![top_k; n]),
            "seed" => Tensor::int(DType::I64, &[n], (0..n as i64).collect()),
            _ => Tensor::int(DType::I64, &[n], vec![3; n]),
        })
    };
    let tokens = run(&poisoned(2), &graph, &Bindings::new(), &value).expect("runs").remove(0);
    let u = (0..n as i64).map(|seed| f64::from(uniform(seed, 0, 3, 3, 0)));
    tokens.ints().iter().map(|t| *t as usize).zip(u).collect()
}

#[test]
fn of_equal_logits_each_token_is_as_likely_and_smaller_ids_come_first() {
    for (token, u) in of_equals(40_000, 0, 1.0) {
        assert_eq!(token, (u * 40_000.0) as usize);
    }
    for (token, u) in of_equals(40_000, 1000, 1.0) {
        assert_eq!(token, (u * 1000.0) as usize);
    }
    for (token, u) in of_equals(40_000, 0, 0.25) {
        assert_eq!(token, (u * 10_000.0) as usize);
    }
}

/// The other tests here are of the best instruction set that the machine has.
#[test]
fn every_instruction_set_gives_the_same_for_one_row_and_for_many() {
    let binary = std::env::current_exe().expect("tests have a binary");
    for isa in ["portable", "avx2", "avx_vnni", "avx512", "avx512_vnni"] {
        let mut tests = std::process::Command::new(&binary);
        tests.arg("a_product_is_the_same_for_one_row_and_for_many").env("RIDGE_CPU_ISA", isa);
        let ran = tests.output().expect("runs");
        let said = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
        if said.contains("is none of what this machine has") {
            assert!(isa != "portable", "{said}");
            println!("skipped: this machine has no {isa}");
            continue;
        }
        assert!(ran.status.success() && said.contains("1 passed"), "{isa}: {said}");
    }
}
