//! Generates replies on a separate thread, so that an interruption takes effect immediately and not after the current step.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::turn::{AnswerObserver, ChatAnswer, ChatModel};
use crate::conversation::Conversation;
use crate::error::{Error, Result};

/// Polling interval for interruptions.
const INTERVAL: Duration = Duration::from_millis(50);

/// A model, or the thread that owns it until the step that was interrupted ends.
pub(super) enum Answering {
    Idle(Box<ChatModel>),
    Busy(JoinHandle<ChatModel>),
    /// Neither: ownership is being transferred.
    Gone,
}

/// A message of the thread.
enum AnswerEvent {
    Reading { done: usize, total: usize },
    Text(String),
    Done(Result<ChatAnswer>),
}

impl Answering {
    pub(super) fn new(model: ChatModel) -> Self {
        Self::Idle(Box::new(model))
    }

    /// Waits until the model is idle and returns it.
    ///
    /// # Errors
    /// When the user interrupts the wait for it.
    pub(super) fn model(&mut self, interrupted: &AtomicBool) -> Result<&mut ChatModel> {
        while matches!(self, Self::Busy(thread) if !thread.is_finished()) {
            if interrupted.swap(false, Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            std::thread::sleep(INTERVAL);
        }
        *self = match std::mem::replace(self, Self::Gone) {
            Self::Busy(thread) => Self::new(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))),
            other => other,
        };
        match self {
            Self::Idle(model) => Ok(model),
            Self::Busy(_) | Self::Gone => Err(Error::Interrupted),
        }
    }

    /// Generates a reply as [`ChatModel::answer`] does. After an interruption it returns the partial reply with
    /// `Finish::Cancelled`, even if the device is still computing.
    pub(super) fn answer(
        &mut self,
        conversation: &mut Conversation,
        interrupted: &AtomicBool,
        observer: &mut dyn AnswerObserver,
    ) -> Result<ChatAnswer> {
        self.model(interrupted)?;
        let Self::Idle(mut model) = std::mem::replace(self, Self::Gone) else { return Err(Error::Interrupted) };
        let (events, received) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let (mut asked, stopped) = (conversation.clone(), Arc::clone(&stop));
        *self = Self::Busy(std::thread::spawn(move || {
            let answer = model.answer(&mut asked, &stopped, &mut SendEvents(&events));
            // The receiver is gone after an interruption.
            let _ = events.send(AnswerEvent::Done(answer));
            *model
        }));
        let (mut text, mut reading) = (String::new(), (0, 0));
        loop {
            if interrupted.swap(false, Ordering::Relaxed) {
                stop.store(true, Ordering::Relaxed);
                return Ok(ChatAnswer::cancelled(text, conversation.left_out()));
            }
            match received.recv_timeout(INTERVAL) {
                Ok(AnswerEvent::Reading { done, total }) => reading = (done, total),
                Ok(AnswerEvent::Text(piece)) => {
                    if let Err(error) = observer.text(&piece) {
                        stop.store(true, Ordering::Relaxed);
                        return Err(error);
                    }
                    text += &piece;
                }
                Ok(AnswerEvent::Done(answer)) => {
                    let answer = answer?;
                    conversation.leave_out(answer.left_out);
                    return Ok(answer);
                }
                Err(RecvTimeoutError::Timeout) => {}
                // The thread panicked; taking the model back reports it.
                Err(RecvTimeoutError::Disconnected) => {
                    self.model(interrupted)?;
                    return Err(Error::Interrupted);
                }
            }
            if text.is_empty() {
                observer.reading(reading.0, reading.1);
            }
        }
    }
}

struct SendEvents<'a>(&'a Sender<AnswerEvent>);

impl AnswerObserver for SendEvents<'_> {
    fn reading(&mut self, done: usize, total: usize) {
        let _ = self.0.send(AnswerEvent::Reading { done, total });
    }

    fn text(&mut self, text: &str) -> Result<()> {
        let _ = self.0.send(AnswerEvent::Text(text.to_owned()));
        Ok(())
    }
}
