//! What a load generator sees: clients in a closed loop, each of which asks again when its answer has ended.
//!
//! All clients begin at once, so first tokens of the first round wait for all prompts before them; in later rounds
//! requests come one by one. Clients beyond what the cache holds wait for a place. What a serving program adds to each
//! request, and in how many rounds a benchmark of it goes, are data (`software.toml`).

use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use super::point::HOST;
use super::{Point, ServeLayout, Traffic, aggregated};
use crate::efficiency::Machine;
use crate::reading::Reading;

/// A serving program as it was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Software {
    /// Its name.
    pub name: String,
    /// Its version; empty where none was told.
    pub version: String,
    /// Milliseconds of each step that its host does not hide.
    pub step_ms: f64,
    /// Milliseconds that it adds to the first token of a request.
    pub request_ms: f64,
    /// Requests of a client: the first finds all others waiting.
    pub rounds: f64,
}

#[derive(Deserialize)]
struct Table {
    software: Vec<Software>,
}

static TABLE: LazyLock<Vec<Software>> = LazyLock::new(|| {
    let table: Table =
        toml::from_str(include_str!("software.toml")).expect("the embedded table parses, as a test shows");
    table.software
});

impl Software {
    /// The program of this name and version; without its version, the one of the table that tells none, or the first.
    pub fn find(name: &str, version: &str) -> Option<&'static Self> {
        let of = |version: &str| TABLE.iter().find(|s| s.name == name && s.version == version);
        of(version).or_else(|| of("")).or_else(|| TABLE.iter().find(|s| s.name == name))
    }
}

/// What `clients.batch` clients of each replica of attention see when `places` sequences fit at once.
pub fn benchmark(
    reading: &Reading,
    m: &Machine,
    l: &ServeLayout,
    clients: &Traffic,
    places: usize,
    software: &Software,
) -> Point {
    let n = clients.batch.min(places.max(1));
    let point = aggregated(reading, m, l, &Traffic { batch: n, ..*clients });
    let host = software.step_ms * 1e-3 - HOST;
    let (tpot, decode_step, prefill) = (point.tpot + host, point.decode_step + host, point.prefill + host);
    let first_round = prefill * (n as f64 + 1.0) / 2.0 + decode_step;
    let later = point.ttft + 2.0 * host;
    let served = software.request_ms * 1e-3 + later + (first_round - later).max(0.0) / software.rounds;
    let held = served + tpot * (clients.answer as f64 - 1.0);
    let ttft = served + (clients.batch - n) as f64 / n as f64 * held;
    let requests_per_second = (clients.batch * l.attention_dp) as f64 / (ttft + held - served);
    let tokens_per_second = requests_per_second * clients.answer as f64;
    Point { ttft, tpot, tokens_per_second, requests_per_second, decode_step, prefill, ..point }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_parses_and_an_unknown_version_is_taken_for_a_known_one() {
        assert!(TABLE.iter().all(|s| s.rounds >= 1.0 && (0.0..2000.0).contains(&s.request_ms)));
        assert!(Software::find("vllm", "99").is_some_and(|s| s.version.is_empty()));
        assert!(Software::find("unknown", "").is_none());
    }
}
