//! Values that wait in memory of the host: what is moved, that it keeps its meaning, and that copies run beside computation.

use std::collections::HashMap;

use ridge_graph::grad::gradient;
use ridge_graph::passes::offload;
use ridge_graph::sample::Rng;
use ridge_graph::{
    Arg, Bindings, Builder, DType, Dim, Graph, Memory, Op, Precision, Prim, Result, Role, Shape, Tensor, Type, Value,
    evaluate,
};
use ridge_runtime::{Place, Plan, Region, component_offsets, lower, memory_snapshot, plan};

const WIDTH: usize = 16;
const LAYERS: usize = 7;

/// The gradient of layers of two linears each.
fn deep() -> Result<Graph> {
    let mut g = Builder::new();
    let mut x = g.step_input("x", Type::tensor(DType::F32, [Dim::sym("rows"), WIDTH.into()]))?;
    let layer = g.function("layer", |g| {
        let x = g.arg("x", Type::tensor(DType::F32, [Dim::sym("rows"), WIDTH.into()]));
        let [up, down] = ["up", "down"].map(|name| g.weight(name, Type::tensor(DType::F32, [WIDTH, WIDTH])));
        let h = g.linear(x, up?)?;
        let gate = g.sigmoid(h)?;
        let h = g.mul(h, gate)?;
        let h = g.linear(h, down?)?;
        Ok(vec![g.add(x, h)?])
    })?;
    for i in 0..LAYERS {
        x = g.scoped(&format!("layers.{i}"), |g| g.call(layer, &[x]))?[0];
    }
    let x = g.mul(x, x)?;
    let sum = g.reduce_sum(x, 1)?;
    let sum = g.reduce_sum(sum, 0)?;
    let loss = g.reshape(sum, Shape::default())?;
    let graph = g.finish(vec![("loss".into(), loss)])?;
    let weights: Vec<String> = graph.args(Role::Weight).map(|arg| arg.name.to_string()).collect();
    gradient(&graph, "loss", &weights)
}

fn bindings() -> Bindings {
    Bindings::new().with("rows", 24)
}

fn offloaded() -> Graph {
    let mut graph = deep().expect("types");
    offload(&mut graph, &bindings()).expect("bound");
    graph
}

fn moves(graph: &Graph, to: Memory) -> usize {
    graph.main().nodes.iter().filter(|node| node.op == Op::Prim(Prim::Move(to))).count()
}

#[test]
fn what_is_not_used_for_three_calls_is_moved_and_means_the_same() {
    let (graph, moved) = (deep().expect("types"), offloaded());
    let away = moves(&moved, Memory::Host);
    assert_eq!(away, moves(&moved, Memory::Device));
    // What a layer keeps of its own, and its output, which the layer behind it keeps: in the last layers they are used too soon.
    assert_eq!(away, (LAYERS - 2) + (LAYERS - 3));
    let mut rng = Rng::new(3);
    let values: HashMap<String, Value> = (graph.main().args.iter())
        .map(|arg| {
            let shape = arg.ty.shape.eval(&bindings()).expect("bound");
            (arg.name.to_string(), rng.normal(DType::F32, &shape).into())
        })
        .collect();
    let of = |graph: &Graph| -> Vec<(String, Tensor)> {
        let value = |arg: &Arg| values.get(&*arg.name).cloned();
        let outputs = evaluate(graph, &value, &bindings(), Precision::Exact).expect("evaluates");
        outputs.into_iter().map(|(name, value)| (name, value.tensor().clone())).collect()
    };
    assert_eq!(of(&graph), of(&moved));
}

/// The memory that a launch reads, and that it writes.
fn operands(graph: &Graph, plan: &Plan, launch: usize) -> [Vec<(Place, usize)>; 2] {
    let launch = &plan.launches[launch];
    let kernel = &plan.kernels[launch.kernel];
    let function = graph.function(kernel.func);
    let node = &function.nodes[kernel.node];
    let bytes = |ty: &Type| component_offsets(ty, &bindings()).expect("bound").1;
    let reads = launch.inputs.iter().zip(&node.inputs).map(|(place, var)| (*place, bytes(function.ty(*var))));
    let writes = launch.outputs.iter().zip(&node.outputs).map(|(place, ty)| (*place, bytes(ty)));
    [reads.collect(), writes.collect()]
}

fn touch(a: &[(Place, usize)], b: &[(Place, usize)]) -> bool {
    let touches = |(a, of_a): (Place, usize), (b, of_b): (Place, usize)| {
        a.region == b.region && a.offset < b.offset + of_b && b.offset < a.offset + of_a
    };
    a.iter().any(|a| b.iter().any(|b| touches(*a, *b)))
}

#[test]
fn copies_run_beside_calls_and_nobody_touches_what_they_use() {
    let lowered = |graph: &Graph| {
        let outputs: Vec<String> = graph.main().outputs.iter().map(|output| output.name.to_string()).collect();
        lower(graph, &outputs.iter().map(String::as_str).collect::<Vec<_>>(), &[]).expect("lowers")
    };
    let (whole, moved) = (lowered(&deep().expect("types")), lowered(&offloaded()));
    let [before, after] = [&whole, &moved].map(|graph| plan(graph, &bindings()).expect("bound"));
    assert_eq!(before.host_bytes, 0);
    assert!(after.host_bytes > 0 && after.arena_bytes * 10 < before.arena_bytes * 8, "{}", after.arena_bytes);
    let is_copy = |launch: usize| {
        let kernel = &after.kernels[after.launches[launch].kernel];
        matches!(moved.function(kernel.func).nodes[kernel.node].op, Op::Prim(Prim::Move(_)))
    };
    let copies: Vec<usize> = (0..after.launches.len()).filter(|launch| is_copy(*launch)).collect();
    assert_eq!(copies.len(), 2 * moves(&offloaded(), Memory::Host));
    let mut beside = 0;
    for (nth, copy) in copies.iter().enumerate() {
        assert!(after.launches[*copy].communicates);
        let [read, written] = operands(&moved, &after, *copy);
        let mut complete = 0;
        for launch in copy + 1..after.launches.len() {
            complete = complete.max(after.launches[launch].after);
            if complete > nth {
                break;
            }
            if !is_copy(launch) {
                let [reads, writes] = operands(&moved, &after, launch);
                assert!(!touch(&reads, &written) && !touch(&writes, &written) && !touch(&writes, &read), "{launch}");
                beside += 1;
            }
        }
    }
    // Each has a call's launches beside it.
    assert!(beside >= 3 * copies.len(), "{beside} launches beside {} copies", copies.len());

    let snapshot = memory_snapshot(&moved, &after, &bindings()).expect("bound");
    assert_eq!(snapshot.host_values.len(), copies.len() / 2);
    assert!(snapshot.host_values.iter().all(|value| value.op == "to_host" && value.first < value.last));
    assert!(snapshot.host_peak_bytes <= snapshot.host_bytes && snapshot.host_bytes == after.host_bytes);
    let places = after.launches.iter().flat_map(|launch| launch.inputs.iter().chain(&launch.outputs));
    assert!(places.filter(|place| place.region == Region::Host).all(|place| place.offset < after.host_bytes));
}
