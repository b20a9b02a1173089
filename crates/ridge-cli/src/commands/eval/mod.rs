//! `ridge eval`: perplexity of a text, or multiple choice.
//!
//! `args` has the arguments and the settings that they resolve to, `scoring` loads the model and scores texts, and
//! `perplexity` and `choices` are the two evaluations.

mod args;
mod choices;
mod perplexity;
mod scoring;

use ridge_engine::evaluate::beginning;
use ridge_models::ModelFiles;

pub(crate) use args::EvalArgs;
use args::EvalTask;
use scoring::EvalModel;

use crate::error::{Result, refused};

/// Runs the command.
///
/// # Errors
/// When a setting is out of range, a file cannot be used, or the model cannot be loaded or run.
pub(crate) fn run(args: EvalArgs) -> Result<()> {
    let settings = &args.resolve()?;
    let files = ModelFiles::open(settings.model.path.as_deref())?;
    let config = files.config()?;
    if let Some(context) = settings.context.filter(|c| *c > config.max_context()) {
        let why = format!("the model supports at most {} tokens", config.max_context());
        return Err(refused("--context", context, &why));
    }
    let tokenizer = files.tokenizer()?;
    let begin = if settings.no_special { Vec::new() } else { beginning(&tokenizer)? };
    let opened = EvalModel { files, config, tokenizer, begin };
    match &settings.task {
        EvalTask::Perplexity { file, windows } => perplexity::run(settings, &opened, file, *windows),
        EvalTask::Choices { file, limit, delimiter } => choices::run(settings, &opened, file, *limit, delimiter),
    }
}
