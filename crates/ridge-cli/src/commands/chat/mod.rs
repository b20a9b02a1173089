//! `ridge chat`: a conversation, by hand or with turns that are given.
//!
//! `args` is what can be typed and the settings that it resolves to; `turn` makes an answer of a conversation; `commands`
//! and `editor` are the slash commands and the line editor of a conversation on a terminal.

mod args;
mod commands;
mod editor;
mod turn;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ridge::{LoadedEngine, Placement, RunSettings};
use ridge_engine::Finish;
use ridge_models::ModelFiles;
use ridge_text::ChatTemplates;
use serde_json::json;
use signal_hook::consts::SIGINT;

pub(crate) use args::ChatArgs;
use args::ChatSettings;
use commands::ChatLine;
use editor::{ChatEditor, EditorInput};
use turn::{ChatAnswer, ChatModel};

use crate::conversation::{Conversation, chat_templates};
use crate::error::{Error, Result, refused};
use crate::output::{self, LoadProgress, count, note, print, print_json};

/// Tokens of the context, if the model was made for so many.
const CONTEXT: usize = 8192;

/// Runs the command.
///
/// # Errors
/// When a file cannot be read, the model cannot be loaded or run, or the user interrupts.
pub(crate) fn run(args: ChatArgs) -> Result<()> {
    let settings = args.resolve()?;
    let mut conversation = match &settings.load {
        Some(path) => Conversation::from_file(path)?,
        None => Conversation::default(),
    };
    if settings.system.is_some() {
        conversation.system.clone_from(&settings.system);
    }
    if settings.turns.iter().flatten().any(|turn| turn.trim().is_empty()) {
        return Err(Error::EmptyMessage);
    }
    let files = ModelFiles::open(settings.model.path.as_deref())?;
    let templates = chat_templates(&files, settings.template_file.as_deref())?;
    templates.select(settings.template.as_deref(), settings.tools.is_some())?;
    let chat = chat_model(&settings, &files, templates)?;
    match &settings.turns {
        Some(turns) => answer_turns(&settings, chat, conversation, turns),
        None => converse(&settings, &files, chat, conversation),
    }
}

fn chat_model(settings: &ChatSettings, files: &ModelFiles, templates: ChatTemplates) -> Result<ChatModel> {
    let config = files.config()?;
    let tokenizer = files.tokenizer()?;
    let most = config.max_context();
    if let Some(context) = settings.context.filter(|c| *c > most) {
        return Err(refused("--context", context, &format!("the model was made for at most {most} tokens")));
    }
    let context = settings.context.unwrap_or(CONTEXT.min(most));
    let running = RunSettings {
        placement: Placement {
            threads: settings.threads,
            tensor_parallel: settings.parallel.here(),
            ..Placement::default()
        },
        context,
        prompt: context,
        chunk: settings.chunk,
        random_weights: settings.random_weights,
    };
    let mut progress = LoadProgress::new(settings.notes && !settings.json);
    let LoadedEngine { engine, model, .. } =
        ridge::load_engine(files, &config, &settings.model.numbers, &running, &mut progress)?;
    let mut chat = ChatModel {
        engine,
        templates,
        template: settings.template.clone(),
        variables: settings.variables.clone(),
        tools: settings.tools.clone(),
        sampling: settings.sampling.with(Some(&tokenizer))?,
        stops: settings.stops.clone(),
        stop_tokens: model.eos_token_ids.iter().copied().chain(tokenizer.eos()).collect(),
        max_tokens: settings.max_tokens.unwrap_or(usize::MAX),
        context,
        chunk: settings.chunk.min(context),
        tokenizer,
        sequence: None,
        cached: Vec::new(),
    };
    chat.stop_tokens.extend(chat.end_of_turn());
    Ok(chat)
}

/// What is worth saying about an answer.
fn remark(settings: &ChatSettings, chat: &ChatModel, answer: &ChatAnswer, left_out_before: usize) {
    if settings.json || !settings.notes {
        return;
    }
    let context = count(chat.context, "token");
    if answer.left_out > left_out_before {
        let left_out = count(answer.left_out, "message");
        note(&format!("(the context of {context} is full: the oldest {left_out} are left out; --context N raises it)"));
    }
    if answer.finish == Finish::Context {
        note(&format!("(the answer ends here, for the context of {context} is full; --context N raises it)"));
    }
    if settings.verbose {
        note(&format!("({})", answer.line()));
    }
}

/// Answers turns that are given, then ends.
fn answer_turns(
    settings: &ChatSettings,
    mut chat: ChatModel,
    mut conversation: Conversation,
    turns: &[String],
) -> Result<()> {
    if settings.notes && settings.sampling.tell_seed && !settings.json {
        let seed = settings.sampling.values.seed;
        note(&format!("seed {seed}; --seed {seed} gives these answers again"));
    }
    // Ctrl-C ends the process as it does any other.
    let interrupted = AtomicBool::new(false);
    let mut last = None;
    for turn in turns {
        conversation.say("user", turn);
        let left_out = conversation.left_out();
        let show = |text: &str| if settings.json || text.is_empty() { Ok(()) } else { print(text) };
        let answer = chat.answer(&mut conversation, &interrupted, show)?;
        if !settings.json {
            print("\n")?;
        }
        remark(settings, &chat, &answer, left_out);
        conversation.say("assistant", &answer.text);
        last = Some(answer);
    }
    let Some(answer) = last.filter(|_| settings.json) else { return Ok(()) };
    print_json(&json!({
        "messages": conversation.to_json(),
        "finish_reason": match answer.finish {
            Finish::Length => "length",
            Finish::Context => "context",
            Finish::Stop | Finish::Cancelled => "stop",
        },
        "left_out_messages": answer.left_out,
        "prompt_tokens": answer.prompt,
        "cached_tokens": answer.reused,
        "generated_tokens": answer.generated,
        "seed": settings.sampling.values.seed,
    }))
}

/// What follows a line.
enum LineResult {
    Continue,
    Answer,
    Leave,
}

/// A conversation on a terminal.
fn converse(
    settings: &ChatSettings,
    files: &ModelFiles,
    mut chat: ChatModel,
    mut conversation: Conversation,
) -> Result<()> {
    let interrupted = Arc::new(AtomicBool::new(false));
    // The first interrupt ends the answer. A second one before that is heard ends the process.
    signal_hook::flag::register_conditional_shutdown(SIGINT, 130, Arc::clone(&interrupted)).map_err(Error::Signal)?;
    signal_hook::flag::register(SIGINT, Arc::clone(&interrupted)).map_err(Error::Signal)?;
    let mut editor = ChatEditor::new(settings.history)?;
    if settings.notes {
        note(&format!("{files}, context of {}; /help lists commands, Ctrl-D leaves", count(chat.context, "token")));
    }
    let mut leaving = false;
    loop {
        let typed = match editor.read()? {
            EditorInput::Text(text) => text,
            EditorInput::Interrupt if leaving => return Err(Error::Interrupted),
            EditorInput::Interrupt => {
                leaving = true;
                note("(once more, or Ctrl-D, to leave)");
                continue;
            }
            EditorInput::End => return Ok(()),
        };
        leaving = false;
        match run_line(&typed, settings, &mut chat, &mut conversation) {
            Ok(LineResult::Continue) => continue,
            Ok(LineResult::Leave) => return Ok(()),
            Ok(LineResult::Answer) => {}
            Err(error) if error.reader_left() => return Err(error),
            Err(error) => {
                output::report(&error);
                continue;
            }
        }
        interrupted.store(false, Ordering::Relaxed);
        let left_out = conversation.left_out();
        let result = chat.answer(&mut conversation, &interrupted, print);
        let was_interrupted = interrupted.swap(false, Ordering::Relaxed);
        match result {
            Ok(answer) => {
                print("\n")?;
                if was_interrupted {
                    note("(interrupted)");
                }
                remark(settings, &chat, &answer, left_out);
                if !answer.text.is_empty() || !was_interrupted {
                    conversation.say("assistant", &answer.text);
                }
            }
            Err(error) if error.reader_left() => return Err(error),
            Err(error) => {
                // As if it had not been said: an answerless message would stand in the way of the next.
                conversation.undo();
                output::report(&error);
            }
        }
    }
}

/// Runs a line, up to an answer.
fn run_line(
    typed: &str,
    settings: &ChatSettings,
    chat: &mut ChatModel,
    conversation: &mut Conversation,
) -> Result<LineResult> {
    let messages = |conversation: &Conversation| count(conversation.len(), "message");
    match commands::parse(typed) {
        ChatLine::Nothing => {}
        ChatLine::Message(text) => {
            // What was said before and never answered would make two messages of the user.
            conversation.forget_unanswered();
            conversation.say("user", &text);
            return Ok(LineResult::Answer);
        }
        ChatLine::Help => note(&commands::help()),
        ChatLine::System(None) => note(conversation.system.as_deref().unwrap_or("(no system prompt)")),
        ChatLine::System(Some("off")) => conversation.system = None,
        ChatLine::System(Some(text)) => conversation.system = Some(text.to_owned()),
        ChatLine::Clear => conversation.clear(),
        ChatLine::Undo if conversation.undo() => note(&format!("({} left)", messages(conversation))),
        ChatLine::Retry if conversation.take_back_answer() => {
            // The same numbers would give the same answer.
            chat.sampling.seed = chat.sampling.seed.wrapping_add(1);
            return Ok(LineResult::Answer);
        }
        ChatLine::Undo | ChatLine::Retry => note("(nothing was said yet)"),
        ChatLine::Save(path) => {
            let fail = |cause| Error::Write { path: path.to_owned(), cause };
            std::fs::write(path, format!("{:#}\n", conversation.to_json())).map_err(fail)?;
            note(&format!("({} in {path})", messages(conversation)));
        }
        ChatLine::Load(path) => {
            *conversation = Conversation::from_file(Path::new(path))?;
            note(&format!("({} from {path})", messages(conversation)));
        }
        ChatLine::Settings => note(&shown(settings, chat, conversation)),
        ChatLine::Quit => return Ok(LineResult::Leave),
        ChatLine::Wrong(why) => note(&format!("({why})")),
    }
    Ok(LineResult::Continue)
}

fn shown(settings: &ChatSettings, chat: &ChatModel, conversation: &Conversation) -> String {
    let sampling = &chat.sampling;
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let most = settings.max_tokens.map_or("as many as fit".to_owned(), |n| count(n, "token"));
    let mut rows = vec![
        row("system prompt", conversation.system.clone().unwrap_or("none".to_owned())),
        row("messages", format!("{}, {} of them left out", conversation.len(), conversation.left_out())),
        row("context", format!("{} of {}", chat.cached.len(), count(chat.context, "token"))),
        row("answers", format!("at most {most}")),
    ];
    rows.push(if sampling.temperature == 0.0 {
        row("sampling", "greedy".to_owned())
    } else {
        let (temperature, top_k, top_p, seed) = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed);
        row("sampling", format!("temperature {temperature}, top-k {top_k}, top-p {top_p}, seed {seed}"))
    });
    output::columns(&rows).trim_end().to_owned()
}
