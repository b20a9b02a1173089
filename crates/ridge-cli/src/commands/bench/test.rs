//! The tests: prompts of a given length, or generation.

/// A test of `ridge bench`.
#[derive(Clone, Copy)]
pub(super) enum BenchTest {
    /// Tokens of a prompt.
    Prompt(usize),
    /// Tokens one at a time.
    Generate(usize),
}

impl BenchTest {
    pub(super) fn tokens(self) -> usize {
        let (Self::Prompt(tokens) | Self::Generate(tokens)) = self;
        tokens
    }

    /// Prompt tokens per sequence: those of the test, or those in the cache before it.
    pub(super) fn prompt(self, depth: usize) -> usize {
        match self {
            Self::Prompt(tokens) => depth + tokens,
            Self::Generate(_) => depth,
        }
    }

    /// Whether its tokens are generated.
    pub(super) fn answers(self) -> bool {
        matches!(self, Self::Generate(_))
    }

    /// Tokens of each step.
    pub(super) fn steps(self, chunk: usize) -> Vec<usize> {
        match self {
            Self::Prompt(tokens) => (0..tokens.div_ceil(chunk)).map(|i| chunk.min(tokens - i * chunk)).collect(),
            Self::Generate(tokens) => vec![1; tokens],
        }
    }

    pub(super) fn name(self, depth: usize) -> String {
        let at = if depth > 0 { format!(" @ d{depth}") } else { String::new() };
        match self {
            Self::Prompt(tokens) => format!("pp{tokens}{at}"),
            Self::Generate(tokens) => format!("tg{tokens}{at}"),
        }
    }
}
