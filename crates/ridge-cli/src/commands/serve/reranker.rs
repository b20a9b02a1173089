//! Decoders that rank documents: the words of their answers, and the template of a query and a document.

use ridge_models::{EncoderConfig, ModelFiles, SentenceConfig, WordScore};
use ridge_serve::renders_pairs;
use ridge_text::ChatTemplates;

use super::args::ServeArgs;
use crate::error::{Result, refused};
use crate::output::note;

/// The prompt of Qwen3-Reranker's model card, for checkpoints whose own template is that of a chat.
const QWEN3: &str = include_str!("qwen3_reranker.jinja");

/// How the model's files say that texts are judged, or `--rerank` does: by the tokens `yes` and `no`.
pub(super) fn sentence_config(args: &ServeArgs, files: &ModelFiles) -> Result<SentenceConfig> {
    let said = files.sentence_config()?.unwrap_or_default();
    if !args.rerank || said.words.is_some() {
        return Ok(said);
    }
    let tokenizer = files.tokenizer()?;
    let token = |word: &str| match tokenizer.encode(word, false)?[..] {
        [id] => Ok(id),
        _ => Err(refused("--rerank", files, &format!("has no token for the word {word:?}"))),
    };
    let words = WordScore { yes: token("yes")?, no: Some(token("no")?), sigmoid: true };
    Ok(SentenceConfig { words: Some(words), ..said })
}

/// The template of a query and a document, of a model that has one; none of a model whose tokenizer joins both.
pub(super) fn templates(args: &ServeArgs, files: &ModelFiles, config: &EncoderConfig) -> Result<ChatTemplates> {
    if !config.is_decoder() || config.classifier.is_none_or(|classifier| classifier.labels != 1) {
        return Ok(ChatTemplates::default());
    }
    let own = files.chat_templates()?;
    if let Some(given) = args.chat_template()? {
        let given = own.with_files(vec![given]);
        return match renders_pairs(&given) {
            true => Ok(given),
            false => {
                Err(refused("--chat-template", "the template", "has no place for messages of roles query and document"))
            }
        };
    }
    if renders_pairs(&own) {
        return Ok(own);
    }
    let file = "the prompt of Qwen3-Reranker".to_owned();
    let qwen3 = own.with_files(vec![("default".to_owned(), file, QWEN3.to_owned())]);
    if config.family == "qwen3" && renders_pairs(&qwen3) {
        return Ok(qwen3);
    }
    note("the model has no template for a query and a document (--chat-template gives one); its tokenizer joins them");
    Ok(ChatTemplates::default())
}
