//! A conversation on a terminal.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ridge_engine::Finish;
use ridge_models::ModelFiles;
use signal_hook::consts::SIGINT;

use super::answering::Answering;
use super::args::ChatSettings;
use super::commands::{self, ChatLine};
use super::editor::{ChatEditor, EditorInput, state_folder};
use super::keys::HeldKeys;
use super::show::{ChatLimits, ShowAnswer, remark};
use super::turn::ChatModel;
use crate::args::{MAX_COUNT, change_setting, whole};
use crate::conversation::Conversation;
use crate::error::{Error, Result};
use crate::output::{columns, count, note, print, report, write_file};

/// A conversation on a terminal.
pub(super) struct Talk<'a> {
    settings: &'a ChatSettings,
    conversation: Conversation,
    answering: Answering,
    limits: ChatLimits,
    editor: ChatEditor,
    /// Ctrl-C was pressed during a reply.
    interrupted: Arc<AtomicBool>,
    /// The conversation is saved in its current state.
    is_saved: bool,
}

/// The next action after a line.
enum LineResult {
    Continue,
    Answer,
    Leave,
}

impl<'a> Talk<'a> {
    pub(super) fn new(
        settings: &'a ChatSettings,
        files: &ModelFiles,
        chat: ChatModel,
        conversation: Conversation,
    ) -> Result<Self> {
        let interrupted = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(SIGINT, Arc::clone(&interrupted)).map_err(Error::Signal)?;
        let limits = chat.limits();
        if settings.notes {
            note(&format!(
                "{files}, context of {}; /help lists the commands, Ctrl-D exits",
                count(limits.context, "token")
            ));
            if files.is_embedded() {
                note("(this small model only continues stories; for example: Once upon a time, a cat)");
            }
        }
        let editor = ChatEditor::new(settings.history)?;
        let answering = Answering::new(chat);
        Ok(Self { settings, conversation, answering, limits, editor, interrupted, is_saved: true })
    }

    /// Runs the conversation until the user exits, then saves it, unless saving is disabled.
    pub(super) fn run(mut self) -> Result<()> {
        let left = self.converse();
        if !self.is_saved && !self.conversation.is_empty() && self.settings.history {
            self.keep();
        }
        left
    }

    fn converse(&mut self) -> Result<()> {
        let mut leaving = false;
        loop {
            let typed = match self.editor.read()? {
                EditorInput::Text(text) => text,
                EditorInput::Interrupt if leaving => return Err(Error::Interrupted),
                EditorInput::Interrupt => {
                    leaving = true;
                    note("(Ctrl-C again, or Ctrl-D, to exit)");
                    continue;
                }
                EditorInput::End => return Ok(()),
            };
            leaving = false;
            // An interruption of the line editor does not interrupt the following reply.
            self.interrupted.store(false, Ordering::Relaxed);
            let held = HeldKeys::new();
            match self.run_line(&typed) {
                Ok(LineResult::Continue) => {}
                Ok(LineResult::Leave) => return Ok(()),
                Ok(LineResult::Answer) => self.answer()?,
                Err(error) if error.reader_left() => return Err(error),
                Err(Error::Interrupted) => note("(interrupted)"),
                Err(error) => report(&error),
            }
            self.editor.take_keys(&held.typed());
            drop(held);
        }
    }

    fn answer(&mut self) -> Result<()> {
        let left_out = self.conversation.left_out();
        let mut shown = ShowAnswer::new(self.settings);
        let result = self.answering.answer(&mut self.conversation, &self.interrupted, &mut shown);
        drop(shown);
        match result {
            Ok(answer) => {
                print("\n")?;
                let was_interrupted = answer.finish == Finish::Cancelled;
                if was_interrupted {
                    note("(interrupted)");
                }
                if !answer.text.is_empty() || !was_interrupted {
                    self.conversation.say("assistant", &answer.text);
                    self.is_saved = false;
                }
                if !was_interrupted {
                    remark(self.settings, self.limits, &answer, left_out);
                }
            }
            Err(error) if error.reader_left() => return Err(error),
            Err(error) => {
                // Removes the message: otherwise a message without a reply would precede the next one.
                self.conversation.undo();
                match error {
                    Error::Interrupted => note("(interrupted)"),
                    error => report(&error),
                }
            }
        }
        Ok(())
    }

    /// Runs a line; stops before generating a reply.
    fn run_line(&mut self, typed: &str) -> Result<LineResult> {
        let conversation = &mut self.conversation;
        let messages = |conversation: &Conversation| count(conversation.len(), "message");
        match commands::parse(typed) {
            ChatLine::Nothing => {}
            ChatLine::Message(text) => {
                // An earlier message without a reply would result in two consecutive user messages.
                conversation.forget_unanswered();
                conversation.say("user", &text);
                return Ok(LineResult::Answer);
            }
            ChatLine::Help => note(&commands::help()),
            ChatLine::System(None) => note(conversation.system.as_deref().unwrap_or("(no system prompt)")),
            ChatLine::System(Some("off")) => {
                conversation.system = None;
                note("(system prompt removed)");
            }
            ChatLine::System(Some(text)) => {
                conversation.system = Some(text.to_owned());
                note("(system prompt set; it applies from the next message on)");
            }
            ChatLine::Clear => {
                let cleared = messages(conversation);
                conversation.clear();
                self.is_saved = true;
                let kept = if conversation.system.is_some() { "; the system prompt is kept" } else { "" };
                note(&format!("({cleared} cleared{kept})"));
            }
            ChatLine::Undo if conversation.undo() => note(&format!("({} remaining)", messages(conversation))),
            ChatLine::Retry if conversation.take_back_answer() => {
                let chat = self.answering.model(&self.interrupted)?;
                // The same seed would give the same reply.
                chat.sampling.seed = chat.sampling.seed.wrapping_add(1);
                return Ok(LineResult::Answer);
            }
            ChatLine::Undo | ChatLine::Retry => note("(there is no message yet)"),
            ChatLine::Save(path) => {
                save(conversation, Path::new(path))?;
                self.is_saved = true;
                note(&format!("({} saved to {path})", messages(&self.conversation)));
            }
            ChatLine::Load(path) => {
                *conversation = Conversation::from_file(Path::new(path))?;
                self.is_saved = true;
                note(&format!("({} loaded from {path})", messages(&self.conversation)));
            }
            ChatLine::Settings => note(&self.shown()?),
            ChatLine::Set(name, value) => note(&self.set(name, value)?),
            ChatLine::Quit => return Ok(LineResult::Leave),
            ChatLine::Wrong(why) => note(&format!("({why})")),
        }
        Ok(LineResult::Continue)
    }

    /// Changes a setting and returns the message to show.
    fn set(&mut self, name: &str, value: &str) -> Result<String> {
        let plain = name.trim_start_matches('-').replace('-', "_");
        let chat = self.answering.model(&self.interrupted)?;
        let changed = match plain.as_str() {
            "max_tokens" => whole::<usize, 1, MAX_COUNT>(value).map(|max| chat.max_tokens = max),
            _ => {
                let mut sampling = chat.sampling.clone();
                let changed = change_setting(&mut sampling, &plain, value);
                changed.and_then(|()| sampling.check().map_err(|error| error.to_string())).map(|()| {
                    // DRY needs its sequence breakers.
                    if sampling.dry_multiplier > 0.0 && sampling.dry_breakers.is_empty() {
                        let settings = &self.settings.sampling;
                        sampling.dry_breakers = settings.breaker_tokens(&chat.tokenizer).unwrap_or_default();
                    }
                    chat.sampling = sampling;
                })
            }
        };
        self.limits = chat.limits();
        Ok(match changed {
            Ok(()) => format!("({plain} = {value})"),
            Err(why) => format!("({plain} {value}: {why})"),
        })
    }

    fn shown(&mut self) -> Result<String> {
        let chat = self.answering.model(&self.interrupted)?;
        let (sampling, conversation) = (&chat.sampling, &self.conversation);
        let row = |name: &str, value: String| vec![name.to_owned(), value];
        let most = if chat.max_tokens == usize::MAX {
            "the rest of the context".to_owned()
        } else {
            format!("at most {}", count(chat.max_tokens, "token"))
        };
        let mut rows = vec![
            row("system prompt", conversation.system.clone().unwrap_or("none".to_owned())),
            row("messages", format!("{}, {} of them omitted", conversation.len(), conversation.left_out())),
            row("context", format!("{} of {}", chat.cached.len(), count(chat.context, "token"))),
            row("answers", most),
        ];
        rows.push(if sampling.temperature == 0.0 {
            row("sampling", "greedy".to_owned())
        } else {
            let (temperature, top_k, top_p, min_p) =
                (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p);
            let seed = sampling.seed;
            row(
                "sampling",
                format!("temperature {temperature}, top_k {top_k}, top_p {top_p}, min_p {min_p}, seed {seed}"),
            )
        });
        Ok(columns(&rows).trim_end().to_owned())
    }

    /// Writes the conversation to the file from which it can be continued.
    fn keep(&self) {
        let Some(file) = state_folder().map(|folder: PathBuf| folder.join("last_chat.json")) else { return };
        if let Some(folder) = file.parent() {
            // The write reports the error.
            let _ = std::fs::create_dir_all(folder);
        }
        let saved = save(&self.conversation, &file);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            // Conversations are private, as the input history is.
            let _ = std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600));
        }
        match saved {
            Ok(()) if self.settings.notes => {
                note(&format!("(saved to {0}; ridge chat --load {0} continues it)", file.display()));
            }
            Ok(()) => {}
            Err(error) => report(&error),
        }
    }
}

fn save(conversation: &Conversation, path: &Path) -> Result<()> {
    write_file(path, &format!("{:#}\n", conversation.to_json()))
}
