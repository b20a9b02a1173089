//! `ridge chat`: an interactive conversation, or one with given turns.
//!
//! `args` has the arguments and the settings that they resolve to; `turn` generates a reply, on a separate thread if it can be
//! interrupted (`answering`), and `show` prints it. `talk` is a conversation on a terminal, with its slash commands
//! (`commands`), its line editor (`editor`) and the keys that are typed during a reply (`keys`).

mod answering;
mod args;
mod commands;
mod editor;
mod keys;
mod show;
mod talk;
mod turn;

use std::sync::atomic::AtomicBool;

use ridge::{LoadedEngine, Placement, RunSettings};
use ridge_engine::Finish;
use ridge_models::ModelFiles;
use ridge_text::ChatTemplates;
use serde_json::json;

pub(crate) use args::ChatArgs;
use args::ChatSettings;
use show::{ShowAnswer, remark};
use talk::Talk;
use turn::ChatModel;

use crate::conversation::{Conversation, chat_templates};
use crate::error::{Error, Result, refused};
use crate::output::{LoadProgress, note, print, print_json};

/// Default context length, limited by the model's maximum.
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
        None => Talk::new(&settings, &files, chat, conversation)?.run(),
    }
}

fn chat_model(settings: &ChatSettings, files: &ModelFiles, templates: ChatTemplates) -> Result<ChatModel> {
    let config = files.config()?;
    let tokenizer = files.tokenizer()?;
    let most = config.max_context();
    if let Some(context) = settings.context.filter(|c| *c > most) {
        return Err(refused("--context", context, &format!("the model supports at most {most} tokens")));
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
        drafts: 0,
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
        max_context: most,
        chunk: settings.chunk.min(context),
        tokenizer,
        sequence: None,
        cached: Vec::new(),
    };
    chat.stop_tokens.extend(chat.end_of_turn());
    Ok(chat)
}

/// Replies to the given turns, then exits.
fn answer_turns(
    settings: &ChatSettings,
    mut chat: ChatModel,
    mut conversation: Conversation,
    turns: &[String],
) -> Result<()> {
    if settings.notes && settings.sampling.tell_seed && !settings.json {
        let seed = settings.sampling.values.seed;
        note(&format!("seed {seed}; --seed {seed} reproduces these replies"));
    }
    // Ctrl-C ends the process by the default action.
    let interrupted = AtomicBool::new(false);
    let mut last = None;
    for turn in turns {
        conversation.say("user", turn);
        let left_out = conversation.left_out();
        let answer = chat.answer(&mut conversation, &interrupted, &mut ShowAnswer::new(settings))?;
        if !settings.json {
            print("\n")?;
        }
        remark(settings, chat.limits(), &answer, left_out);
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
