//! Tools that may be called, and what an answer says of calls.

/// A tool that may be called.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Callable {
    pub(crate) name: String,
    /// The schema of its arguments.
    pub(crate) parameters: serde_json::Value,
}

/// What a piece of an answer turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ToolOutputPart {
    /// Text that is no call.
    Text(String),
    /// A call begins: which one of the answer, and its tool.
    Call { index: usize, name: String },
    /// Arguments of call `index` continue.
    Arguments { index: usize, json: String },
}
