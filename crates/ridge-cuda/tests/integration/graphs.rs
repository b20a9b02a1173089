//! Whole graphs on the GPU: random ones, decoders, chains; late and on time; steps of several sessions in order.

use std::sync::Arc;

use crate::common::gpu;
use crate::decoder::{Step, decoder};
use crate::random::case;
use crate::running::{run, same_bits, session};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use ridge_graph::conformance::judge_graph;
use ridge_graph::sample::Rng;
use ridge_graph::{Arg, Bindings, Builder, DType, Graph, Precision, Tensor, Type, Value, evaluate};
use ridge_runtime::Backend;
use ridge_runtime::late::Late;

#[test]
fn random_graphs_of_integers_are_equal_to_the_meaning() {
    let Some(gpu) = gpu() else { return };
    let late: Arc<dyn Backend> = Arc::new(Late::new(Arc::clone(&gpu), 1));
    let config = ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() };
    let checked = TestRunner::new(config).run(&case(DType::I32), |case| {
        let meaning = evaluate(&case.graph, &|arg| Some(case.value(arg)), &case.bindings, Precision::Exact);
        let meaning = meaning.map_err(|e| TestCaseError::fail(e.to_string()))?;
        for backend in [&gpu, &late] {
            let got = run(backend, &case.graph, &case.bindings, &|arg| case.value(arg));
            let got = got.map_err(|e| TestCaseError::fail(e.to_string()))?;
            for ((name, wanted), got) in meaning.iter().zip(&got) {
                prop_assert_eq!(got, wanted.tensor(), "{} on {} in\n{}", name, backend.name(), case.graph);
            }
        }
        Ok(())
    });
    checked.unwrap_or_else(|why| panic!("{why}"));
}

#[test]
fn groups_with_views_are_right() {
    let Some(gpu) = gpu() else { return };
    for graph in crate::views::graphs().expect("builds") {
        let mut rng = Rng::new(7);
        let values: Vec<(String, Value)> = graph
            .main()
            .args
            .iter()
            .map(|arg| {
                let shape = arg.ty.shape.as_const().expect("numbers");
                let value = match arg.ty.dtype {
                    DType::I32 => rng.integers(DType::I32, &shape, -1, shape[0] as i64),
                    dtype => rng.normal(dtype, &shape),
                };
                (arg.name.to_string(), Value::from(value))
            })
            .collect();
        let value = |arg: &Arg| {
            let known = values.iter().find(|(name, _)| *name == *arg.name);
            known.expect("all have values").1.clone()
        };
        let results = run(&gpu, &graph, &Bindings::new(), &value).expect("runs");
        assert!(same_bits(&results, &run(&gpu, &graph, &Bindings::new(), &value).expect("runs")));
        if let Err(why) = judge_graph(&graph, &|arg| Some(value(arg)), &Bindings::new(), &results) {
            panic!("{why:.600} in\n{graph}");
        }
    }
}

fn without_next(graph: &Graph, results: &[Tensor]) -> (Graph, Vec<Tensor>) {
    let mut graph = graph.clone();
    let main = graph.main.index();
    let kept: Vec<bool> = graph.functions[main].outputs.iter().map(|o| &*o.name != "next").collect();
    let results = results.iter().zip(&kept).filter(|(_, k)| **k).map(|(r, _)| r.clone()).collect();
    graph.functions[main].outputs.retain(|o| &*o.name != "next");
    (graph, results)
}

#[test]
fn a_decoder_is_right_in_every_dtype() {
    let Some(gpu) = gpu() else { return };
    for (dtype, stored) in [(DType::F32, false), (DType::BF16, false), (DType::F16, true), (DType::F32, true)] {
        let graph = decoder(dtype, stored).expect("builds");
        for lengths in [&[(0, 17), (3, 1), (7, 2)][..], &[(0, 1)], &[(9, 1), (5, 1), (12, 1)]] {
            let step = Step::new(lengths, 21);
            let value = |arg: &Arg| step.value(arg);
            let results = run(&gpu, &graph, &step.bindings, &value).expect("runs");
            assert!(same_bits(&results, &run(&gpu, &graph, &step.bindings, &value).expect("runs")));
            // A token jumps, and so is judged by its logits alone.
            let (graph, got) = without_next(&graph, &results);
            if let Err(why) = judge_graph(&graph, &|arg| Some(value(arg)), &step.bindings, &got) {
                panic!("{dtype}, stored {stored}, {lengths:?}: {why:.600}");
            }
        }
    }
}

#[test]
fn a_timed_step_gives_the_bits_of_a_captured_one_with_an_event_for_each_launch() {
    let Some(gpu) = gpu() else { return };
    let graph = decoder(DType::BF16, false).expect("builds");
    let step = Step::new(&[(0, 9)], 21);
    let session = session(&gpu, &graph, &step.bindings, &|arg| step.value(arg)).expect("loads");
    let compiled = session.compile(&graph, &["logits"]).expect("compiles");
    let mut bucket = compiled.bucket(&step.bindings).expect("binds");
    let mut outputs = Vec::new();
    // Queued launch by launch, captured, launched again, then timed.
    for nth in 0..4 {
        for arg in graph.args(ridge_graph::Role::StepInput) {
            bucket.set(&arg.name, step.value(arg).tensor()).expect("fits");
        }
        if nth < 3 {
            bucket.submit().expect("runs");
            bucket.wait().expect("runs");
        } else {
            let times = bucket.timed().expect("runs");
            let launches = ridge_runtime::plan(compiled.graph(), &step.bindings).expect("plans").launches;
            assert_eq!(times.len(), launches.len());
            assert!(times.iter().zip(&launches).all(|(time, launch)| time.path == launch.path));
        }
        outputs.push(bucket.output(0).to_vec());
    }
    assert!(outputs.iter().all(|output| *output == outputs[0]), "a captured or timed step gives other bits");
}

#[test]
fn products_of_any_number_of_rows_are_right_and_rows_do_not_meet() {
    let Some(gpu) = gpu() else { return };
    let (inner, columns) = (264, 37);
    for weights in [DType::F32, DType::BF16, DType::F16, DType::F8E4M3] {
        let w = Rng::new(3).normal(weights, &[columns, inner]);
        let all = Rng::new(5).normal(DType::F32, &[20, inner]);
        let product = |rows: std::ops::Range<usize>| {
            let mut g = Builder::new();
            let x = g.step_input("x", Type::tensor(DType::F32, [rows.len(), inner])).expect("fresh");
            let weight = g.weight("w", w.ty()).expect("fresh");
            let y = g.matmul(x, weight, false, true, DType::F32).expect("multiplies");
            let graph = g.finish(vec![("y".into(), y)]).expect("finishes");
            let given = all.floats()[rows.start * inner..rows.end * inner].to_vec();
            let x = Tensor::float(DType::F32, &[rows.len(), inner], given);
            let value = |arg: &Arg| Value::Plain(if &*arg.name == "x" { x.clone() } else { w.clone() });
            let got = run(&gpu, &graph, &Bindings::new(), &value).expect("runs");
            if let Err(why) = judge_graph(&graph, &|arg| Some(value(arg)), &Bindings::new(), &got) {
                panic!("{} rows of {weights}: {why:.600}", rows.len());
            }
            got[0].floats().to_vec()
        };
        let sixteen = product(0..16);
        for rows in [1, 2, 3, 5, 8, 9, 15, 16, 17, 20] {
            let got = product(0..rows);
            if rows <= 16 {
                assert_eq!(got, sixteen[..rows * columns], "{rows} rows of {weights}");
            }
        }
        assert_eq!(product(7..8), sixteen[7 * columns..8 * columns], "a row alone, {weights}");
    }
}

/// Adds `x` to a running sum: `sum' = sum + x`, given as `y` too.
fn counter(rows: usize) -> Graph {
    let mut g = Builder::new();
    let x = g.step_input("x", Type::tensor(DType::I64, [rows])).expect("fresh");
    let state = g.state("sum", Type::state(DType::I64, [rows])).expect("fresh");
    let before = g.state_read(state).expect("reads");
    let after = g.add(before, x).expect("adds");
    g.state_write(state, after).expect("writes");
    g.finish(vec![("y".into(), after)]).expect("finishes")
}

#[test]
fn steps_of_two_sessions_run_in_the_order_of_submission() {
    const ROWS: usize = 40_000;
    let Some(gpu) = gpu() else { return };
    let graph = counter(ROWS);
    let zeros = |arg: &Arg| Value::Plain(Tensor::zeros(DType::I64, &arg.ty.shape.as_const().expect("constant")));
    let sessions = [(); 2].map(|()| session(&gpu, &graph, &Bindings::new(), &zeros).expect("loads"));
    // Three buckets of each session, all in flight at once, over one state a session.
    let mut buckets: Vec<_> = (0..6)
        .map(|i| sessions[i % 2].compile(&graph, &["y"]).expect("compiles").bucket(&Bindings::new()).expect("binds"))
        .collect();
    let mut sums = [0i64; 2];
    for round in 0..20 {
        for (i, bucket) in buckets.iter_mut().enumerate() {
            bucket.set("x", &Tensor::int(DType::I64, &[ROWS], vec![round + i as i64; ROWS])).expect("fits");
            bucket.submit().expect("runs");
        }
        for (i, bucket) in buckets.iter_mut().enumerate() {
            sums[i % 2] += round + i as i64;
            bucket.wait().expect("runs");
            assert_eq!(bucket.tensor("y").expect("there").ints(), vec![sums[i % 2]; ROWS], "round {round}, {i}");
        }
    }
}

#[test]
fn a_larger_workspace_does_not_disturb_a_bucket_that_was_bound_before() {
    let Some(gpu) = gpu() else { return };
    let square = |n: usize| {
        let mut g = Builder::new();
        let x = g.step_input("x", Type::tensor(DType::I32, [n, n])).expect("fresh");
        let turned = g.transpose(x, &[1, 0]).expect("transposes");
        let y = g.matmul(x, turned, false, false, DType::I32).expect("multiplies");
        let y = g.transpose(y, &[1, 0]).expect("transposes");
        g.finish(vec![("y".into(), y)]).expect("finishes")
    };
    let ones = |arg: &Arg| {
        let shape = arg.ty.shape.as_const().expect("constant");
        Value::Plain(Tensor::int(DType::I32, &shape, vec![1; shape.iter().product()]))
    };
    let small = square(3);
    let held = session(&gpu, &small, &Bindings::new(), &ones).expect("loads");
    let mut bucket = held.compile(&small, &["y"]).expect("compiles").bucket(&Bindings::new()).expect("binds");
    for larger in [40, 300] {
        run(&gpu, &square(larger), &Bindings::new(), &ones).expect("runs");
        bucket.set("x", &Tensor::int(DType::I32, &[3, 3], vec![1; 9])).expect("fits");
        bucket.submit().expect("runs");
        bucket.wait().expect("runs");
        assert_eq!(bucket.tensor("y").expect("there").ints(), [3; 9]);
    }
}
