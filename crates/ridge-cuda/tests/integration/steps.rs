//! Several steps in flight.

use std::sync::Arc;

use ridge_cuda::{Cuda, CudaOptions};
use ridge_graph::{DType, Type};
use ridge_runtime::late::Late;
use ridge_runtime::{Backend, MemoryOwner, Session, WeightData};

use crate::common::gpu;
use crate::in_flight;

#[test]
fn steps_in_flight_keep_their_promises() {
    let Some(poisoned) = gpu() else { return };
    in_flight::holds(&poisoned);
    // As served: captured, and with nothing poisoned.
    let captured: Arc<dyn Backend> = Arc::new(Cuda::new(CudaOptions::default()).expect("a GPU"));
    in_flight::holds(&captured);
}

#[test]
fn steps_in_flight_keep_their_promises_however_late_they_complete() {
    let Some(gpu) = gpu() else { return };
    let late: Arc<dyn Backend> = Arc::new(Late::new(gpu, 2));
    in_flight::holds(&late);
}

#[test]
fn weights_in_memory_of_the_host_give_the_same_bits() {
    let Some(poisoned) = gpu() else { return };
    crate::host_weights::hold(&poisoned);
    let captured: Arc<dyn Backend> = Arc::new(Cuda::new(CudaOptions::default()).expect("a GPU"));
    crate::host_weights::hold(&captured);
}

#[test]
fn weights_in_memory_of_the_host_take_none_of_the_gpu() {
    let Some(gpu) = gpu() else { return };
    let mut session = Session::new(Arc::clone(&gpu));
    let ty = Type::tensor(DType::BF16, [300, 50]);
    let bytes: Vec<u8> = (0..30_000).map(|i| (i % 251) as u8).collect();
    session.keep_on_host(["kept", "random"]);
    let before = gpu.memory().live.get(MemoryOwner::Weights);
    session.load("kept", &ty, vec![WeightData::Owned(bytes.clone())]).expect("fits");
    assert!(session.load_random("random", &ty, 7, 0.02).expect("fits"));
    session.load_random("other", &ty, 7, 0.02).expect("fits");
    let live = gpu.memory().live;
    assert_eq!((live.get(MemoryOwner::HostWeights), live.get(MemoryOwner::Weights)), (60_000, before + 30_000));
    let read = |name: &str| gpu.read(&session.state(name).expect("loaded")).expect("reads");
    assert_eq!(read("kept"), bytes);
    assert_eq!(read("random"), read("other"));
    // Loaded again, in place.
    let buffer = session.state("kept").expect("loaded");
    gpu.write(&buffer, &bytes[1..]).expect("writes");
    assert_eq!(read("kept")[..29_999], bytes[1..]);
    let link = gpu.host_link().expect("measures").expect("a GPU has a link to the host");
    assert!((1e9..1e12).contains(&link), "{link} bytes a second");
}
