//! `ridge chat`: a conversation, by hand or with turns that are given.
//!
//! `args` is what can be typed and the settings that it resolves to; `turn` makes an answer of a conversation, on a thread of its
//! own where someone may interrupt it (`answering`). `talk` is a conversation on a terminal, with its slash commands
//! (`commands`), its line editor (`editor`) and the keys that are typed during an answer (`keys`).

mod answering;
mod args;
mod commands;
mod editor;
mod keys;
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
use talk::Talk;
use turn::{AnswerObserver, ChatAnswer, ChatModel};

use crate::conversation::{Conversation, chat_templates};
use crate::error::{Error, Result, refused};
use crate::output::{LoadProgress, Progress, count, note, print, print_json};

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
        None => Talk::new(&settings, &files, chat, conversation)?.run(),
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
fn remark(settings: &ChatSettings, limits: ChatLimits, answer: &ChatAnswer, left_out_before: usize) {
    if settings.json || !settings.notes {
        return;
    }
    let context = count(limits.context, "token");
    if answer.left_out > left_out_before {
        let left_out = count(answer.left_out, "message");
        note(&format!("(the context of {context} is full: the oldest {left_out} are left out; --context N raises it)"));
    }
    if answer.finish == Finish::Context {
        note(&format!("(cut off: the context of {context} is full; --context N raises it)"));
    }
    if answer.finish == Finish::Length {
        let max = count(limits.max_tokens, "token");
        note(&format!("(cut off at {max}, the maximum of an answer; --max-tokens N raises it, or /set max_tokens N)"));
    }
    if settings.verbose {
        note(&format!("({})", answer.line()));
    }
}

/// What ends an answer.
#[derive(Clone, Copy)]
struct ChatLimits {
    context: usize,
    max_tokens: usize,
}

impl ChatModel {
    fn limits(&self) -> ChatLimits {
        ChatLimits { context: self.context, max_tokens: self.max_tokens }
    }
}

/// Shows an answer as it comes, and before it, on a terminal, how much of the conversation is processed.
struct ShowAnswer<'a> {
    settings: &'a ChatSettings,
    progress: Option<Progress>,
}

impl<'a> ShowAnswer<'a> {
    fn new(settings: &'a ChatSettings) -> Self {
        Self { settings, progress: None }
    }
}

impl AnswerObserver for ShowAnswer<'_> {
    fn reading(&mut self, done: usize, total: usize) {
        if self.settings.notes && total > 0 {
            let start = || Progress::of_tokens("reading", total as u64);
            self.progress.get_or_insert_with(start).at(done as u64);
        }
    }

    fn text(&mut self, text: &str) -> Result<()> {
        self.progress = None;
        if self.settings.json || text.is_empty() { Ok(()) } else { print(text) }
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
