//! GPUs as ranks that are processes: collectives by NCCL, beside computation, and what becomes of a rank that is lost.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ridge_comm::Cluster;
use ridge_cuda::{Cuda, CudaOptions};
use ridge_graph::conformance::near;
use ridge_graph::sample::Rng;
use ridge_graph::shard::{MeshAxis, gather_again, gather_weights};
use ridge_graph::{
    Arg, Bindings, Builder, CollectiveKind, DType, Graph, Precision, Prim, Role, Tensor, Type, Value, evaluate_mesh,
};
use ridge_runtime::{Backend, Bucket};

use crate::common::gpu;
use crate::processes;
use crate::running::session;

const RANKS: usize = 2;

/// The backend of a rank.
fn backend(cluster: &Cluster, ordinal: usize, options: CudaOptions) -> Arc<dyn Backend> {
    let mesh = HashMap::from([("tp".to_owned(), cluster.group())]);
    Arc::new(Cuda::new(CudaOptions { ordinal, mesh, ..options }).expect("the other rank comes"))
}

fn set(bucket: &mut Bucket, graph: &Graph, value: &dyn Fn(&Arg) -> Value) {
    for arg in graph.args(Role::StepInput) {
        bucket.set(&arg.name, value(arg).tensor()).expect("fits");
    }
}

/// Runs a graph with all its outputs several times, launch by launch, captured, and launched again, which gives the same
/// bits, and gives its outputs.
fn steps(backend: &Arc<dyn Backend>, graph: &Graph, value: &dyn Fn(&Arg) -> Value) -> Vec<Tensor> {
    let session = session(backend, graph, &Bindings::new(), value).expect("loads");
    let names: Vec<&str> = graph.main().outputs.iter().map(|output| &*output.name).collect();
    let compiled = session.compile(graph, &names).unwrap_or_else(|why| panic!("{why}"));
    let mut bucket = compiled.bucket(&Bindings::new()).expect("binds");
    let mut all = Vec::new();
    for _ in 0..4 {
        set(&mut bucket, graph, value);
        bucket.submit().expect("runs");
        bucket.wait().expect("runs");
        all.push(names.iter().map(|name| bucket.tensor(name).expect("asked for")).collect::<Vec<_>>());
    }
    assert!(all.iter().all(|outputs| *outputs == all[0]), "captured steps give other bits");
    all.pop().expect("ran")
}

/// Every collective of a tensor.
fn collectives(dtype: DType, shape: &[usize; 3]) -> Graph {
    let kinds = [
        CollectiveKind::AllReduce,
        CollectiveKind::AllGather(0),
        CollectiveKind::AllGather(1),
        CollectiveKind::AllGather(2),
        CollectiveKind::ReduceScatter(0),
        CollectiveKind::ReduceScatter(1),
        CollectiveKind::AllToAll { split: 1, concat: 0 },
        CollectiveKind::AllToAll { split: 1, concat: 2 },
        CollectiveKind::AllToAll { split: 0, concat: 1 },
        CollectiveKind::AllToAll { split: 1, concat: 1 },
        CollectiveKind::Broadcast(1),
        CollectiveKind::Reduce(1),
        CollectiveKind::Send { from: 1, to: 0 },
        CollectiveKind::Split(1),
    ];
    let mut g = Builder::new();
    let x = g.step_input("x", Type::tensor(dtype, *shape)).expect("fresh");
    let mut outputs = Vec::new();
    for (i, kind) in kinds.into_iter().enumerate() {
        let prim = Prim::Collective { kind, mesh: "tp".into(), ranks: RANKS };
        outputs.push((i.to_string(), g.prim(prim, &[x]).expect("types")[0]));
    }
    g.finish(outputs).expect("finishes")
}

fn collectives_of(rank: usize, cluster: &Cluster, ordinal: usize) {
    let poisoned = backend(cluster, ordinal, CudaOptions { poison: true, ..CudaOptions::default() });
    let captured = backend(cluster, ordinal, CudaOptions::default());
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::I32, DType::I64, DType::I8, DType::U8, DType::Bool] {
        for shape in [[4usize, 6, 5], [2, 8, 4099]] {
            let graph = collectives(dtype, &shape);
            let given = |rank: usize| {
                let mut rng = Rng::new(rank as u64 + 1);
                Value::Plain(match dtype {
                    DType::Bool => rng.integers(dtype, &shape, 0, 2),
                    DType::U8 => rng.integers(dtype, &shape, 0, 100),
                    _ if dtype.is_float() => rng.normal(dtype, &shape),
                    _ => rng.integers(dtype, &shape, -60, 60),
                })
            };
            let meaning = |precision| {
                let value = |rank: usize, _: &Arg| Some(given(rank));
                evaluate_mesh(&graph, &[("tp", RANKS)], &value, &Bindings::new(), precision).expect("evaluates")
            };
            let (exact, plain) = (meaning(Precision::Exact), meaning(Precision::Rounded));
            for backend in [&poisoned, &captured] {
                let got = steps(backend, &graph, &|_| given(rank));
                for (((name, exact), (_, plain)), got) in exact[rank].iter().zip(&plain[rank]).zip(&got) {
                    let (exact, plain) = (exact.tensor(), plain.tensor());
                    let judged = match dtype.is_float() {
                        true => near(got, &[plain], exact).map(|_| ()),
                        false if got == exact => Ok(()),
                        false => Err(format!(": got {got:?}, must be {exact:?}")),
                    };
                    judged.unwrap_or_else(|why| panic!("{dtype}, output {name} of rank {rank}{why:.400}"));
                }
            }
        }
    }
}

const LAYERS: usize = 6;
const WIDTH: usize = 512;

/// Layers whose weights are cut over the ranks, and gathered for each layer while the one before it is computed.
fn layers() -> Graph {
    let ty = || Type::tensor(DType::F32, [64, WIDTH]);
    let mut g = Builder::new();
    let layer = g
        .function("layer", |g| {
            let x = g.arg("x", ty());
            let w = g.weight("w", Type::tensor(DType::F32, [WIDTH, WIDTH]))?;
            let h = g.linear(x, w)?;
            let h = g.tanh(h)?;
            Ok(vec![g.add(x, h)?])
        })
        .expect("types");
    let mut x = g.step_input("x", ty()).expect("fresh");
    for i in 0..LAYERS {
        x = g.scoped(&format!("layers.{i}"), |g| g.call(layer, &[x])).expect("types")[0];
    }
    let graph = g.finish(vec![("y".into(), x)]).expect("finishes");
    gather_again(&gather_weights(&graph, &MeshAxis::new("tp", RANKS)).expect("divides")).expect("is consistent")
}

fn part(rank: usize, arg: &Arg) -> Value {
    let of = if arg.role == Role::Weight { rank as u64 } else { 9 };
    let seed = of + arg.name.bytes().map(u64::from).sum::<u64>();
    let mut t = Rng::new(seed).normal(DType::F32, &arg.ty.shape.as_const().expect("constant"));
    if let ridge_graph::Data::Float(data) = &mut t.data {
        data.iter_mut().for_each(|x| *x = f64::from((*x * 0.03) as f32));
    }
    t.into()
}

fn lanes_of(rank: usize, cluster: &Cluster, ordinal: usize) {
    let graph = layers();
    let meaning = |precision| {
        let value = |rank: usize, arg: &Arg| Some(part(rank, arg));
        let ranks = evaluate_mesh(&graph, &[("tp", RANKS)], &value, &Bindings::new(), precision).expect("evaluates");
        ranks[rank][0].1.tensor().clone()
    };
    let (exact, plain) = (meaning(Precision::Exact), meaning(Precision::Rounded));
    let backend = backend(cluster, ordinal, CudaOptions::default());
    let value = |arg: &Arg| part(rank, arg);
    let got = steps(&backend, &graph, &value);
    near(&got[0], &[&plain], &exact).unwrap_or_else(|why| panic!("rank {rank}{why}"));

    let session = session(&backend, &graph, &Bindings::new(), &value).expect("loads");
    let compiled = session.compile(&graph, &["y"]).expect("compiles");
    let mut bucket = compiled.bucket(&Bindings::new()).expect("binds");
    let launches = ridge_runtime::plan(compiled.graph(), &Bindings::new()).expect("plans").launches;
    assert_eq!(launches.iter().filter(|launch| launch.communicates).count(), LAYERS, "a gather for each layer");
    for timed in [false, true] {
        set(&mut bucket, &graph, &value);
        if !timed {
            bucket.submit().expect("runs");
            bucket.wait().expect("runs");
            continue;
        }
        let times = bucket.timed().expect("runs");
        assert_eq!(times.len(), launches.len());
        if rank == 0 {
            for (time, launch) in times.iter().zip(&launches) {
                let lane = if launch.communicates { "communicates" } else { "computes" };
                let (place, from, to) = (time.place(compiled.graph()), (time.end - time.seconds) * 1e6, time.end * 1e6);
                eprintln!("{place:10} {lane:12} from {from:8.1} to {to:8.1} us");
            }
        }
    }
}

/// One collective in each of some steps.
fn sum(of: usize) -> Graph {
    let mut g = Builder::new();
    let x = g.step_input("x", Type::tensor(DType::F32, [of])).expect("fresh");
    let prim = Prim::Collective { kind: CollectiveKind::AllReduce, mesh: "tp".into(), ranks: RANKS };
    let y = g.prim(prim, &[x]).expect("types")[0];
    g.finish(vec![("y".into(), y)]).expect("finishes")
}

/// Runs steps until one fails, and says why and when.
fn until_failure(backend: &Arc<dyn Backend>, graph: &Graph, mut between: impl FnMut(usize)) -> (String, Duration) {
    let zeros = |arg: &Arg| Value::Plain(Tensor::zeros(arg.ty.dtype, &arg.ty.shape.as_const().expect("constant")));
    let session = session(backend, graph, &Bindings::new(), &zeros).expect("loads");
    let compiled = session.compile(graph, &["y"]).expect("compiles");
    let mut bucket = compiled.bucket(&Bindings::new()).expect("binds");
    for step in 0.. {
        between(step);
        let start = Instant::now();
        let outcome = bucket.submit().and_then(|()| bucket.wait());
        if let Err(error) = outcome {
            return (error.to_string(), start.elapsed());
        }
    }
    unreachable!("steps without end")
}

fn be_a_rank(case: &str, cluster: &Cluster, ordinal: usize) {
    let rank = cluster.rank();
    match case {
        "collectives" => collectives_of(rank, cluster, ordinal),
        "lanes" => lanes_of(rank, cluster, ordinal),
        "lost" | "stopped" => {
            let backend = backend(cluster, ordinal, CudaOptions::default());
            let (why, after) = until_failure(&backend, &sum(1000), |step| match (rank, step, case) {
                // It leaves no word.
                (1, 5, "lost") => std::process::abort(),
                (1, 5, _) => {
                    let own = std::process::id().to_string();
                    std::process::Command::new("kill").args(["-STOP", &own]).status().expect("runs");
                }
                _ => {}
            });
            eprintln!("{case}: {why} after {after:?}");
            assert!(why.contains("rank 1"), "{why}");
            assert!(after < Duration::from_secs(5), "{after:?}");
        }
        "different" => {
            // Sums of other lengths: NCCL alone would wait for ever, or give what makes no sense.
            let backend = backend(cluster, ordinal, CudaOptions::default());
            let (why, _) = until_failure(&backend, &sum(if rank == 0 { 1000 } else { 3000 }), |_| {});
            eprintln!("{why}");
            assert!(why.contains("f32[1000]") && why.contains("f32[3000]"), "{why}");
        }
        _ => panic!("no case {case}"),
    }
}

/// Runs this test again as each rank.
fn as_ranks(test: &str, case: &str, finish: impl FnOnce(Vec<std::process::Child>)) {
    if let Some((case, settings, ordinal)) = processes::rank() {
        let cluster = Cluster::join(&settings).expect("the other rank comes");
        be_a_rank(&case, &cluster, ordinal);
        return cluster.leave();
    }
    if gpu().is_some() {
        let gpus = |rank: usize, command: &mut _| processes::use_gpu(rank, RANKS, command);
        finish(processes::start(&format!("ranks::{test}"), case, RANKS, gpus));
    }
}

#[test]
fn two_gpus_get_what_the_mesh_means() {
    let name = "two_gpus_get_what_the_mesh_means";
    as_ranks(name, "collectives", |ranks| processes::finish(name, ranks));
}

#[test]
fn weights_are_gathered_beside_computation() {
    let name = "weights_are_gathered_beside_computation";
    as_ranks(name, "lanes", |ranks| processes::finish(name, ranks));
}

#[test]
fn ranks_that_do_different_things_learn_of_it() {
    let name = "ranks_that_do_different_things_learn_of_it";
    as_ranks(name, "different", |ranks| processes::finish(name, ranks));
}

#[test]
fn a_rank_that_dies_is_named_by_the_other() {
    as_ranks("a_rank_that_dies_is_named_by_the_other", "lost", |mut ranks| {
        assert!(ranks[0].wait().expect("ends").success(), "rank 0");
        assert!(!ranks[1].wait().expect("ends").success(), "rank 1 was to die");
    });
}

#[test]
fn a_rank_that_is_stopped_is_named_by_the_other() {
    as_ranks("a_rank_that_is_stopped_is_named_by_the_other", "stopped", |mut ranks| {
        let outcome = ranks[0].wait().expect("ends");
        ranks[1].kill().expect("is there");
        ranks[1].wait().expect("ends");
        assert!(outcome.success(), "rank 0");
    });
}
