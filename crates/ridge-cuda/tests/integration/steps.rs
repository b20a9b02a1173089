//! Several steps in flight.

use std::sync::Arc;

use ridge_cuda::{Cuda, CudaOptions};
use ridge_runtime::Backend;
use ridge_runtime::late::Late;

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
