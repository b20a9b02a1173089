//! Why a template could not be compiled or rendered.

/// What kind of trouble a [`Fault`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultKind {
    /// The template is not valid, or a value cannot do what the template asks: jinja2 raises here too.
    Template,
    /// The template called `raise_exception`: its author's word to the caller.
    Raised,
    /// jinja2 can do this and this implementation cannot.
    Unsupported,
    /// The template asked for more work, memory or depth than it is given.
    Limit,
}

/// An error with the line of the template that it came from.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) kind: FaultKind,
    pub(crate) message: String,
    /// Counted from 1; 0 where it is not known yet.
    pub(crate) line: u32,
}

/// A fault is rare and a result is not, so the fault is behind a pointer.
pub(crate) type Res<T> = Result<T, Box<Fault>>;

impl Fault {
    pub(crate) fn new(kind: FaultKind, message: impl Into<String>) -> Box<Self> {
        Box::new(Self { kind, message: message.into(), line: 0 })
    }

    pub(crate) fn at(mut self: Box<Self>, line: u32) -> Box<Self> {
        if self.line == 0 {
            self.line = line;
        }
        self
    }
}

/// An error that jinja2 or Python raises as well.
pub(crate) fn fail<T>(message: impl Into<String>) -> Res<T> {
    Err(Fault::new(FaultKind::Template, message))
}

/// Something that jinja2 does and this implementation refuses.
pub(crate) fn unsupported<T>(what: impl Into<String>) -> Res<T> {
    Err(Fault::new(FaultKind::Unsupported, what))
}

/// A bound that the template ran into.
pub(crate) fn limit<T>(what: impl Into<String>) -> Res<T> {
    Err(Fault::new(FaultKind::Limit, what))
}
