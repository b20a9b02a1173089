//! What proposes draft tokens.

use ridge_engine::MAX_CANDIDATES;

use crate::error::{Result, refused};

/// What proposes draft tokens, and how many of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Speculate {
    /// Nothing.
    Off,
    /// What followed an earlier occurrence of the last tokens.
    Lookup(usize),
    /// The model's own prediction module.
    Module(usize),
}

/// The name of the model's module.
const MODULE: &str = "mtp";

impl Speculate {
    /// Tokens that the model's module drafts, for a command that has no other drafts.
    ///
    /// # Errors
    /// When tokens are to be found earlier in the sequence.
    pub(crate) fn by_module(self) -> Result<usize> {
        let why = "proposes tokens by lookup, which `ridge serve` does; use mtp";
        match self {
            Self::Lookup(candidates) => Err(refused("--speculate", candidates, why)),
            Self::Off | Self::Module(_) => Ok(self.drafts()),
        }
    }

    /// Tokens that the model's module drafts.
    pub(crate) fn drafts(self) -> usize {
        match self {
            Self::Module(drafts) => drafts,
            Self::Off | Self::Lookup(_) => 0,
        }
    }
}

/// Parses `N`, `mtp` or `mtp:N`.
pub(crate) fn speculate(typed: &str) -> std::result::Result<Speculate, String> {
    let count = |typed: &str| typed.parse().ok().filter(|count| *count <= MAX_CANDIDATES);
    let parsed = match typed.strip_prefix(MODULE) {
        Some("") => Some(Speculate::Module(1)),
        Some(rest) => rest.strip_prefix(':').and_then(count).filter(|n| *n > 0).map(Speculate::Module),
        None => count(typed).map(|n| if n == 0 { Speculate::Off } else { Speculate::Lookup(n) }),
    };
    parsed.ok_or_else(|| {
        format!("must be a whole number from 0 to {MAX_CANDIDATES}, {MODULE}, or {MODULE}:N with N from 1 to {MAX_CANDIDATES}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_of_lookup_and_a_name_of_the_module() {
        let read = |typed| speculate(typed).ok();
        assert_eq!(read("0"), Some(Speculate::Off));
        assert_eq!(read("4"), Some(Speculate::Lookup(4)));
        assert_eq!(read("mtp"), Some(Speculate::Module(1)));
        assert_eq!(read("mtp:3"), Some(Speculate::Module(3)));
        for wrong in ["17", "-1", "mtp:0", "mtp:17", "mtp3", "mtp:", "eagle", ""] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }
}
