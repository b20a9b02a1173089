//! A ledger: entries with their formulas, and their sum.

use ridge_hw::units::Bytes;
use serde::Serialize;

/// One line of a ledger.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LedgerEntry {
    /// What is held.
    pub what: &'static str,
    /// How much.
    pub bytes: Bytes,
    /// How that was found.
    pub formula: String,
}

/// What a rank holds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Ledger {
    /// The entries.
    pub entries: Vec<LedgerEntry>,
}

impl Ledger {
    pub(super) fn add(&mut self, what: &'static str, bytes: f64, formula: impl Into<String>) {
        self.entries.push(LedgerEntry { what, bytes: Bytes(bytes.max(0.0).round() as u64), formula: formula.into() });
    }

    /// The sum.
    pub fn total(&self) -> Bytes {
        self.entries.iter().map(|e| e.bytes).sum()
    }

    /// The entry called `what`, 0 if there is none.
    pub fn of(&self, what: &str) -> Bytes {
        self.entries.iter().find(|e| e.what == what).map_or(Bytes(0), |e| e.bytes)
    }
}
