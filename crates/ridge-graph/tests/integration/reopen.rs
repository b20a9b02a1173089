//! Going on with the main function of a graph that was finished.

use ridge_graph::sample::Rng;
use ridge_graph::{Arg, Bindings, Builder, DType, Graph, Precision, Result, Type, Var, evaluate};

fn ty() -> Type {
    Type::tensor(DType::F32, [3usize])
}

/// Adds the input to a state, twice, by one function.
fn counting() -> Result<Graph> {
    let mut g = Builder::new();
    let add = g.function("add", |g| {
        let x = g.arg("x", ty());
        let sum = g.state("sum", ty())?;
        let old = g.state_read(sum)?;
        let w = g.weight("w", ty())?;
        let scaled = g.mul(x, w)?;
        let new = g.add(old, scaled)?;
        g.state_write(sum, new)?;
        Ok(vec![new])
    })?;
    let x = g.step_input("x", ty())?;
    let once = g.call(add, &[x])?[0];
    let twice = g.call(add, &[once])?[0];
    g.finish(vec![("once".into(), once), ("twice".into(), twice)])
}

fn outputs(graph: &Graph) -> Vec<(String, Vec<f64>)> {
    let mut rng = Rng::new(1);
    let values: Vec<_> = ["x", "sum", "w"].map(|name| (name, rng.normal(DType::F32, &[3]))).into_iter().collect();
    let of = |arg: &Arg| values.iter().find(|(n, _)| *n == &*arg.name).map(|(_, t)| t.clone().into());
    let outputs = evaluate(graph, &of, &Bindings::new(), Precision::Exact).expect("evaluates");
    outputs.into_iter().map(|(name, value)| (name, value.tensor().floats().to_vec())).collect()
}

#[test]
fn a_graph_that_is_reopened_and_finished_is_the_same() {
    let graph = counting().expect("builds");
    let (g, named) = Builder::reopen(graph.clone());
    assert_eq!(g.finish(named).expect("finishes"), graph);
}

#[test]
fn it_goes_on_with_the_latest_version_of_a_state_and_the_same_arguments() {
    let graph = counting().expect("builds");
    let before = outputs(&graph);
    let (mut g, mut named) = Builder::reopen(graph);
    let sum = g.state("sum", ty()).expect("is there");
    let kept = g.state_read(sum).expect("is the latest");
    let w = g.weight("w", ty()).expect("is there");
    let product = g.mul(kept, w).expect("fits");
    g.state_write(sum, product).expect("is the latest");
    named.push(("product".into(), product));
    let graph = g.finish(named).expect("finishes");
    assert_eq!(graph.main().args.len(), 3, "nothing was asked for twice");
    let after = outputs(&graph);
    let find =
        |values: &[(String, Vec<f64>)], name: &str| values.iter().find(|(n, _)| n == name).expect(name).1.clone();
    for name in ["once", "twice"] {
        assert_eq!(find(&after, name), find(&before, name));
    }
    assert_eq!(find(&after, "sum"), find(&after, "product"), "the state has the value written last");
    assert_ne!(find(&after, "sum"), find(&before, "sum"));
}

#[test]
fn a_version_that_was_replaced_before_stays_replaced() {
    let graph = counting().expect("builds");
    let main = graph.main();
    let versions: Vec<Var> = (0..main.nodes.len())
        .flat_map(|n| (0..main.nodes[n].outputs.len()).map(move |out| main.var(n, out)))
        .filter(|v| main.ty(*v).state)
        .collect();
    assert_eq!(versions.len(), 3, "the argument, and one from each call");
    let (mut g, _) = Builder::reopen(graph.clone());
    for old in &versions[..2] {
        let error = g.state_read(*old).expect_err("is stale").to_string();
        assert!(error.contains("has been replaced"), "{error}");
    }
    g.state_read(versions[2]).expect("is the latest");
}
