//! What a server says of itself while it is under load, by its Prometheus metrics: those of vLLM's names, under any prefix.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::client::Client;

/// How often the server is asked.
const EVERY: Duration = Duration::from_millis(500);

/// What a run took of the server.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ServerUsage {
    /// Seconds that requests waited for their first step, of all together.
    pub queue: f64,
    /// From their first steps to their first tokens.
    pub prefill: f64,
    /// From their first tokens to their last.
    pub decode: f64,
    /// Answers that gave their cache blocks to others.
    pub preemptions: f64,
    /// The largest share of the cache in use that was seen, 0 to 1.
    pub cache: f64,
    /// The most requests that were seen to wait.
    pub waiting: f64,
}

impl ServerUsage {
    /// As JSON, times in seconds.
    pub(super) fn object(&self) -> Value {
        let Self { queue, prefill, decode, preemptions, cache, waiting } = self;
        json!({
            "queue_seconds": queue, "prefill_seconds": prefill, "decode_seconds": decode, "preemptions": preemptions,
            "most_of_cache": cache, "most_waiting": waiting,
        })
    }
}

/// The values of a metrics text; `None` if it has none that are known.
fn read(text: &str) -> Option<ServerUsage> {
    let mut usage = ServerUsage::default();
    let mut any = false;
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let Some((series, value)) = line.rsplit_once(' ') else { continue };
        let name = series.split('{').next().unwrap_or_default();
        let name = name.split_once(':').map_or(name, |(_, name)| name);
        let Ok(value) = value.parse::<f64>() else { continue };
        let place = match name {
            "request_queue_time_seconds_sum" => &mut usage.queue,
            "request_prefill_time_seconds_sum" => &mut usage.prefill,
            "request_decode_time_seconds_sum" => &mut usage.decode,
            "num_preemptions_total" => &mut usage.preemptions,
            "kv_cache_usage_perc" | "gpu_cache_usage_perc" => {
                (usage.cache, any) = (usage.cache.max(value), true);
                continue;
            }
            "num_requests_waiting" => &mut usage.waiting,
            _ => continue,
        };
        // A series for each model, or each rank.
        *place += value;
        any = true;
    }
    any.then_some(usage)
}

/// Asks the server until `over`, and once more then: what came of the run; `None` if it has no such metrics.
pub(super) async fn watch(client: Client, mut over: oneshot::Receiver<()>) -> Option<ServerUsage> {
    let now = async || client.metrics().await.and_then(|text| read(&text));
    let before = now().await?;
    let (mut cache, mut waiting) = (before.cache, before.waiting);
    loop {
        let ended = tokio::select! {
            _ = &mut over => true,
            () = tokio::time::sleep(EVERY) => false,
        };
        // An answer that is missed is no reason to stop.
        let Some(seen) = now().await else {
            if ended {
                return None;
            }
            continue;
        };
        (cache, waiting) = (cache.max(seen.cache), waiting.max(seen.waiting));
        if ended {
            return Some(ServerUsage {
                queue: seen.queue - before.queue,
                prefill: seen.prefill - before.prefill,
                decode: seen.decode - before.decode,
                preemptions: seen.preemptions - before.preemptions,
                cache,
                waiting,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_of_any_prefix_are_read_and_summed() {
        let text = "vllm:kv_cache_usage_perc{engine=\"0\"} 0.75\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.5\n# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{engine=\"0\"} 2.0\n\
                    vllm:num_requests_waiting{engine=\"1\"} 3.0\nridge:request_queue_time_seconds_sum{model_name=\"a b\"} 1.5\n\
                    other 7\nbroken\n";
        let usage = read(text).unwrap();
        assert_eq!((usage.waiting, usage.queue, usage.cache), (5.0, 1.5, 0.75));
        assert_eq!(read("python_gc_objects 3\n"), None);
    }
}
