//! What serving programs add to a step and a request, as data (`software.toml`).

use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

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
    /// Requests of a client in the benchmark that measured it, where its scripts are not public: the first finds all others
    /// waiting.
    pub rounds: usize,
    /// Does it keep room for a whole answer before it takes a prompt in? If not, it takes prompts back when room ends.
    pub reserves: bool,
}

#[derive(Deserialize)]
struct SoftwareTable {
    software: Vec<Software>,
}

static TABLE: LazyLock<Vec<Software>> = LazyLock::new(|| {
    let table: SoftwareTable =
        toml::from_str(include_str!("software.toml")).expect("the embedded table parses, as a test shows");
    table.software
});

impl Software {
    /// The names of the programs of the table, in its order.
    pub fn names() -> Vec<&'static str> {
        let mut names: Vec<&str> = TABLE.iter().map(|s| s.name.as_str()).collect();
        names.dedup();
        names
    }

    /// The program of this name and version; without its version, the one of the table that tells none, or the first.
    pub fn find(name: &str, version: &str) -> Option<&'static Self> {
        let of = |version: &str| TABLE.iter().find(|s| s.name == name && s.version == version);
        of(version).or_else(|| of("")).or_else(|| TABLE.iter().find(|s| s.name == name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_parses_and_an_unknown_version_is_taken_for_a_known_one() {
        assert!(TABLE.iter().all(|s| s.rounds >= 1 && (0.0..2000.0).contains(&s.request_ms)));
        assert!(Software::find("vllm", "99").is_some_and(|s| s.version.is_empty()));
        assert!(Software::find("unknown", "").is_none());
    }
}
