//! Scopes. Which names a scope owns is known before anything runs (see `symbols.rs`); here are their values.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use super::value::Value;

/// One scope: a loop's iteration, a macro's call, the template itself.
pub(crate) struct Frame {
    /// The names that the scope owns; without a value while they are not set.
    vars: RefCell<Vec<(Arc<str>, Option<Value>)>>,
    parent: Option<Rc<Frame>>,
}

/// What a scope and those around it know of a name.
pub(crate) enum Found {
    Set(Value),
    /// A scope owns it and has not set it.
    Unset,
    /// No scope owns it.
    Unknown,
}

impl Frame {
    pub(crate) fn new(parent: Option<Rc<Frame>>) -> Self {
        Self { vars: RefCell::new(Vec::new()), parent }
    }

    /// Makes `name` one of this scope's, with a value or without.
    pub(crate) fn declare(&self, name: &Arc<str>, value: Option<Value>) {
        let mut vars = self.vars.borrow_mut();
        match vars.iter_mut().find(|(n, _)| n == name) {
            Some(var) => var.1 = value,
            None => vars.push((name.clone(), value)),
        }
    }

    /// The value of `name` in the nearest scope that owns it.
    pub(crate) fn find(&self, name: &str) -> Found {
        let mut frame = self;
        loop {
            if let Some((_, value)) = frame.vars.borrow().iter().find(|(n, _)| &**n == name) {
                return value.clone().map_or(Found::Unset, Found::Set);
            }
            match frame.parent.as_deref() {
                Some(parent) => frame = parent,
                None => return Found::Unknown,
            }
        }
    }

    pub(crate) fn parent(&self) -> Option<&Rc<Frame>> {
        self.parent.as_ref()
    }

    /// Forgets every value, which breaks the circle of a scope and a macro in it.
    pub(crate) fn clear(&self) {
        // The values are dropped when nothing is borrowed any more: dropping one may drop this very frame's contents.
        let vars = std::mem::take(&mut *self.vars.borrow_mut());
        drop(vars);
    }
}
