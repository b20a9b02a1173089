//! The GPU to test on, if there is one.
#![allow(dead_code, unreachable_pub)] // each test binary uses its part

use std::sync::Arc;

use ridge_cuda::{Cuda, CudaOptions};
use ridge_runtime::Backend;

/// A GPU with poisoned memory. Without one, reports the running test as skipped and gives `None`, or panics where
/// `RIDGE_GPU_TESTS` is `required`.
pub fn gpu() -> Option<Arc<dyn Backend>> {
    opened(CudaOptions { poison: true, ..CudaOptions::default() })
}

/// The same, where a row has the same bits whatever is computed beside it.
pub fn deterministic_gpu() -> Option<Arc<dyn Backend>> {
    opened(CudaOptions { poison: true, deterministic: true, ..CudaOptions::default() })
}

/// The same as [`gpu`], where attention of prompts rounds queries to int8 over a cache of int8. Without a GPU that does, reports the test
/// as skipped.
pub fn int8_gpu() -> Option<Arc<dyn Backend>> {
    opened(CudaOptions { poison: true, int8_attention: true, ..CudaOptions::default() })
}

fn opened(options: CudaOptions) -> Option<Arc<dyn Backend>> {
    match Cuda::new(options) {
        Ok(cuda) => Some(Arc::new(cuda)),
        Err(why) if std::env::var_os("RIDGE_GPU_TESTS").is_some_and(|v| v == "required") => panic!("no GPU: {why}"),
        Err(why) => {
            ridge_testing::report_skipped(format_args!("no GPU: {why}"));
            None
        }
    }
}
