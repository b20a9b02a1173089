//! Scopes. Which names a scope owns is known before anything runs (see `symbols.rs`); here are their values.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// The variables of one scope: a loop's iteration, a macro's call, the template itself.
pub(crate) struct VariableFrame<V> {
    /// The names that the scope owns; without a value while they are not set.
    vars: RefCell<Vec<(Arc<str>, Option<V>)>>,
    parent: Option<Rc<Self>>,
}

/// The result of looking a name up in a scope and those around it.
pub(crate) enum Lookup<V> {
    Set(V),
    /// A scope owns it and has not set it.
    Unset,
    /// No scope owns it.
    Unknown,
}

impl<V: Clone> VariableFrame<V> {
    pub(crate) fn new(parent: Option<Rc<Self>>) -> Self {
        Self { vars: RefCell::new(Vec::new()), parent }
    }

    /// Makes `name` one of this scope's, with a value or without.
    pub(crate) fn declare(&self, name: &Arc<str>, value: Option<V>) {
        let mut vars = self.vars.borrow_mut();
        match vars.iter_mut().find(|(n, _)| n == name) {
            Some(var) => var.1 = value,
            None => vars.push((name.clone(), value)),
        }
    }

    /// The value of `name` in the nearest scope that owns it.
    pub(crate) fn find(&self, name: &str) -> Lookup<V> {
        let mut frame = self;
        loop {
            if let Some((_, value)) = frame.vars.borrow().iter().find(|(n, _)| &**n == name) {
                return value.clone().map_or(Lookup::Unset, Lookup::Set);
            }
            match frame.parent.as_deref() {
                Some(parent) => frame = parent,
                None => return Lookup::Unknown,
            }
        }
    }

    pub(crate) fn parent(&self) -> Option<&Rc<Self>> {
        self.parent.as_ref()
    }

    /// Forgets every value, which breaks the circle of a scope and a macro in it.
    pub(crate) fn clear(&self) {
        // The values are dropped when nothing is borrowed any more: dropping one may drop this very frame's contents.
        let vars = std::mem::take(&mut *self.vars.borrow_mut());
        drop(vars);
    }
}
