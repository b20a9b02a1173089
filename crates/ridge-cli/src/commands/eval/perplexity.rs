//! `ridge eval --perplexity`.

use std::path::Path;

use ridge_engine::evaluate::{Perplexity, questions, rolling_windows, sliding_windows};
use serde_json::json;

use super::args::{EvalSettings, WindowKind};
use super::scoring::{EvalModel, show, unusable};
use crate::error::{Result, refused};
use crate::input;
use crate::output::{columns, count, grouped};

/// The default window, unless the model's maximum is shorter.
const CONTEXT: usize = 2048;

pub(super) fn run(settings: &EvalSettings, opened: &EvalModel, file: &Path, windows: WindowKind) -> Result<()> {
    let context = settings.context.unwrap_or(CONTEXT.min(opened.config.max_context()));
    let stride = match windows {
        WindowKind::Sliding(stride) => stride.unwrap_or((context / 2).max(1)),
        WindowKind::Rolling => context,
    };
    if stride > context {
        let why = format!("exceeds the window of {context}: tokens between windows would be skipped");
        return Err(refused("--stride", stride, &why));
    }
    if matches!(windows, WindowKind::Sliding(_)) && context < 2 {
        return Err(refused(
            "--context",
            context,
            "a window needs at least two tokens: one to predict and one before it",
        ));
    }
    let text = input::file(file)?;
    if text.is_empty() {
        return Err(unusable(file.display(), "is empty; give a file that contains text"));
    }
    let mut tokens = opened.begin.clone();
    if tokens.is_empty() && matches!(windows, WindowKind::Rolling) {
        // The harness also predicts the first token, from the end token if there is no begin token.
        tokens.extend(opened.tokenizer.bos().or(opened.tokenizer.eos()));
    }
    tokens.extend(opened.tokenizer.encode(&text, false)?);
    let windows = match windows {
        WindowKind::Sliding(_) => sliding_windows(tokens.len(), context, stride),
        WindowKind::Rolling => rolling_windows(tokens.len(), context),
    };
    if windows.is_empty() {
        let problem = format!(
            "has only {} and no token before it to predict it from; give a longer text",
            count(tokens.len(), "token")
        );
        return Err(unusable(file.display(), problem));
    }
    let scored = opened.score(settings, &questions(&tokens, &windows))?;
    let scores = scored.scores.iter().flatten().flatten().copied();
    let Some(result) = Perplexity::new(scores, text.len()) else {
        return Err(unusable(file.display(), "has no token to predict"));
    };
    let what = format!(
        "{}, {} ({} predicted), in {} of {context}, stride {stride}",
        count(text.len(), "byte"),
        count(tokens.len(), "token"),
        grouped(result.tokens as u64),
        count(windows.len(), "window")
    );
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let table = columns(&[
        row("perplexity", format!("{:.6} ± {:.6}", result.perplexity, result.perplexity_stderr)),
        row("nats per token", format!("{:.6} ± {:.6}", result.nll, result.nll_stderr)),
        row("bits per byte", format!("{:.6}", result.bits_per_byte)),
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
