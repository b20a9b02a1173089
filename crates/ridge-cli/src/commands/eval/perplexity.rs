//! `ridge eval --perplexity`.

use std::path::Path;

use ridge_engine::evaluate::{Perplexity, questions, rolling_windows, sliding_windows};
use serde_json::json;

use super::args::{EvalSettings, WindowKind};
use super::scoring::{EvalModel, show, unusable};
use crate::error::{Result, refused};
use crate::input;
use crate::output::{columns, count, grouped};

/// The window where neither the user nor the model says a shorter one.
const CONTEXT: usize = 2048;

pub(super) fn run(settings: &EvalSettings, opened: &EvalModel, file: &Path, windows: WindowKind) -> Result<()> {
    let context = settings.context.unwrap_or(CONTEXT.min(opened.config.max_context()));
    let stride = match windows {
        WindowKind::Sliding(stride) => stride.unwrap_or((context / 2).max(1)),
        WindowKind::Rolling => context,
    };
    if stride > context {
        let why = format!("is more than the window of {context}: tokens between windows would be left out");
        return Err(refused("--stride", stride, &why));
    }
    if matches!(windows, WindowKind::Sliding(_)) && context < 2 {
        return Err(refused(
            "--context",
            context,
            "a window needs two tokens: one to predict, and one to predict it from",
        ));
    }
    let text = input::file(file)?;
    if text.is_empty() {
        return Err(unusable(file.display(), "is empty; give a file with a text"));
    }
    let mut tokens = opened.begin.clone();
    if tokens.is_empty() && matches!(windows, WindowKind::Rolling) {
        // The harness predicts the first token, too, from the token that ends a text where none begins one.
        tokens.extend(opened.tokenizer.bos().or(opened.tokenizer.eos()));
    }
    tokens.extend(opened.tokenizer.encode(&text, false)?);
    let windows = match windows {
        WindowKind::Sliding(_) => sliding_windows(tokens.len(), context, stride),
        WindowKind::Rolling => rolling_windows(tokens.len(), context),
    };
    if windows.is_empty() {
        let problem =
            format!("has {} only, and none to predict it from; give a longer text", count(tokens.len(), "token"));
        return Err(unusable(file.display(), problem));
    }
    let scored = opened.score(settings, &questions(&tokens, &windows))?;
    let scores = scored.scores.iter().flatten().flatten().copied();
    let Some(result) = Perplexity::new(scores, text.len()) else {
        return Err(unusable(file.display(), "has no token to predict"));
    };
    let what = format!(
        "{}, {} ({} predicted), in {} of {context}, one every {stride}",
        count(text.len(), "byte"),
        count(tokens.len(), "token"),
        grouped(result.tokens as u64),
        count(windows.len(), "window")
    );
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let table = columns(&[
        row("perplexity", format!("{:.6} ± {:.6}", result.perplexity, result.perplexity_stderr)),
        row("nats a token", format!("{:.6} ± {:.6}", result.nll, result.nll_stderr)),
        row("bits a byte", format!("{:.6}", result.bits_per_byte)),
    ]);
    let object = json!({
        "bytes": text.len(),
        "tokens": tokens.len(),
        "predicted_tokens": result.tokens,
        "windows": windows.len(),
        "log_likelihood": result.log_likelihood,
        "nll": result.nll,
        "nll_stderr": result.nll_stderr,
        "perplexity": result.perplexity,
        "perplexity_stderr": result.perplexity_stderr,
        "bits_per_byte": result.bits_per_byte,
        "settings": { "context": context, "stride": stride },
    });
    show(settings, opened, file, &scored, (format!("{}: {what}\n{table}", file.display()), object))
}
