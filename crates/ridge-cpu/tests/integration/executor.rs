//! Whole steps on threads: the same bits whatever the threads, steps of several sessions in the order of submission,
//! failures that surface, and ranks that talk to one another.

use std::collections::HashMap;
use std::sync::Arc;

use crate::common::{poisoned, run, same_bits, session};
use crate::decoder::{Step, decoder};
use ridge_comm::{Cluster, JoinSettings, Loopback, Transport};
use ridge_cpu::{Cpu, CpuOptions};
use ridge_graph::conformance::{judge_graph, near};
use ridge_graph::sample::Rng;
use ridge_graph::{
    Arg, Bindings, Builder, CollectiveKind, DType, Graph, Precision, Prim, Role, Tensor, Type, Value, evaluate_mesh,
};
use ridge_runtime::{Backend, Bucket, CollectiveError, Collectives, RuntimeError};

#[test]
fn a_decoder_is_right_in_every_dtype_and_the_same_on_any_number_of_threads() {
    let backends = [1, 2, 3, 7].map(poisoned);
    for (dtype, stored) in [(DType::F32, false), (DType::BF16, false), (DType::F16, true), (DType::F32, true)] {
        let graph = decoder(dtype, stored).expect("builds");
        for lengths in [&[(0, 17), (3, 1), (7, 2)][..], &[(0, 1)], &[(9, 1), (5, 1), (12, 1)]] {
            let step = Step::new(lengths, 21);
            let value = |arg: &Arg| step.value(arg);
            let results: Vec<Vec<Tensor>> =
                backends.iter().map(|b| run(b, &graph, &step.bindings, &value).expect("runs")).collect();
            // A token jumps, and so is judged by its logits alone.
            let (graph, got) = without_next(&graph, &results[0]);
            if let Err(why) = judge_graph(&graph, &|arg| Some(value(arg)), &step.bindings, &got) {
                panic!("{dtype}, stored {stored}, {lengths:?}: {why:.600}");
            }
            assert!(results.iter().all(|r| same_bits(r, &results[0])), "{dtype}: threads change the result");
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

/// The logits of a sequence's last token when its first `parts` steps are of these lengths.
fn in_parts(backend: &Arc<dyn Backend>, parts: &[usize]) -> Vec<u8> {
    let graph = decoder(DType::BF16, false).expect("builds");
    let total: usize = parts.iter().sum();
    let whole = Step::new(&[(0, total)], 5);
    let session = session(backend, &graph, &whole.bindings, &|arg| whole.value(arg)).expect("loads");
    let compiled = session.compile(&graph, &["logits"]).expect("compiles");
    let mut done = 0;
    let mut logits = Vec::new();
    for part in parts {
        let step = Step::new(&[(done, *part)], 5);
        let mut bucket = compiled.bucket(&step.bindings).expect("binds");
        for arg in graph.args(Role::StepInput) {
            let tensor = if &*arg.name == "ids" {
                let Value::Plain(all) = whole.value(arg) else { unreachable!("ids are plain") };
                Tensor::int(DType::I32, &[*part], all.ints()[done..done + part].to_vec())
            } else {
                step.value(arg).tensor().clone()
            };
            bucket.set(&arg.name, &tensor).expect("fits");
        }
        bucket.submit().expect("runs");
        bucket.wait().expect("runs");
        logits = bucket.output(0).to_vec();
        done += part;
    }
    logits
}

#[test]
fn a_prompt_in_chunks_gives_the_same_bits() {
    let backends = [1, 3].map(poisoned);
    let whole = in_parts(&backends[0], &[20]);
    assert!(whole.iter().any(|byte| *byte != 0));
    for backend in &backends {
        for parts in [&[20][..], &[7, 13], &[1, 1, 18], &[16, 1, 1, 1, 1]] {
            assert_eq!(in_parts(backend, parts), whole, "{parts:?} on {} threads", backend.name());
        }
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
    for threads in [1, 3] {
        let backend = poisoned(threads);
        let graph = counter(ROWS);
        let zeros = |arg: &Arg| Value::Plain(Tensor::zeros(DType::I64, &arg.ty.shape.as_const().expect("constant")));
        let sessions = [(); 2].map(|()| session(&backend, &graph, &Bindings::new(), &zeros).expect("loads"));
        // Three buckets of each session, all in flight at once, over one state a session.
        let compiled: Vec<_> = sessions.iter().map(|s| s.compile(&graph, &["y"]).expect("compiles")).collect();
        let bucket_of = |c: &ridge_runtime::Compiled| c.bucket(&Bindings::new()).expect("binds");
        let mut buckets: Vec<Vec<Bucket>> = (0..3).map(|_| compiled.iter().map(bucket_of).collect()).collect();
        let mut sums = [0i64; 2];
        for round in 0..40i64 {
            let mut expected = Vec::new();
            for (i, of_sessions) in buckets.iter_mut().enumerate() {
                for ((s, sum), bucket) in sums.iter_mut().enumerate().zip(of_sessions) {
                    let add = round * 10 + i as i64 + 100 * s as i64;
                    *sum += add;
                    expected.push((s, i, *sum));
                    bucket.input(0).as_chunks_mut::<8>().0.fill(add.to_le_bytes());
                    bucket.submit().expect("submits");
                }
            }
            // Waited for in another order than submitted.
            for (s, i, sum) in expected.into_iter().rev() {
                buckets[i][s].wait().expect("runs");
                let output = buckets[i][s].output(0);
                assert!(output.as_chunks::<8>().0.iter().all(|c| i64::from_le_bytes(*c) == sum), "round {round}");
            }
        }
    }
}

#[test]
fn buckets_share_a_workspace_that_grows() {
    let backend = poisoned(2);
    let graph = decoder(DType::F32, false).expect("builds");
    let small = Step::new(&[(0, 1)], 2);
    let large = Step::new(&[(0, 20), (0, 20)], 2);
    let session = session(&backend, &graph, &small.bindings, &|arg| small.value(arg)).expect("loads");
    let compiled = session.compile(&graph, &["logits"]).expect("compiles");
    let bytes = |step: &Step| compiled.workspace_bytes(&step.bindings).expect("bound");
    assert!(bytes(&large) > 4 * bytes(&small));
    let mut first = compiled.bucket(&small.bindings).expect("binds");
    let run = |bucket: &mut Bucket, step: &Step| {
        for arg in graph.args(Role::StepInput) {
            bucket.set(&arg.name, step.value(arg).tensor()).expect("fits");
        }
        bucket.submit().expect("runs");
        bucket.wait().expect("runs");
        bucket.output(0).to_vec()
    };
    let before = run(&mut first, &small);
    // A bucket that was bound to the smaller workspace continues in the larger one.
    let mut second = compiled.bucket(&large.bindings).expect("binds");
    let long = run(&mut second, &large);
    assert_eq!(run(&mut first, &small), before);
    assert_eq!(run(&mut second, &large), long);
}

#[test]
fn a_timed_step_has_an_event_for_each_launch_with_its_calls() {
    let graph = decoder(DType::F32, false).expect("builds");
    for backend in [poisoned(1), poisoned(3), Arc::new(Cpu::new(CpuOptions::default()).expect("starts"))] {
        let step = Step::new(&[(0, 9)], 2);
        let session = session(&backend, &graph, &step.bindings, &|arg| step.value(arg)).expect("loads");
        let compiled = session.compile(&graph, &["logits"]).expect("compiles");
        let mut bucket = compiled.bucket(&step.bindings).expect("binds");
        let mut outputs = Vec::new();
        for timed in [false, true] {
            for arg in graph.args(Role::StepInput) {
                bucket.set(&arg.name, step.value(arg).tensor()).expect("fits");
            }
            if timed {
                let launches = ridge_runtime::plan(compiled.graph(), &step.bindings).expect("plans").launches;
                let times = bucket.timed().expect("runs");
                assert_eq!(times.len(), launches.len());
                assert!(times.iter().zip(&launches).all(|(time, launch)| time.path == launch.path));
                let attends: Vec<String> = (times.iter())
                    .filter(|t| compiled.graph().function(t.func).nodes[t.node].op_name() == "attention")
                    .map(|t| t.place(compiled.graph()))
                    .collect();
                assert_eq!(attends.len(), 2, "{attends:?}");
                assert!(attends[0].starts_with("layers.0") && attends[1].starts_with("layers.1"), "{attends:?}");
                assert!(times.iter().map(|t| t.seconds).sum::<f64>() > 0.0);
            } else {
                bucket.submit().expect("runs");
                bucket.wait().expect("runs");
            }
            outputs.push(bucket.output(0).to_vec());
        }
        assert_eq!(outputs[0], outputs[1], "timing changes no bit");
    }
}

/// A group of two whose other rank never answers but with a panic.
struct Broken;

impl Collectives for Broken {
    fn ranks(&self) -> usize {
        2
    }

    fn rank(&self) -> usize {
        0
    }

    fn exchange(&self, _what: &str, _send: &[&[u8]], _receive: &mut [&mut [u8]]) -> Result<(), CollectiveError> {
        Err(CollectiveError::Lost { rank: 1, why: "rank 1 is gone".into() })
    }

    fn abort(&self, _why: &str) {}
}

fn reduced(axis: &str) -> Graph {
    let mut g = Builder::new();
    let x = g.step_input("x", Type::tensor(DType::F32, [8usize])).expect("fresh");
    let prim = Prim::Collective { kind: CollectiveKind::AllReduce, mesh: axis.into(), ranks: 2 };
    let y = g.prim(prim, &[x]).expect("types")[0];
    let y = g.exp(y).expect("types");
    g.finish(vec![("y".into(), y)]).expect("finishes")
}

#[test]
fn a_kernel_that_panics_is_an_error_of_the_step_and_of_those_after_it() {
    for threads in [1, 2] {
        let mesh = HashMap::from([("tp".to_owned(), Arc::new(Broken) as Arc<dyn Collectives>)]);
        let options = CpuOptions { threads: Some(threads), mesh, ..CpuOptions::default() };
        let backend: Arc<dyn Backend> = Arc::new(Cpu::new(options).expect("threads start"));
        let (graph, fine) = (reduced("tp"), counter(3));
        let zeros = |arg: &Arg| Value::Plain(Tensor::zeros(arg.ty.dtype, &arg.ty.shape.as_const().expect("constant")));
        let session = session(&backend, &graph, &Bindings::new(), &zeros).expect("loads");
        let compiled = session.compile(&graph, &["y"]).expect("compiles");
        let mut bucket = compiled.bucket(&Bindings::new()).expect("binds");
        bucket.submit().expect("submits");
        let error = bucket.wait().expect_err("the kernel panicked");
        assert!(matches!(&error, RuntimeError::Device { why, .. } if why.contains("rank 1 is gone")), "{error}");
        assert!(bucket.submit().is_err());
        // The backend continues with others.
        run(&backend, &fine, &Bindings::new(), &zeros).expect("runs");
    }
}

#[test]
fn a_missing_mesh_axis_is_named() {
    let backend = poisoned(1);
    let zeros = |arg: &Arg| Value::Plain(Tensor::zeros(arg.ty.dtype, &arg.ty.shape.as_const().expect("constant")));
    let error = run(&backend, &reduced("tp"), &Bindings::new(), &zeros).expect_err("there is no such axis");
    let text = error.to_string();
    assert!(text.contains("all_reduce") && text.contains("mesh axis `tp`"), "{text}");
}

/// A rank's end of a group, and what keeps it together.
type End = (Arc<dyn Collectives>, Option<Cluster>);

/// Groups of ranks over every transport.
fn every_group(ranks: usize) -> Vec<Vec<End>> {
    let joined = |transport| {
        let meet = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port is free");
        std::thread::scope(|scope| {
            let join = |rank| {
                let (meet, token, wait) = (meet.to_string(), String::new(), JoinSettings::WAIT);
                let patience = JoinSettings::PATIENCE;
                let settings = JoinSettings { rank, ranks, local: rank, meet, token, transport, wait, patience };
                scope.spawn(move || Cluster::join(&settings).expect("joins"))
            };
            let threads: Vec<_> = (0..ranks).map(join).collect();
            let clusters = threads.into_iter().map(|t| t.join().expect("no panic"));
            clusters.map(|cluster| (cluster.group(), Some(cluster))).collect()
        })
    };
    vec![
        Loopback::group(ranks).into_iter().map(|group| (group, None)).collect(),
        joined(Transport::SharedMemory),
        joined(Transport::Tcp),
    ]
}

#[test]
fn ranks_get_what_the_mesh_means_over_every_transport() {
    // Small, and more than is sent whole to every rank.
    for shape in [[4usize, 6, 5], [8, 24, 81]] {
        every_group(RANKS).into_iter().for_each(|groups| ranks_get_what_the_mesh_means(&groups, &shape));
    }
}

const RANKS: usize = 3;

fn ranks_get_what_the_mesh_means(groups: &[End], shape: &[usize; 3]) {
    for dtype in [DType::F32, DType::BF16, DType::I64, DType::I8] {
        let kinds = [
            CollectiveKind::AllReduce,
            CollectiveKind::AllGather(0),
            CollectiveKind::AllGather(1),
            CollectiveKind::AllGather(2),
            CollectiveKind::ReduceScatter(1),
            CollectiveKind::AllToAll { split: 1, concat: 0 },
            CollectiveKind::AllToAll { split: 1, concat: 2 },
            CollectiveKind::AllToAll { split: 1, concat: 1 },
            CollectiveKind::Broadcast(2),
            CollectiveKind::Reduce(1),
            CollectiveKind::Send { from: 2, to: 0 },
            CollectiveKind::Split(1),
        ];
        let mut g = Builder::new();
        let x = g.step_input("x", Type::tensor(dtype, *shape)).expect("fresh");
        let mut outputs = Vec::new();
        for (i, kind) in kinds.into_iter().enumerate() {
            let prim = Prim::Collective { kind, mesh: "tp".into(), ranks: RANKS };
            outputs.push((i.to_string(), g.prim(prim, &[x]).expect("types")[0]));
        }
        let graph = g.finish(outputs).expect("finishes");
        let value = |rank: usize| {
            let mut rng = Rng::new(rank as u64);
            let t = if dtype.is_float() { rng.normal(dtype, shape) } else { rng.integers(dtype, shape, -60, 60) };
            Value::Plain(t)
        };
        let mesh = [("tp", RANKS)];
        let meaning = |precision| {
            evaluate_mesh(&graph, &mesh, &|rank, _| Some(value(rank)), &Bindings::new(), precision).expect("evaluates")
        };
        let (exact, plain) = (meaning(Precision::Exact), meaning(Precision::Rounded));
        std::thread::scope(|scope| {
            for (rank, (group, _)) in groups.iter().enumerate() {
                let (graph, exact, plain) = (&graph, &exact[rank], &plain[rank]);
                scope.spawn(move || {
                    let mesh = HashMap::from([("tp".to_owned(), Arc::clone(group))]);
                    let options = CpuOptions { threads: Some(2), mesh, poison: true, ..CpuOptions::default() };
                    let backend: Arc<dyn Backend> = Arc::new(Cpu::new(options).expect("threads start"));
                    let got = run(&backend, graph, &Bindings::new(), &|_| value(rank)).expect("runs");
                    for (((name, exact), (_, plain)), got) in exact.iter().zip(plain).zip(&got) {
                        let (exact, plain) = (exact.tensor(), plain.tensor());
                        let judged = match dtype.is_float() {
                            true => near(got, &[plain], exact).map(|_| ()),
                            false if got == exact => Ok(()),
                            false => Err(format!(": got {got:?}, must be {exact:?}")),
                        };
                        assert!(got.shape == exact.shape, "{dtype}, output {name} of rank {rank}: {:?}", got.shape);
                        judged.unwrap_or_else(|why| panic!("{dtype}, output {name} of rank {rank}{why}"));
                    }
                });
            }
        });
    }
}
