//! Decoders that rank documents: the words of their answers, and the template of a query and a document.

use ridge_models::{EncoderConfig, ModelFiles, NetworkConfig, SentenceConfig, WordScore};
use ridge_serve::{renders_instructions, renders_pairs};
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
    if let NetworkConfig::Encoder(config) = files.embedding_config(&said)? {
        if config.classifier.is_some() {
            note("the model is a classifier, which scores texts without --rerank");
            return Ok(said);
        }
        if !config.is_decoder() {
            let why = "is an encoder that writes no words to score by; without --rerank it ranks by its vectors";
            return Err(refused("--rerank", files, why));
        }
    }
    let tokenizer = files.tokenizer()?;
    let token = |word: &str| match tokenizer.encode(word, false)?[..] {
        [id] => Ok(id),
        _ => Err(refused("--rerank", files, &format!("has no token for the word {word:?}"))),
    };
    let words = WordScore { yes: token("yes")?, no: Some(token("no")?), sigmoid: said.sigmoid.unwrap_or(true) };
    Ok(SentenceConfig { words: Some(words), ..said })
}

/// The template of a query and a document, of a model that has one; none of a model whose tokenizer joins both. `prompt` is the
/// instruction of requests that give none.
pub(super) fn templates(
    args: &ServeArgs,
    files: &ModelFiles,
    config: &EncoderConfig,
    prompt: Option<&str>,
) -> Result<ChatTemplates> {
    let templates = pair_templates(args, files, config)?;
    if config.classifier.is_some() && prompt.is_some() && !renders_instructions(&templates) {
        let why = "its `default_prompt_name` in config_sentence_transformers.json needs a template with a place for a message of \
                   role system; --chat-template gives one";
        return Err(refused("--model", files, why));
    }
    Ok(templates)
}

fn pair_templates(args: &ServeArgs, files: &ModelFiles, config: &EncoderConfig) -> Result<ChatTemplates> {
    if !config.is_decoder() || config.classifier.is_none_or(|classifier| classifier.labels != 1) {
        return Ok(ChatTemplates::default());
    }
    let own = files.chat_templates()?;
    if let Some(given) = args.chat_template()? {
        let given = own.with_files(vec![given]);
        return match renders_pairs(&given) {
            true => Ok(given),
            false => {
                let why = "must show messages of roles query and document, and not those of any other role";
                Err(refused("--chat-template", "the template", why))
            }
        };
    }
    if renders_pairs(&own) {
        return Ok(own);
    }
    let file = "the prompt of Qwen3-Reranker".to_owned();
    let qwen3 = own.with_files(vec![("default".to_owned(), file, QWEN3.to_owned())]);
    if config.family == "qwen3" && renders_pairs(&qwen3) {
        note("the model has no template for a query and a document; using the prompt of Qwen3-Reranker");
        return Ok(qwen3);
    }
    note("the model has no template for a query and a document (--chat-template gives one); its tokenizer joins them");
    Ok(ChatTemplates::default())
}
