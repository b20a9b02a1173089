//! Tensor parallelism of small Llamas over two ranks, derived from the graph and a table of names: against the
//! unsharded graph by evaluation, and on two CPU backends that talk to each other.

use std::collections::HashMap;
use std::path::Path;
use std::process::Child;
use std::sync::Arc;

use crate::common::mesh::{RANKS, on_mesh, sharded, share, tp};
use crate::common::{
    BLOCKS, Fixture, OnCpu, SHUFFLED, Sequence, empty_state, find, judge, loss_graph, plain_logits, relative, rows,
    stack, step, training_step,
};
use crate::processes;
use ridge_comm::variables::TRANSPORT;
use ridge_comm::{Cluster, JoinSettings, Loopback, Transport};
use ridge_cpu::{Cpu, CpuOptions};
use ridge_cuda::{Cuda, CudaOptions};
use ridge_graph::grad::{float_weights, gradient};
use ridge_graph::shard::{MeshAxis, Placement, Sharded, shard};
use ridge_graph::{Arg, Bindings, DType, Graph, Op, Prim, Role, Tensor, Value};
use ridge_models::parallel::tensor_parallel;
use ridge_models::{HISTORY, symbols};
use ridge_runtime::{Backend, Bucket, Collectives, Compiled, Session, WeightData};

const MODELS: [&str; 5] = ["mha_untied", "gqa2_tied", "odd_head_dim", "bf16_sharded", "biased"];

/// The collectives of each function of `graph`.
fn collectives(graph: &Graph) -> Vec<(String, Vec<&'static str>)> {
    let of = |f: &ridge_graph::Function| {
        let found = f.nodes.iter().filter_map(|n| match &n.op {
            Op::Prim(prim @ Prim::Collective { .. }) => Some(prim.name()),
            _ => None,
        });
        (f.name.to_string(), found.collect())
    };
    graph.functions.iter().map(of).collect()
}

#[test]
fn two_ranks_compute_in_doubles_what_one_does() {
    for name in MODELS {
        let fixture = Fixture::open(name);
        let graph = fixture.graph(&["all_logits", "logits"]);
        let local = sharded(&fixture, &graph);
        let tokens = fixture.prompt();
        let mut sequences = [Sequence::new(&tokens, &SHUFFLED[0]), Sequence::new(&tokens[7..], &SHUFFLED[1])];
        let mut states: Vec<(String, Value)> = Vec::new();
        let mut first = Vec::new();
        for counts in [[16, 3], [1, 1], [7, 5]] {
            let (inputs, bindings) = step(&mut sequences, &counts);
            let value = |arg: &Arg| match arg.role {
                Role::Weight => fixture.weight(&arg.name),
                Role::State => Some(find(&states, &arg.name).cloned().unwrap_or_else(|| empty_state(arg, &bindings))),
                _ => find(&inputs, &arg.name).cloned().map(Value::from),
            };
            let outputs = on_mesh(&graph, &local, &value, &bindings);
            for (output, got, want) in &outputs {
                let off = relative(&got.numbers(), &want.numbers());
                assert!(off < 1e-12, "{name}: {output} is off by {off:e}");
            }
            first.push(rows(&outputs[0].1, 0..counts[0]));
            states = outputs.into_iter().skip(2).map(|(name, got, _)| (name, got.into())).collect();
        }
        let off = relative(stack(&first).floats(), fixture.expected.tensor("logits_f64").floats());
        assert!(off < 1e-12, "{name}: off by {off:e}");
    }
}

#[test]
fn a_layer_reduces_twice_and_only_logits_are_gathered() {
    for name in MODELS {
        let fixture = Fixture::open(name);
        let local = sharded(&fixture, &fixture.graph(&["all_logits"]));
        let gathers = if fixture.config.tie_word_embeddings { 0 } else { 1 };
        let wanted = [("decoder_layer", vec!["all_reduce"; 2]), ("main", vec!["all_gather"; gathers])];
        assert_eq!(collectives(&local.graph), wanted.map(|(f, c)| (f.to_owned(), c)), "{name}");
    }
}

#[test]
fn each_rank_has_half_of_the_layers_and_of_the_cache() {
    for name in MODELS {
        let fixture = Fixture::open(name);
        let graph = fixture.graph(&["all_logits"]);
        let local = sharded(&fixture, &graph);
        for (whole, part) in graph.main().args.iter().zip(&local.graph.main().args) {
            let matrix = whole.role == Role::Weight && whole.ty.shape.rank() == 2;
            let cut = whole.role == Role::State && &*whole.name != HISTORY
                || (matrix && &*whole.name != "model.embed_tokens.weight");
            if cut {
                assert_eq!(part.ty.bytes() * 2, whole.ty.bytes(), "{name}: {}", whole.name);
            }
        }
    }
}

#[test]
fn heads_that_do_not_divide_are_refused_by_the_key_of_the_configuration() {
    let error = |name, ranks| {
        let fixture = Fixture::open(name);
        tensor_parallel(&fixture.config, &MeshAxis::new("tp", ranks)).err().expect("refused").to_string()
    };
    assert_eq!(
        error("gqa8_llama3_rope", 2),
        "tensor parallelism: num_key_value_heads = 1 does not divide over 2 ranks of `tp`; the next number of ranks \
         that works is 1"
    );
    assert_eq!(
        error("mha_untied", 3),
        "tensor parallelism: num_key_value_heads = 4 does not divide over 3 ranks of `tp`; the next number of ranks \
         that works is 2"
    );
}

#[test]
fn a_vocabulary_that_does_not_divide_leaves_the_head_whole() {
    let mut fixture = Fixture::open("mha_untied");
    let head = |fixture: &Fixture| {
        let place = tensor_parallel(&fixture.config, &tp()).expect("divides");
        let args = fixture.model.graph.main().args.iter();
        args.filter(|a| &*a.name == "lm_head.weight").map(place).collect::<Vec<_>>()
    };
    assert_eq!(head(&fixture), [Placement::shard(0)]);
    fixture.config.vocab_size += 1;
    assert_eq!(head(&fixture), [Placement::Replicate]);
}

/// One rank's program.
struct Rank {
    session: Session,
    compiled: Compiled,
    /// Of each kind of step, as devices that record steps want them.
    buckets: Vec<(Bindings, Bucket)>,
}

impl Rank {
    fn new(fixture: &Fixture, local: &Sharded, graph: &Graph, rank: usize, backend: Arc<dyn Backend>) -> Self {
        let mut session = Session::new(backend);
        for ((part, whole), placement) in local.graph.main().args.iter().zip(&graph.main().args).zip(&local.args) {
            if whole.role == Role::Weight {
                let value = share(&fixture.weight(&whole.name).expect("in the checkpoint"), *placement, rank);
                let bytes = WeightData::Owned(value.tensor().to_bytes());
                session.load(&whole.name, &part.ty, vec![bytes]).expect("fits");
            }
        }
        let blocks = Bindings::new().with(symbols::BLOCKS, BLOCKS);
        session.allocate_states(&local.graph, &blocks).expect("fits");
        let compiled = session.compile(&local.graph, &["all_logits"]).unwrap_or_else(|e| panic!("{e}"));
        Self { session, compiled, buckets: Vec::new() }
    }

    fn run(&mut self, inputs: &[(String, Tensor)], bindings: &Bindings) -> Tensor {
        if !self.buckets.iter().any(|(of, _)| of == bindings) {
            let bucket = self.compiled.bucket(bindings).unwrap_or_else(|e| panic!("{e}"));
            self.buckets.push((bindings.clone(), bucket));
        }
        let (_, bucket) = self.buckets.iter_mut().find(|(of, _)| of == bindings).expect("just made");
        for (name, tensor) in inputs {
            bucket.set(name, tensor).expect("fits");
        }
        bucket.submit().expect("runs");
        bucket.wait().expect("completes");
        bucket.tensor("all_logits").expect("asked for")
    }
}

/// Logits of the prompt run in steps of `chunks` on two ranks, each on its own thread.
fn on_two_cpus(fixture: &Fixture, chunks: &[usize]) -> [Tensor; RANKS] {
    let graph = fixture.graph(&["all_logits"]);
    let local = sharded(fixture, &graph);
    let group = Loopback::group(RANKS);
    let rank = |rank: usize| {
        let mesh = HashMap::from([("tp".to_owned(), Arc::clone(&group[rank]))]);
        let cpu = Cpu::new(CpuOptions { threads: Some(1), mesh, ..CpuOptions::default() }).expect("starts");
        let mut rank = Rank::new(fixture, &local, &graph, rank, Arc::new(cpu));
        let mut sequence = [Sequence::new(&fixture.prompt(), &SHUFFLED[0])];
        let logits = chunks.iter().map(|n| {
            let (inputs, bindings) = step(&mut sequence, &[*n]);
            rank.run(&inputs, &bindings)
        });
        let logits = stack(&logits.collect::<Vec<_>>());
        (logits, kv_bytes(&rank.session))
    };
    let all = std::thread::scope(|scope| {
        let threads = [0, 1].map(|r| scope.spawn(move || rank(r)));
        threads.map(|t| t.join().expect("no panic"))
    });
    let whole = kv_bytes(&OnCpu::new(fixture, 1).session);
    all.map(|(logits, bytes)| {
        assert_eq!(bytes * RANKS, whole, "each rank has half of the cache");
        logits
    })
}

/// Bytes of keys and values: the tokens themselves are whole on each rank.
fn kv_bytes(session: &Session) -> usize {
    session.state_bytes() - session.state(HISTORY).expect("every decoder has it").bytes()
}

#[test]
fn logits_of_two_cpus_are_as_near_to_exact_as_those_of_transformers() {
    for name in MODELS {
        let fixture = Fixture::open(name);
        let logits = on_two_cpus(&fixture, &[24]);
        assert_eq!(logits[0], logits[1], "{name}: both ranks");
        let (plain, exact) = (fixture.expected.tensor("logits_f32"), fixture.expected.tensor("logits_f64"));
        let used = judge(name, &logits[0], &plain, &plain_logits(&fixture), &exact);
        println!("{name}: {used:.2} of what is allowed");
    }
}

#[test]
fn on_two_cpus_cached_steps_give_the_bits_of_the_whole_prompt() {
    for name in MODELS {
        let fixture = Fixture::open(name);
        let whole = on_two_cpus(&fixture, &[24]);
        for chunks in [vec![16, 1, 1, 1, 1, 1, 1, 1, 1], vec![5, 5, 5, 5, 4]] {
            assert_eq!(on_two_cpus(&fixture, &chunks), whole, "{name} in steps of {chunks:?}");
        }
    }
}

/// Logits of the prompt on two ranks that are processes: `test` again, of which each writes its logits to a file.
fn on_two_processes(fixture: &Fixture, start: impl FnOnce(&Path) -> Vec<Child>) -> [Tensor; RANKS] {
    let folder = tempfile::tempdir().expect("is made");
    let mut ranks = start(folder.path());
    assert!(ranks.iter_mut().all(|rank| rank.wait().expect("ends").success()), "a rank failed");
    let ty = Tensor::zeros(DType::F32, &[24, fixture.config.vocab_size]);
    [0, 1].map(|rank| {
        let bytes = std::fs::read(folder.path().join(rank.to_string())).expect("is written");
        Tensor { data: ridge_graph::Data::Float(DType::F32.decode(&bytes)), ..ty.clone() }
    })
}

/// Where a rank writes its logits.
const LOGITS: &str = "RIDGE_TEST_LOGITS";

/// What a process does that is one of two ranks: the prompt in steps of `chunks`.
fn be_one_rank(
    name: &str,
    settings: &JoinSettings,
    chunks: &[usize],
    open: impl FnOnce(HashMap<String, Arc<dyn Collectives>>) -> Arc<dyn Backend>,
) {
    let fixture = Fixture::open(MODELS.into_iter().find(|model| *model == name).expect("one of them"));
    let graph = fixture.graph(&["all_logits"]);
    let local = sharded(&fixture, &graph);
    let cluster = Cluster::join(settings).expect("the other comes");
    let backend = open(HashMap::from([("tp".to_owned(), cluster.group())]));
    let mut rank = Rank::new(&fixture, &local, &graph, settings.rank, backend);
    let mut sequence = [Sequence::new(&fixture.prompt(), &SHUFFLED[0])];
    let logits = chunks.iter().map(|n| {
        let (inputs, bindings) = step(&mut sequence, &[*n]);
        rank.run(&inputs, &bindings)
    });
    let logits = stack(&logits.collect::<Vec<_>>());
    std::fs::write(std::env::var(LOGITS).expect("is set"), logits.to_bytes()).expect("is written");
    cluster.leave();
}

#[test]
fn logits_of_two_processes_are_as_near_to_exact_as_those_of_transformers() {
    let test = "llama_parallel::logits_of_two_processes_are_as_near_to_exact_as_those_of_transformers";
    if let Some((name, settings, _)) = processes::rank() {
        return be_one_rank(&name, &settings, &[9, 15], |mesh| {
            Arc::new(Cpu::new(CpuOptions { threads: Some(1), mesh, ..CpuOptions::default() }).expect("starts"))
        });
    }
    for name in ["gqa2_tied", "bf16_sharded"] {
        let fixture = Fixture::open(name);
        let within = on_two_cpus(&fixture, &[24]);
        for transport in [Transport::SharedMemory, Transport::Tcp] {
            let logits = on_two_processes(&fixture, |folder| {
                processes::start(test, name, RANKS, |rank, command| {
                    command.env(LOGITS, folder.join(rank.to_string())).env(TRANSPORT, transport.name());
                })
            });
            assert_eq!(logits[0], logits[1], "{name} over {}: both ranks", transport.name());
            assert_eq!(logits[0], within[0], "{name} over {}: as within one process", transport.name());
            let (plain, exact) = (fixture.expected.tensor("logits_f32"), fixture.expected.tensor("logits_f64"));
            let used = judge(name, &logits[0], &plain, &plain_logits(&fixture), &exact);
            println!("{name} over {}: {used:.2} of what is allowed", transport.name());
        }
    }
}

/// Logits of two GPUs over NCCL, in steps that are captured from the second of a kind on.
pub(crate) fn logits_of_two_gpus_are_as_near_to_exact_as_those_of_transformers(test: &str) {
    if let Some((name, settings, ordinal)) = processes::rank() {
        // Six steps of each kind.
        let chunks = [1, 1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3];
        return be_one_rank(&name, &settings, &chunks, |mesh| {
            Arc::new(Cuda::new(CudaOptions { ordinal, mesh, ..CudaOptions::default() }).expect("the other comes"))
        });
    }
    for name in MODELS {
        let fixture = Fixture::open(name);
        let logits = on_two_processes(&fixture, |folder| {
            processes::start(test, name, RANKS, |rank, command| {
                processes::use_gpu(rank, RANKS, command);
                command.env(LOGITS, folder.join(rank.to_string()));
            })
        });
        assert_eq!(logits[0], logits[1], "{name}: both ranks");
        let (plain, exact) = (fixture.expected.tensor("logits_f32"), fixture.expected.tensor("logits_f64"));
        let used = judge(name, &logits[0], &plain, &plain_logits(&fixture), &exact);
        println!("{name} on two GPUs: {used:.2} of what is allowed");
    }
}

/// Two sequences in one step, with targets.
fn batch(fixture: &Fixture) -> (Vec<(String, Tensor)>, Bindings) {
    let tokens = fixture.prompt();
    let mut sequences = [Sequence::new(&tokens[..13], &SHUFFLED[0]), Sequence::new(&tokens[13..], &SHUFFLED[1])];
    let (mut inputs, bindings) = step(&mut sequences, &[13, 11]);
    let targets = (0..24).map(|i| if i % 11 == 10 { -100 } else { tokens[(i * 7 + 2) % 24] }).collect();
    inputs.push(("targets".into(), Tensor::int(DType::I32, &[24], targets)));
    (inputs, bindings)
}

#[test]
fn gradients_over_two_ranks_are_those_of_one_and_cut_as_their_weights_are() {
    for name in MODELS {
        let fixture = Fixture::open(name);
        let loss = loss_graph(&fixture);
        let weights = float_weights(&loss);
        let graph = gradient(&loss, "loss", &weights).expect("differentiates");
        let place = tensor_parallel(&fixture.config, &tp()).expect("divides");
        let local = shard(&graph, &tp(), &place, &|_| false).unwrap_or_else(|e| panic!("{name}: {e}"));

        let (inputs, bindings) = batch(&fixture);
        let value = |arg: &Arg| match arg.role {
            Role::Weight => fixture.weight(&arg.name),
            Role::State => Some(empty_state(arg, &bindings)),
            _ => find(&inputs, &arg.name).cloned().map(Value::from),
        };
        for (output, got, want) in on_mesh(&graph, &local, &value, &bindings) {
            let off = relative(&got.numbers(), &want.numbers());
            assert!(off < 1e-10, "{name}: {output} is off by {off:e}");
        }
        for (output, placement) in graph.main().outputs.iter().zip(&local.outputs) {
            let Some(weight) = output.name.strip_prefix("grad.") else { continue };
            let wanted = local.args[graph.main().arg_index(weight).expect("a weight")];
            // Whole on every rank: the gradient of a summand, and that of the head, whose logits were gathered for the
            // loss.
            let whole = matches!(wanted, Placement::Partial) || weight == "lm_head.weight";
            let wanted = if whole { Placement::Replicate } else { wanted };
            // Where query heads share keys, whole groups stay together: the multiple may grow.
            let axis = |p: Placement| if let Placement::Shard { dim, .. } = p { Some(dim) } else { None };
            assert_eq!(axis(*placement), axis(wanted), "{name}: {}", output.name);
            assert_ne!(*placement, Placement::Partial, "{name}: {}", output.name);
        }
        // One sum after attention and one after the MLP, forward, and one before each, backward (Shoeybi et al. 2019,
        // figure 3).
        let found = collectives(&local.graph);
        for half in ["decoder_layer_fwd", "decoder_layer_bwd"] {
            assert_eq!(find(&found, half), Some(&vec!["all_reduce"; 2]), "{name}");
        }
    }
}

#[test]
fn training_steps_over_two_ranks_are_those_of_one_with_every_moment_beside_its_weight() {
    // Not `biased`: a bias that is a summand as a weight has no placement yet as a state that is trained.
    for name in ["mha_untied", "gqa2_tied", "odd_head_dim"] {
        let fixture = Fixture::open(name);
        let graph = training_step(&loss_graph(&fixture)).expect("differentiates");
        let place = tensor_parallel(&fixture.config, &tp()).expect("divides");
        let local = shard(&graph, &tp(), &place, &|_| false).unwrap_or_else(|e| panic!("{name}: {e}"));
        for (i, arg) in graph.main().args.iter().enumerate().filter(|(_, a)| a.name.starts_with("adamw.")) {
            let weight = arg.name.splitn(3, '.').nth(2).expect("adamw.m.<weight>");
            assert_eq!(local.args[i], local.args[graph.main().arg_index(weight).expect("a state")], "{}", arg.name);
        }
        let (mut inputs, bindings) = batch(&fixture);
        inputs.push(("lr".into(), Tensor::float(DType::F32, &[], vec![1e-2])));
        let mut states: Vec<(String, Value)> = Vec::new();
        for count in 1..=3 {
            let now = Tensor::float(DType::F32, &[], vec![f64::from(count)]);
            let value = |arg: &Arg| match &*arg.name {
                "step" => Some(now.clone().into()),
                name => find(&states, name)
                    .or(find(&inputs, name).cloned().map(Value::from).as_ref())
                    .cloned()
                    .or_else(|| fixture.weight(name))
                    .or_else(|| (arg.role == Role::State).then(|| empty_state(arg, &bindings))),
            };
            let outputs = on_mesh(&graph, &local, &value, &bindings);
            for (output, got, want) in &outputs {
                let off = relative(&got.numbers(), &want.numbers());
                assert!(off < 1e-9, "{name}: {output} is off by {off:e} in step {count}");
            }
            states = outputs.into_iter().skip(1).map(|(name, got, _)| (name, got.into())).collect();
        }
    }
}
