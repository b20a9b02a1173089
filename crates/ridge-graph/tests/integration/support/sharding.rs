//! Holds sharded graphs, evaluated on a mesh of two ranks, against the graphs they came from.

use ridge_graph::sample::{Rng, Sample};
use ridge_graph::shard::{MeshAxis, Placement, Sharded, ShardingRule, rules, shard, slice_for_rank, unite};
use ridge_graph::{Bindings, DType, Data, Graph, Op, Precision, Prim, Tensor, Value, evaluate, evaluate_mesh};

/// The axis that tests shard over.
pub(crate) fn tp() -> MeshAxis {
    MeshAxis::new("tp", 2)
}

/// Each rank's share of `value`; summands are random numbers that add up to it.
pub(crate) fn shares(value: &Value, placement: Placement, axis: &MeshAxis) -> Vec<Value> {
    match (value, placement) {
        (Value::Plain(t), Placement::Partial) => {
            let mut rng = Rng::new(t.len() as u64);
            let mut rest = t.clone();
            let mut parts: Vec<Value> = Vec::new();
            for _ in 1..axis.ranks {
                let part = match &mut rest.data {
                    Data::Float(rest) => {
                        let part: Vec<f64> = rest.iter().map(|_| rng.gauss()).collect();
                        rest.iter_mut().zip(&part).for_each(|(r, p)| *r -= p);
                        Tensor::float(t.dtype, &t.shape, part)
                    }
                    Data::Int(rest) => {
                        let part = rng.integers(t.dtype, &t.shape, -9, 9);
                        rest.iter_mut().zip(part.ints()).for_each(|(r, p)| *r -= p);
                        part
                    }
                };
                parts.push(part.into());
            }
            parts.push(rest.into());
            parts
        }
        _ => (0..axis.ranks).map(|r| slice_for_rank(value, placement, axis, r).expect("it divides")).collect(),
    }
}

/// Requires that the outputs of `sharded`, put together, are those of `graph` on the same arguments, by name.
pub(crate) fn assert_same(what: &str, graph: &Graph, sharded: &Sharded, axis: &MeshAxis, args: &[(String, Value)]) {
    assert_same_at(what, graph, sharded, axis, args, &Bindings::new());
}

/// [`assert_same`] under `bindings`.
pub(crate) fn assert_same_at(
    what: &str,
    graph: &Graph,
    sharded: &Sharded,
    axis: &MeshAxis,
    args: &[(String, Value)],
    bindings: &Bindings,
) {
    let find = |name: &str| args.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
    let whole = evaluate(graph, &|arg| find(&arg.name), bindings, Precision::Exact).expect(what);
    let cut: Vec<(String, Vec<Value>)> = graph
        .main()
        .args
        .iter()
        .zip(&sharded.args)
        .map(|(arg, p)| (arg.name.to_string(), shares(&find(&arg.name).expect("given"), *p, axis)))
        .collect();
    let of_rank = |rank: usize, name: &str| cut.iter().find(|(n, _)| n == name).map(|(_, v)| v[rank].clone());
    let mesh = [(&*axis.name, axis.ranks)];
    let by_rank = evaluate_mesh(&sharded.graph, &mesh, &|r, arg| of_rank(r, &arg.name), bindings, Precision::Exact)
        .unwrap_or_else(|e| panic!("{what}: {e}"));
    for (i, ((name, want), placement)) in whole.iter().zip(&sharded.outputs).enumerate() {
        let parts: Vec<Tensor> = by_rank.iter().map(|outputs| outputs[i].1.tensor().clone()).collect();
        if *placement == Placement::Replicate {
            for part in &parts[1..] {
                assert_close(&format!("{what}: `{name}` of another rank"), part, &parts[0]);
            }
        }
        assert_close(&format!("{what}: `{name}`"), &unite(&parts, *placement), want.tensor());
    }
}

/// Equal to 1e-12 of the norm, or exactly for integers.
pub(crate) fn assert_close(what: &str, got: &Tensor, want: &Tensor) {
    assert_eq!((got.dtype, &got.shape), (want.dtype, &want.shape), "{what}");
    match (&got.data, &want.data) {
        (Data::Float(g), Data::Float(w)) => {
            let same = |a: f64, b: f64| a == b || a.is_nan() && b.is_nan();
            let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
            let error = norm(&mut g.iter().zip(w).map(|(a, b)| if same(*a, *b) { 0.0 } else { a - b }));
            let size = norm(&mut w.iter().filter(|x| x.is_finite()).copied());
            assert!(error <= 1e-12 * size.max(1e-3), "{what}: off by {error:e} of {size:e}");
        }
        _ => assert_eq!(got.data, want.data, "{what}"),
    }
}

/// The sample's inputs under the names that its graph gives them.
pub(crate) fn named(sample: &Sample) -> Vec<(String, Value)> {
    sample.inputs.iter().enumerate().map(|(i, v)| (i.to_string(), v.clone())).collect()
}

/// Does everything that `rule` cuts divide?
fn divides(sample: &Sample, graph: &Graph, rule: &ShardingRule, axis: &MeshAxis) -> bool {
    let node = graph.main().nodes.iter().find(|n| n.op == sample.op).expect("the op's node");
    let output = |(ty, p): (&ridge_graph::Type, &Placement)| match *p {
        Placement::Shard { dim, multiple } => {
            ty.shape.0[dim].as_const().is_some_and(|n| n % (axis.ranks * multiple) == 0)
        }
        _ => true,
    };
    sample.inputs.iter().zip(&rule.inputs).all(|(v, p)| slice_for_rank(v, *p, axis, 0).is_ok())
        && node.outputs.iter().zip(&rule.outputs).all(output)
}

/// Runs the sample by each rule of its op that divides, and gives those rules.
pub(crate) fn check_rules(name: &str, sample: &Sample, axis: &MeshAxis) -> Vec<ShardingRule> {
    let graph = sample.graph().unwrap_or_else(|e| panic!("{name}: {e}"));
    let outputs = &graph.main().nodes.iter().find(|n| n.op == sample.op).expect("the op's node").outputs;
    let mut checked = Vec::new();
    for rule in rules(&sample.op, &sample.types(), outputs, axis) {
        if !divides(sample, &graph, &rule, axis) {
            continue;
        }
        let what = format!("{name} {:?} by {rule}", sample.types());
        let place = |arg: &ridge_graph::Arg| rule.inputs[arg.name.parse::<usize>().expect("a number")];
        let sharded = shard(&graph, axis, &place, &|_| false).unwrap_or_else(|e| panic!("{what}: {e}"));
        let local = sharded.graph.main();
        let reduced = |p: &Placement| if *p == Placement::Partial { Placement::Replicate } else { *p };
        let plain: Vec<Placement> =
            outputs.iter().zip(&rule.outputs).filter(|(t, _)| !t.state).map(|(_, p)| *p).collect();
        // After all others the graph gives the states, which stay where they were.
        let states = sample.states.iter().map(|i| rule.inputs[*i]);
        let promised: Vec<Placement> = plain.iter().map(reduced).chain(states).collect();
        // Values in formats are decoded behind the op, which may move them.
        if outputs.iter().all(|ty| ty.format.is_none()) {
            assert_eq!(sharded.outputs, promised, "{what}");
            // The rule itself, not a detour: nothing but a sum at the end is communicated.
            let sums = plain.iter().filter(|p| **p == Placement::Partial).count();
            assert_eq!(local.nodes.len(), graph.main().nodes.len() + sums, "{what}");
        }
        assert_same(&what, &graph, &sharded, axis, &named(sample));
        checked.push(rule);
    }
    checked
}

/// Normal f32 elements.
pub(crate) fn normal(rng: &mut Rng, shape: &[usize]) -> Tensor {
    rng.normal(DType::F32, shape)
}

/// The collectives of each function, by name.
pub(crate) fn collectives(graph: &Graph) -> Vec<(String, Vec<&'static str>)> {
    let of = |f: &ridge_graph::Function| {
        let found = f.nodes.iter().filter_map(|n| match &n.op {
            Op::Prim(prim @ Prim::Collective { .. }) => Some(prim.name()),
            _ => None,
        });
        (f.name.to_string(), found.collect())
    };
    graph.functions.iter().map(of).collect()
}
