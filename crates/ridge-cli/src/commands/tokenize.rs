//! `ridge tokenize`: text to tokens and back.

use std::ops::Range;
use std::path::PathBuf;

use clap::Args;
use ridge_models::ModelFiles;
use ridge_text::Tokenizer;
use ridge_text::template::{ChatInput, Clock, Data};
use serde_json::json;

use crate::conversation::{Conversation, chat_templates};
use crate::error::{Error, Result, refused};
use crate::input;
use crate::output::{columns, print, print_json};

/// Convert text to tokens, or tokens to text
///
/// For each token: its id, its spelling in the vocabulary, and its bytes. Weights are not read. Without a model, the
/// tokenizer of the embedded model is used.
#[derive(Debug, Args)]
#[command(
    group = clap::ArgGroup::new("input").required(true),
    after_help = "\
Examples:
  ridge tokenize \"Once upon a time\"
  ridge tokenize --model DIR --count --file book.txt
  ridge tokenize --ids \"Once upon\" | ridge tokenize --decode -
  ridge tokenize --model DIR --chat --file talk.json"
)]
pub(crate) struct TokenizeArgs {
    /// Text; `-` reads it from standard input, without its last newline
    #[arg(group = "input")]
    text: Option<String>,

    /// Read the text from this file, unchanged
    #[arg(short, long, value_name = "FILE", group = "input")]
    file: Option<PathBuf>,

    /// Print the text of these ids, separated by spaces or commas; `-` reads them from standard input
    #[arg(short, long, value_name = "IDS", group = "input")]
    decode: Option<String>,

    /// Model: a folder in the Hugging Face layout, a GGUF file, or the ORG/NAME of a model downloaded with `ridge pull`
    /// [default: the embedded model]
    #[arg(short, long, value_name = "MODEL")]
    model: Option<PathBuf>,

    /// Do not add begin and end tokens; with --decode, omit special tokens from the text
    #[arg(long)]
    no_special: bool,

    /// The text is a JSON conversation: render it with the model's chat template, as in `ridge chat`
    #[arg(long, conflicts_with = "decode")]
    chat: bool,

    /// Use the model's chat template of this name
    #[arg(long, value_name = "NAME", requires = "chat", conflicts_with = "template_file")]
    template: Option<String>,

    /// Use the chat template in this file instead of the model's
    #[arg(long, value_name = "FILE", requires = "chat")]
    template_file: Option<PathBuf>,

    /// Print only the number of tokens
    #[arg(long, help_heading = "Output", conflicts_with_all = ["ids", "json", "decode"])]
    count: bool,

    /// Print only the ids, on one line
    #[arg(long, help_heading = "Output", conflicts_with_all = ["json", "decode"])]
    ids: bool,

    /// Print one JSON object: text, ids, tokens with their bytes
    #[arg(long, help_heading = "Output")]
    json: bool,
}

pub(crate) fn run(args: &TokenizeArgs) -> Result<()> {
    let files = ModelFiles::open(args.model.as_deref())?;
    let tokenizer = files.tokenizer()?;
    if let Some(typed) = &args.decode {
        return decode(args, &tokenizer, typed);
    }
    let text = match (&args.file, args.text.as_deref()) {
        (Some(file), _) => input::file(file)?,
        (None, None | Some("-")) => input::stdin()?,
        (None, Some(text)) => text.to_owned(),
    };
    let text = if args.chat { rendered(args, &files, &text)? } else { text };
    // Templates contain the begin token.
    let tokens = tokenizer.encode_with_offsets(&text, !args.no_special && !args.chat)?;
    if args.count {
        return print(&format!("{}\n", tokens.len()));
    }
    let ids: Vec<u32> = tokens.iter().map(|(id, _)| *id).collect();
    if args.ids {
        return print(&format!("{}\n", ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")));
    }
    if args.json {
        let token = |(id, bytes): &(u32, Range<usize>)| {
            json!({
                "id": id,
                "token": tokenizer.id_to_token(*id),
                "bytes": [bytes.start, bytes.end],
                "special": tokenizer.is_special(*id),
            })
        };
        let tokens: Vec<_> = tokens.iter().map(token).collect();
        return print_json(&json!({ "text": text, "ids": ids, "tokens": tokens }));
    }
    if args.chat {
        print(&text)?;
        print(if text.ends_with('\n') { "\n" } else { "\n\n" })?;
    }
    print(&table(&tokenizer, &text, &tokens))
}

fn table(tokenizer: &Tokenizer, text: &str, tokens: &[(u32, Range<usize>)]) -> String {
    let heading = ["id", "token", "bytes", "text"].map(str::to_owned).to_vec();
    let row = |(id, bytes): &(u32, Range<usize>)| {
        let token = tokenizer.id_to_token(*id).unwrap_or_default();
        let part = text.get(bytes.clone()).filter(|part| !part.is_empty());
        vec![
            id.to_string(),
            token.escape_debug().to_string(),
            format!("{}..{}", bytes.start, bytes.end),
            part.map_or(String::new(), |part| format!("{part:?}")),
        ]
    };
    columns(&Some(heading).into_iter().chain(tokens.iter().map(row)).collect::<Vec<_>>())
}

/// Renders the conversation in `text`, with a generation prompt unless it ends with an assistant message.
fn rendered(args: &TokenizeArgs, files: &ModelFiles, text: &str) -> Result<String> {
    let what = args.file.as_ref().map_or("the text".to_owned(), |file| file.display().to_string());
    let messages = Conversation::from_json(&what, text)?.read()?;
    let answered = messages.last().and_then(|m| m.get("role")).and_then(Data::as_str) == Some("assistant");
    let mut input = ChatInput::new(messages, Clock::now_utc());
    input.add_generation_prompt = !answered;
    let templates = chat_templates(files, args.template_file.as_deref())?;
    Ok(templates.render(args.template.as_deref(), &input)?.text)
}

fn decode(args: &TokenizeArgs, tokenizer: &Tokenizer, typed: &str) -> Result<()> {
    let read;
    let typed = if typed == "-" {
        read = input::stdin()?;
        &read
    } else {
        typed
    };
    let separator = |c: char| c.is_whitespace() || matches!(c, ',' | '[' | ']');
    let id = |word: &str| -> Result<u32> {
        let id: u32 = word.parse().map_err(|_| refused("--decode", word, "must be a token id, a whole number"))?;
        match tokenizer.id_to_token(id) {
            Some(_) => Ok(id),
            None => Err(Error::NoSuchToken { id, tokens: tokenizer.vocab_size() }),
        }
    };
    let ids: Vec<u32> = typed.split(separator).filter(|word| !word.is_empty()).map(id).collect::<Result<_>>()?;
    let text = tokenizer.decode(&ids, args.no_special)?;
    if args.json {
        return print_json(&json!({ "text": text, "ids": ids }));
    }
    print(&text)?;
    print("\n")
}
