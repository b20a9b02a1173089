//! What clients send, checked whole before anything runs. `fields` reads JSON objects strictly, `sampling` the settings
//! that completions and chats share, `completion` and `chat` one kind of request each.

pub(crate) mod chat;
pub(crate) mod completion;
pub(crate) mod constraint;
pub(crate) mod fields;
pub(crate) mod messages;
pub(crate) mod sampling;
