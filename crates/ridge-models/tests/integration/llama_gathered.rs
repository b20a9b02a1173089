//! Training of small Llamas over two data-parallel ranks that cut all parameters and moments between them: each layer's
//! weights are gathered before its call and given up behind it, gradients are summed and scattered, and what comes out is
//! what one rank computes of both batches.

use std::collections::HashMap;
use std::sync::Arc;

use crate::common::{
    BLOCKS, Fixture, SHUFFLED, Sequence, empty_state, find, loss_graph, options, relative, step, training_step,
};
use crate::processes;
use ridge_comm::{Cluster, Loopback};
use ridge_cpu::{Cpu, CpuOptions};
use ridge_cuda::{Cuda, CudaOptions};
use ridge_graph::shard::{MeshAxis, Placement, gather_again, gather_weights, slice_for_rank, unite};
use ridge_graph::{
    Arg, Bindings, Builder, CollectiveKind, DType, Graph, Op, Precision, Prim, Role, Tensor, Value, evaluate,
    evaluate_mesh,
};
use ridge_models::symbols;
use ridge_runtime::{Backend, PlannedLaunch, Session, WeightData, lower, plan};

const RANKS: usize = 2;
const STEPS: u32 = 3;

fn dp() -> MeshAxis {
    MeshAxis::new("dp", RANKS)
}

/// The loss of one rank's batch over the number of ranks, so that the sum of all is the mean.
fn share_of_loss(loss: &Graph) -> Graph {
    let (mut g, outputs) = Builder::reopen(loss.clone());
    let share = g.constant(DType::F32, 1.0 / RANKS as f64).expect("types");
    let outputs = outputs.into_iter().map(|(name, var)| (name, g.mul(var, share).expect("types")));
    let outputs = outputs.collect();
    g.finish(outputs).expect("finishes")
}

fn gathered_step(fixture: &Fixture) -> Graph {
    let loss = gather_weights(&share_of_loss(&loss_graph(fixture)), &dp()).expect("divides");
    gather_again(&training_step(&loss).expect("differentiates")).expect("is consistent")
}

/// A step of these sequences of the prompt, twelve tokens each.
fn batch(fixture: &Fixture, sequences: &[usize]) -> (Vec<(String, Tensor)>, Bindings) {
    let tokens = fixture.prompt();
    let mut of: Vec<Sequence> =
        sequences.iter().map(|i| Sequence::new(&tokens[12 * i..12 * (i + 1)], &SHUFFLED[*i])).collect();
    let (mut inputs, bindings) = step(&mut of, &vec![12; sequences.len()]);
    let target = |sequence: usize, i: usize| if i == 11 { -100 } else { tokens[12 * sequence + i + 1] };
    let targets = sequences.iter().flat_map(|s| (0..12).map(move |i| (*s, i))).map(|(s, i)| target(s, i)).collect();
    inputs.push(("targets".into(), Tensor::int(DType::I32, &[12 * sequences.len()], targets)));
    inputs.push(("lr".into(), Tensor::float(DType::F32, &[], vec![1e-2])));
    (inputs, bindings)
}

fn at(count: u32) -> Tensor {
    Tensor::float(DType::F32, &[], vec![f64::from(count)])
}

/// The axis along which `local` is a share of `whole`.
fn cut(whole: &[usize], local: &[usize]) -> Option<usize> {
    (0..whole.len()).find(|dim| whole[*dim] != local[*dim])
}

fn placement(whole: &Graph, local: &Arg) -> Placement {
    let ty = &whole.main().args[whole.main().arg_index(&local.name).expect("is there too")].ty;
    let dim = (0..ty.shape.rank()).find(|dim| ty.shape.0[*dim] != local.ty.shape.0[*dim]);
    dim.map_or(Placement::Replicate, Placement::shard)
}

/// Is it what a parameter or a moment is after the steps?
fn is_trained(name: &str) -> bool {
    name.starts_with("adamw.") || name.ends_with("weight")
}

fn trained_only(outputs: Vec<(String, Value)>) -> Vec<(String, Value)> {
    outputs.into_iter().filter(|(output, _)| is_trained(output)).collect()
}

#[test]
fn steps_in_doubles_are_those_of_one_rank() {
    for name in ["mha_untied", "gqa2_tied", "odd_head_dim"] {
        let fixture = Fixture::open(name);
        let whole = training_step(&loss_graph(&fixture)).expect("differentiates");
        let local = gathered_step(&fixture);
        let both = batch(&fixture, &[0, 1]);
        let own = [batch(&fixture, &[0]), batch(&fixture, &[1])];
        let mut states: Vec<(String, Value)> = Vec::new();
        let mut rank_states: Vec<Vec<(String, Value)>> = vec![Vec::new(); RANKS];
        for count in 1..=STEPS {
            let given = |inputs: &[(String, Tensor)], name: &str| match name {
                "step" => Some(at(count).into()),
                name => find(inputs, name).cloned().map(Value::from),
            };
            let of_one = |arg: &Arg| {
                let known = find(&states, &arg.name).cloned().or_else(|| given(&both.0, &arg.name));
                known.or_else(|| fixture.weight(&arg.name)).or_else(|| Some(empty_state(arg, &both.1)))
            };
            let wanted = evaluate(&whole, &of_one, &both.1, Precision::Exact).expect("evaluates");
            let of_rank = |rank: usize, arg: &Arg| {
                let known = find(&rank_states[rank], &arg.name).cloned().or_else(|| given(&own[rank].0, &arg.name));
                let weight = || {
                    let whole_weight = fixture.weight(&arg.name)?;
                    Some(slice_for_rank(&whole_weight, placement(&whole, arg), &dp(), rank).expect("divides"))
                };
                known.or_else(weight).or_else(|| Some(empty_state(arg, &own[rank].1)))
            };
            let got = evaluate_mesh(&local, &[("dp", RANKS)], &of_rank, &own[0].1, Precision::Exact);
            let got = got.unwrap_or_else(|e| panic!("{name}: {e}"));
            let loss = |outputs: &[(String, Value)]| find(outputs, "loss").expect("asked for").tensor().floats()[0];
            let mean: f64 = got.iter().map(|outputs| loss(outputs)).sum();
            assert!((mean - loss(&wanted)).abs() < 1e-12, "{name}: {mean} and {}", loss(&wanted));
            for (output, want) in wanted.iter().filter(|(output, _)| is_trained(output)) {
                let shares: Vec<Tensor> =
                    got.iter().map(|outputs| find(outputs, output).expect("is there too").tensor().clone()).collect();
                let want = want.tensor();
                let dim = cut(&want.shape, &shares[0].shape).expect("is cut");
                let off = relative(unite(&shares, Placement::shard(dim)).floats(), want.floats());
                assert!(off < 1e-10, "{name}: {output} is off by {off:e} in step {count}");
            }
            states = trained_only(wanted);
            rank_states = got.into_iter().map(trained_only).collect();
        }
    }
}

/// One rank's session, with its shares.
fn session(fixture: &Fixture, whole: &Graph, graph: &Graph, rank: usize, backend: Arc<dyn Backend>) -> Session {
    let mut session = Session::new(backend);
    for arg in graph.args(Role::State) {
        let Some(value) = fixture.weight(&arg.name) else { continue };
        let share = if std::ptr::eq(whole, graph) {
            value
        } else {
            slice_for_rank(&value, placement(whole, arg), &dp(), rank).expect("divides")
        };
        let ty = share.ty();
        session.load(&arg.name, &ty, vec![WeightData::Owned(share.tensor().to_bytes())]).expect("fits");
    }
    session.allocate_states(graph, &Bindings::new().with(symbols::BLOCKS, BLOCKS)).expect("fits");
    session
}

/// The losses of some steps, and parameters with their moments after them.
type Trained = (Vec<f64>, Vec<(String, Tensor)>);

/// Takes the steps.
fn trained(session: &Session, graph: &Graph, (inputs, bindings): &(Vec<(String, Tensor)>, Bindings)) -> Trained {
    let compiled = session.compile(graph, &["loss"]).expect("compiles");
    let mut bucket = compiled.bucket(bindings).expect("binds");
    let mut losses = Vec::new();
    for count in 1..=STEPS {
        for (name, tensor) in inputs {
            bucket.set(name, tensor).expect("fits");
        }
        bucket.set("step", &at(count)).expect("fits");
        bucket.submit().and_then(|()| bucket.wait()).unwrap_or_else(|e| panic!("{e}"));
        losses.push(bucket.tensor("loss").expect("asked for").floats()[0]);
    }
    let read = |arg: &Arg| {
        let bytes = session.backend().read(&session.state(&arg.name).expect("is there")).expect("is read");
        let shape = arg.ty.shape.as_const().expect("constant");
        let values = DType::F32.decode(&bytes[..shape.iter().product::<usize>() * 4]);
        (arg.name.to_string(), Tensor::float(DType::F32, &shape, values))
    };
    (losses, graph.args(Role::State).filter(|arg| is_trained(&arg.name)).map(read).collect())
}

/// Losses, and parameters with their moments, of each rank, beside those of one CPU that has both batches.
fn assert_ranks_are_one(fixture: &Fixture, threads: usize, ranks: &[Trained; RANKS]) {
    let whole = training_step(&loss_graph(fixture)).expect("differentiates");
    let cpu = Cpu::new(CpuOptions { threads: Some(threads), poison: true, ..CpuOptions::default() });
    let one = session(fixture, &whole, &whole, 0, Arc::new(cpu.expect("starts")));
    let (losses, wanted) = trained(&one, &whole, &batch(fixture, &[0, 1]));
    for (step, loss) in losses.iter().enumerate() {
        let mean: f64 = ranks.iter().map(|(losses, _)| losses[step]).sum();
        assert!((mean - loss).abs() < 1e-5 * loss, "step {step}: {mean} and {loss}");
    }
    for (name, want) in &wanted {
        let shares: Vec<Tensor> = ranks.iter().map(|(_, s)| find(s, name).expect("is there too").clone()).collect();
        let dim = cut(&want.shape, &shares[0].shape).expect("is cut");
        let off = relative(unite(&shares, Placement::shard(dim)).floats(), want.floats());
        assert!(off < 2e-4, "{name} is off by {off:e}");
    }
}

#[test]
fn steps_on_two_cpus_are_those_of_one() {
    for threads in [1, 2] {
        let fixture = Fixture::open("gqa2_tied");
        let whole = training_step(&loss_graph(&fixture)).expect("differentiates");
        let local = gathered_step(&fixture);
        let group = Loopback::group(RANKS);
        let rank = |rank: usize| {
            let mesh = HashMap::from([("dp".to_owned(), Arc::clone(&group[rank]))]);
            let options = CpuOptions { threads: Some(threads), mesh, poison: true, ..CpuOptions::default() };
            let cpu = Arc::new(Cpu::new(options).expect("starts"));
            let session = session(&fixture, &whole, &local, rank, cpu);
            trained(&session, &local, &batch(&fixture, &[rank]))
        };
        let ranks = std::thread::scope(|scope| {
            let threads = [0, 1].map(|r| scope.spawn(move || rank(r)));
            threads.map(|t| t.join().expect("no panic"))
        });
        assert_ranks_are_one(&fixture, threads, &ranks);
    }
}

/// Where a rank writes what it has trained.
const TRAINED: &str = "RIDGE_TEST_TRAINED";

/// Steps on two GPUs that are ranks over NCCL, in captured steps.
pub(crate) fn steps_on_two_gpus_are_those_of_one(test: &str) {
    let fixture = Fixture::open("gqa2_tied");
    let local = gathered_step(&fixture);
    if let Some((_, settings, ordinal)) = processes::rank() {
        let cluster = Cluster::join(&settings).expect("the other comes");
        let mesh = HashMap::from([("dp".to_owned(), cluster.group())]);
        let gpu = Cuda::new(CudaOptions { ordinal, mesh, ..CudaOptions::default() }).expect("the other comes");
        let whole = training_step(&loss_graph(&fixture)).expect("differentiates");
        let session = session(&fixture, &whole, &local, settings.rank, Arc::new(gpu));
        let (losses, trained) = trained(&session, &local, &batch(&fixture, &[settings.rank]));
        let mut bytes: Vec<u8> = losses.iter().flat_map(|loss| loss.to_le_bytes()).collect();
        trained.iter().for_each(|(_, tensor)| bytes.extend(tensor.to_bytes()));
        let path = std::env::var(TRAINED).expect("is set");
        std::fs::write(format!("{path}/{}", settings.rank), bytes).expect("is written");
        return cluster.leave();
    }
    let folder = tempfile::tempdir().expect("is made");
    let ranks = processes::start(test, "gqa2_tied", RANKS, |rank, command| {
        processes::use_gpu(rank, RANKS, command);
        command.env(TRAINED, folder.path());
    });
    processes::finish(test, ranks);
    let ranks = [0, 1].map(|rank| {
        let bytes = std::fs::read(folder.path().join(rank.to_string())).expect("is written");
        let (losses, mut rest) = bytes.split_at(8 * STEPS as usize);
        let losses = losses.as_chunks::<8>().0.iter().map(|loss| f64::from_le_bytes(*loss)).collect();
        let read = |arg: &Arg| {
            let shape = arg.ty.shape.as_const().expect("constant");
            let (values, others) = rest.split_at(4 * shape.iter().product::<usize>());
            rest = others;
            (arg.name.to_string(), Tensor::float(DType::F32, &shape, DType::F32.decode(values)))
        };
        (losses, local.args(Role::State).filter(|arg| is_trained(&arg.name)).map(read).collect())
    });
    assert_ranks_are_one(&fixture, 2, &ranks);
}

/// The most bytes of gathered weights that are there at a time, the bytes that all gathers of a step give together, and the
/// most collectives that are under way beside a launch, of a model of this many layers.
fn gathered_memory(layers: usize) -> (usize, usize, usize) {
    let mut fixture = Fixture::open("gqa2_tied");
    fixture.config.num_hidden_layers = layers;
    fixture.model = fixture.config.build(&options()).expect("builds");
    let local = gathered_step(&fixture);
    let (_, bindings) = batch(&fixture, &[0]);
    let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).expect("starts");
    let lowered = lower(&local, &["loss"], cpu.kernels()).expect("lowers");
    let plan = plan(&lowered, &bindings).expect("binds");
    let gathered = |launch: &PlannedLaunch| {
        let kernel = &plan.kernels[launch.kernel];
        let node = &lowered.function(kernel.func).nodes[kernel.node];
        let is_gather = matches!(node.op, Op::Prim(Prim::Collective { kind: CollectiveKind::AllGather(_), .. }));
        is_gather.then(|| 4 * kernel.outputs[0].iter().product::<usize>())
    };
    let (mut begun, mut complete, mut ahead) = (0, 0, 0);
    let mut changes = vec![0i64; plan.launches.len() + 1];
    let mut all = 0;
    for (index, launch) in plan.launches.iter().enumerate() {
        begun += usize::from(launch.communicates);
        complete = complete.max(launch.after);
        if !launch.communicates {
            ahead = ahead.max(begun - complete);
        }
        let Some(bytes) = gathered(launch) else { continue };
        assert!(launch.communicates, "launch {index} communicates beside what is computed");
        let place = launch.outputs[0];
        // Until something else is written there.
        let behind = plan.launches.iter().enumerate().skip(index + 1);
        let until = behind.clone().find(|(_, l)| l.outputs.contains(&place)).map_or(plan.launches.len(), |(i, _)| i);
        let reads = behind.take_while(|(i, _)| *i < until).filter(|(_, l)| l.inputs.contains(&place));
        let last = reads.last().map_or(index, |(i, _)| i);
        changes[index] += bytes as i64;
        changes[last + 1] -= bytes as i64;
        all += bytes;
    }
    let live = changes.iter().scan(0, |live, change| {
        *live += change;
        Some(*live)
    });
    (live.max().unwrap_or(0) as usize, all, ahead)
}

#[test]
fn whole_weights_live_around_their_calls_alone() {
    let (two, all_of_two, ahead) = gathered_memory(2);
    // A layer of this model has nine weights: they are under way while the layer before is computed.
    assert!(ahead >= 9, "{ahead} collectives are under way beside a launch");
    // Those of more layers need no more room.
    let (eight, all_of_eight, _) = gathered_memory(8);
    assert!(all_of_eight > 2 * all_of_two, "{all_of_eight} and {all_of_two} bytes gathered");
    assert_eq!(eight, two);
}
