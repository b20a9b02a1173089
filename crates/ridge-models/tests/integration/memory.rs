//! The memory ledger: what is predicted for the tiny Llama, to serve and to train, is what its backend then allocates, to
//! the byte and by owner.

use std::sync::Arc;

use crate::common::{Fixture, Sequence, loss_graph, step, training_step};
use ridge_cpu::{Cpu, CpuOptions};
use ridge_cuda::{Cuda, CudaOptions};
use ridge_graph::{Bindings, DType, Graph, Role, Tensor};
use ridge_runtime::{Backend, Bucket, Compiled, MemoryBytes, MemoryOwner, Session, WeightData, component_offsets};

/// Bytes of the arguments of `role` as the backend pads them.
fn argument_bytes(backend: &dyn Backend, graph: &Graph, role: Role, bindings: &Bindings) -> usize {
    let bytes = |ty| backend.padded_bytes(component_offsets(ty, bindings).expect("bound").1);
    graph.args(role).map(|arg| bytes(&arg.ty)).sum()
}

fn session(backend: &Arc<dyn Backend>, fixture: &Fixture, graph: &Graph, bindings: &Bindings) -> Session {
    let mut session = Session::new(Arc::clone(backend));
    for arg in graph.args(Role::Weight) {
        let value = fixture.weight(&arg.name).expect("in the checkpoint");
        session.load(&arg.name, &arg.ty, vec![WeightData::Owned(value.tensor().to_bytes())]).expect("fits");
    }
    session.allocate_states(graph, bindings).expect("fits");
    session
}

/// Steps of these numbers of tokens.
fn bindings(tokens: usize) -> Bindings {
    let ids: Vec<i64> = (0..tokens as i64).collect();
    step(&mut [Sequence::new(&ids, &[0, 1, 2, 3])], &[tokens]).1
}

/// Owners that grow at their own pace: threads when kernels run, the others when products are timed or weights pass.
const NOT_OF_BUCKETS: [MemoryOwner; 3] = [MemoryOwner::Threads, MemoryOwner::Upload, MemoryOwner::Tuning];

#[track_caller]
fn assert_counted(backend: &dyn Backend, predicted: &MemoryBytes, when: &str) {
    let live = backend.memory().live;
    for owner in MemoryOwner::ALL.into_iter().filter(|owner| !NOT_OF_BUCKETS.contains(owner)) {
        // What a library takes, it takes when the first product asks for it, if there is such a library.
        if owner == MemoryOwner::Library && live.get(owner) == 0 {
            continue;
        }
        assert_eq!(live.get(owner), predicted.get(owner), "{when}: {owner} (counted, then predicted)");
    }
}

fn holds(backend: &Arc<dyn Backend>) {
    let before = backend.memory().live;
    let fixture = Fixture::open("gqa2_tied");
    let serving = fixture.graph(&["all_logits"]);
    let training = training_step(&loss_graph(&fixture)).expect("differentiates");
    let mut predicted = before;
    let mut held: Vec<(Session, Compiled, Vec<Bucket>)> = Vec::new();
    for (what, graph) in [("serving", &serving), ("training", &training)] {
        let largest = bindings(17);
        predicted = predicted
            .with(MemoryOwner::Weights, argument_bytes(&**backend, graph, Role::Weight, &Bindings::new()))
            .with(MemoryOwner::States, argument_bytes(&**backend, graph, Role::State, &largest));
        let session = session(backend, &fixture, graph, &largest);
        assert_counted(&**backend, &predicted, what);
        let outputs: Vec<&str> =
            graph.main().outputs.iter().filter(|o| o.role == Role::Data).map(|o| &*o.name).collect();
        let compiled = session.compile(graph, &outputs).expect("compiles");
        let mut buckets = Vec::new();
        for tokens in [1, 3, 17, 8] {
            let bindings = bindings(tokens);
            let bucket_bytes = compiled.memory(&bindings).expect("bound");
            predicted = predicted.and_bucket(&bucket_bytes);
            let bucket = compiled.bucket(&bindings).expect("binds");
            let own = MemoryOwner::ALL.into_iter().filter(|owner| owner.is_per_bucket());
            own.for_each(|owner| assert_eq!(bucket.memory().get(owner), bucket_bytes.get(owner), "{owner}"));
            buckets.push(bucket);
            assert_counted(&**backend, &predicted, &format!("{what} of {tokens} tokens"));
        }
        held.push((session, compiled, buckets));
    }
    // Running allocates nothing but the working memory of threads.
    let (.., buckets) = &mut held[0];
    for bucket in buckets {
        bucket.submit().expect("runs");
        bucket.wait().expect("runs");
    }
    assert_counted(&**backend, &predicted, "after steps");
    assert!(backend.memory().peak.get(MemoryOwner::Workspace) >= predicted.get(MemoryOwner::Workspace));
    // All but what buckets share goes with them.
    drop(held);
    let left = backend.memory().live;
    for owner in [MemoryOwner::Weights, MemoryOwner::States, MemoryOwner::Inputs, MemoryOwner::Outputs] {
        assert_eq!(left.get(owner), before.get(owner), "{owner} is freed");
    }
}

#[test]
fn what_is_predicted_is_what_the_cpu_allocates() {
    for threads in [1, 3] {
        let cpu = Cpu::new(CpuOptions { threads: Some(threads), ..CpuOptions::default() }).expect("starts");
        holds(&(Arc::new(cpu) as Arc<dyn Backend>));
    }
}

#[test]
fn what_is_predicted_is_what_a_gpu_allocates() {
    match Cuda::new(CudaOptions::default()) {
        Ok(cuda) => {
            let free = cuda.free_memory().expect("a GPU");
            let backend = Arc::new(cuda);
            holds(&(Arc::clone(&backend) as Arc<dyn Backend>));
            // What the driver keeps for itself is bounded: code, graphs and the rounding of allocations.
            let left = free.saturating_sub(backend.free_memory().expect("a GPU"));
            let counted = backend.memory().live.on_device();
            assert!(left < counted + (512 << 20), "{left} bytes are gone, {counted} of them counted");
        }
        Err(why) => ridge_testing::skip!("no GPU: {why}"),
    }
}

#[test]
fn weights_of_a_mapped_file_count_only_where_they_are_copied() {
    let cpu = Arc::new(Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).expect("starts"));
    let ty = ridge_graph::Type::tensor(DType::F32, [1 << 18]);
    let bytes = Tensor::zeros(DType::F32, &[1 << 18]).to_bytes();
    let weights = |cpu: &Cpu| cpu.memory().live.get(MemoryOwner::Weights);
    let owned = cpu.upload(&ty, vec![WeightData::Owned(bytes.clone())]).expect("fits");
    assert_eq!(weights(&cpu), cpu.padded_bytes(4 << 18));
    let range = 0..bytes.len();
    let file: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new(bytes);
    let shared = cpu.upload(&ty, vec![WeightData::Shared(file, range)]).expect("fits");
    assert_eq!(weights(&cpu), cpu.padded_bytes(4 << 18), "it stays in the file");
    drop((owned, shared));
    assert_eq!(weights(&cpu), 0);
}
