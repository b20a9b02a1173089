//! Evaluation of a model from token probabilities: perplexity and multiple choice.
//!
//! The caller decides what the first token is predicted from: texts are given as tokens, including the begin token if the model
//! uses one ([`beginning`]).

use ridge_text::Tokenizer;

use crate::error::Result;
use crate::scoring::Question;

/// The tokens that the tokenizer puts before a text: mostly the begin token, or none.
///
/// # Errors
/// When the tokenizer fails.
pub fn beginning(tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let mut added = tokenizer.encode("", true)?;
    // Of nothing it makes all that it adds, the token that ends a text included.
    added.retain(|id| Some(*id) != tokenizer.eos() || tokenizer.eos() == tokenizer.bos());
    Ok(added)
}

/// A text in windows: tokens `context` and then `scored` of it, each a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// What the scored tokens follow; not empty.
    pub context: std::ops::Range<usize>,
    /// What is predicted.
    pub scored: std::ops::Range<usize>,
}

/// Windows of `window` tokens of a text of `tokens`, one every `stride`, up to the first that reaches the end. Of each,
/// the tokens that no window before it had are scored, but never a window's first token, which nothing precedes: so a
/// stride of `window` leaves out a token a window, and each less than that scores every token but the text's first.
///
/// The procedure of the Hugging Face guide "Perplexity of fixed-length models". `window` is at least 2, `stride` from 1
/// to `window`.
pub fn sliding_windows(tokens: usize, window: usize, stride: usize) -> Vec<Window> {
    let mut windows = Vec::new();
    let (mut begin, mut covered) = (0, 0);
    while covered < tokens {
        let end = (begin + window).min(tokens);
        let first = covered.max(begin + 1);
        if first < end {
            windows.push(Window { context: begin..first, scored: first..end });
        }
        covered = end;
        begin += stride;
    }
    windows
}

/// The windows of lm-evaluation-harness's `loglikelihood_rolling` for a model that reads `context` tokens at most: every
/// token but the first is scored once, `context` of them at a time, and the last window goes back to be as long as the
/// others. The first of `tokens` is the harness's prefix token.
pub fn rolling_windows(tokens: usize, context: usize) -> Vec<Window> {
    let mut windows = Vec::new();
    let mut first = 1;
    while first < tokens {
        let end = (first + context).min(tokens);
        let begin = if first == 1 { 0 } else { end - 1 - context };
        windows.push(Window { context: begin..first, scored: first..end });
        first = end;
    }
    windows
}

/// Windows as questions about `tokens`.
pub fn questions<'a>(tokens: &'a [u32], windows: &[Window]) -> Vec<Question<'a>> {
    let question =
        |w: &Window| Question { context: &tokens[w.context.clone()], continuations: vec![&tokens[w.scored.clone()]] };
    windows.iter().map(question).collect()
}

/// What a model makes of a text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Perplexity {
    /// Tokens that were predicted.
    pub tokens: usize,
    /// Sum of the natural logarithms of their probabilities.
    pub log_likelihood: f64,
    /// Mean of their negative logarithms, in nats a token.
    pub nll: f64,
    /// Standard error of that mean, tokens taken as independent.
    pub nll_stderr: f64,
    /// `exp(nll)`.
    pub perplexity: f64,
    /// By the delta method: `perplexity * nll_stderr`.
    pub perplexity_stderr: f64,
    /// Negative log likelihood in bits, for each byte of the text.
    pub bits_per_byte: f64,
}

impl Perplexity {
    /// Of these log-probabilities of the tokens of a text of `bytes` bytes; `None` without any.
    pub fn new(scores: impl IntoIterator<Item = f32>, bytes: usize) -> Option<Self> {
        let scores: Vec<f64> = scores.into_iter().map(f64::from).collect();
        if scores.is_empty() {
            return None;
        }
        let log_likelihood: f64 = scores.iter().sum();
        let nll = -log_likelihood / scores.len() as f64;
        let nll_stderr = mean_stderr(scores.iter().map(|s| -s));
        let perplexity = nll.exp();
        Some(Self {
            tokens: scores.len(),
            log_likelihood,
            nll,
            nll_stderr,
            perplexity,
            perplexity_stderr: perplexity * nll_stderr,
            bits_per_byte: -log_likelihood / std::f64::consts::LN_2 / bytes as f64,
        })
    }
}

/// Standard error of the mean: the sample's standard deviation (over n - 1) by the root of n; 0 for one value.
pub fn mean_stderr(values: impl IntoIterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.into_iter().collect();
    let n = values.len() as f64;
    if values.len() < 2 {
        return 0.0;
    }
    let mean = values.iter().sum::<f64>() / n;
    let squares: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
    (squares / (n - 1.0) / n).sqrt()
}

/// A question with its answers as tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// What the answers follow.
    pub context: Vec<u32>,
    /// One for each answer.
    pub continuations: Vec<Vec<u32>>,
}

/// Tokens of `context` and of each continuation behind it, as lm-evaluation-harness makes them: both are encoded as one
/// text, which is split after as many tokens as the context has alone. White space that ends the context goes to the
/// continuation. `begin` is put before the text; without any, an empty context is the token `end`.
///
/// # Errors
/// When the tokenizer fails.
pub fn encode_choices(
    tokenizer: &Tokenizer,
    context: &str,
    continuations: &[String],
    begin: &[u32],
    end: Option<u32>,
) -> Result<Encoded> {
    let trimmed = context.trim_end();
    let mut tokens = begin.to_vec();
    let alone = tokenizer.encode(trimmed, false)?;
    tokens.extend(&alone);
    if tokens.is_empty() {
        tokens.extend(end);
    }
    let continuation = |text: &String| {
        let whole = tokenizer.encode(&format!("{context}{text}"), false)?;
        Ok(whole.into_iter().skip(alone.len()).collect())
    };
    Ok(Encoded { context: tokens, continuations: continuations.iter().map(continuation).collect::<Result<_>>()? })
}

/// The largest, the first of equals.
pub fn most_likely(values: &[f64]) -> usize {
    (1..values.len()).fold(0, |best, i| if values[i] > values[best] { i } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scored(windows: &[Window]) -> Vec<usize> {
        windows.iter().flat_map(|w| w.scored.clone()).collect()
    }

    #[test]
    fn every_token_but_the_first_is_scored_once() {
        for tokens in 2..60 {
            for window in 2..20 {
                for stride in 1..window {
                    let windows = sliding_windows(tokens, window, stride);
                    assert_eq!(scored(&windows), (1..tokens).collect::<Vec<_>>(), "{tokens} {window} {stride}");
                    assert!(windows.iter().all(|w| w.scored.end - w.context.start <= window));
                }
                let windows = rolling_windows(tokens, window);
                assert_eq!(scored(&windows), (1..tokens).collect::<Vec<_>>(), "{tokens} {window}");
                assert!(windows.iter().all(|w| w.scored.end - w.context.start <= window + 1));
            }
        }
    }

    #[test]
    fn windows_that_do_not_overlap_leave_out_their_first_tokens() {
        assert_eq!(scored(&sliding_windows(9, 4, 4)), [1, 2, 3, 5, 6, 7]);
    }

    #[test]
    fn the_last_rolling_window_is_as_long_as_the_others() {
        let windows = rolling_windows(11, 4);
        assert_eq!(windows[0], Window { context: 0..1, scored: 1..5 });
        assert_eq!(windows[2], Window { context: 6..9, scored: 9..11 });
    }

    #[test]
    fn standard_errors_are_those_of_a_sample() {
        assert!((mean_stderr([1.0, 0.0, 1.0, 1.0]) - 0.25).abs() < 1e-15);
        assert_eq!(mean_stderr([3.0]), 0.0);
    }
}
