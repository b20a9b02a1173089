//! Any bytes as a trace. Whatever is accepted divides its time without rest.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ridge_plan::diagnose::diagnose;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(found) = diagnose(bytes, None) {
        let m = found.measured;
        let sum = m.matmul + m.attention + m.other + m.copies + m.communication + m.idle;
        assert!((sum - 1.0).abs() < 1e-3, "{m:?}");
    }
});
