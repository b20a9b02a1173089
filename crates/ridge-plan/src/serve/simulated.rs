//! One point of a server whose prompts and answers share the same GPUs, as clients see it.

use super::benchmark::{ClosedLoop, benchmark};
use super::point::{OperatingPoint, ServeLayout, Traffic, decode_step, prefill};
use super::software::Software;
use crate::efficiency::Machine;
use crate::reading::Reading;

/// Tokens that a step takes at most.
const STEP_TOKENS: usize = 8192;
/// Chunks of prompts that are played at most, so that long prompts take no longer.
const CHUNKS: usize = 20_000;

/// Prompts and answers on the same GPUs: latencies and throughput of clients who begin at once and ask again when they
/// are answered ([`benchmark`]), so that prompts bound the throughput too. The cache of a replica of attention holds
/// `cache_tokens`.
pub fn simulated(
    reading: &Reading,
    m: &Machine,
    l: &ServeLayout,
    t: &Traffic,
    (cache_tokens, software): (f64, &Software),
) -> OperatingPoint {
    let clients = t.batch * l.attention_dp;
    let rounds = (CHUNKS / (clients * t.prompt.div_ceil(STEP_TOKENS)).max(1)).clamp(2, software.rounds.max(2));
    let load = ClosedLoop {
        traffic: *t,
        shortest: 1.0,
        rounds,
        step_tokens: STEP_TOKENS.max(clients + 1),
        cache_tokens,
        hold: None,
    };
    let seen = benchmark(reading, m, l, &load, software);
    OperatingPoint {
        ttft: seen.ttft,
        tpot: seen.tpot,
        tokens_per_second: seen.tokens_per_second,
        requests_per_second: seen.tokens_per_second / t.answer as f64,
        gpus: l.gpus(),
        decode_step: decode_step(reading, m, l, t.batch, t.prompt + t.answer / 2),
        prefill: prefill(reading, m, l, t.prompt),
    }
}
