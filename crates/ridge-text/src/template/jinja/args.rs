//! The arguments of calls, bound to the names of parameters as Python does it.

use std::sync::Arc;

use super::fault::{Res, fail};
use super::ops::integer;
use super::value::Value;

/// Evaluated arguments.
#[derive(Clone, Default)]
pub(crate) struct Args {
    pub(crate) positional: Vec<Value>,
    pub(crate) named: Vec<(Arc<str>, Value)>,
}

/// Arguments in the order of the parameters.
pub(crate) struct Bound(pub(crate) Vec<Option<Value>>);

impl Args {
    /// Binds to `params`, of which the first `required` have no default. A parameter whose name begins with a slash
    /// takes no keyword.
    pub(crate) fn bind(self, function: &str, params: &[&str], required: usize) -> Res<Bound> {
        let mut bound: Vec<Option<Value>> = Vec::with_capacity(params.len());
        if self.positional.len() > params.len() {
            return fail(format!(
                "{function}() takes at most {} arguments ({} given)",
                params.len(),
                self.positional.len()
            ));
        }
        bound.extend(self.positional.into_iter().map(Some));
        bound.resize(params.len(), None);
        for (name, value) in self.named {
            match params.iter().position(|param| **param == *name) {
                Some(at) if bound[at].is_none() => bound[at] = Some(value),
                Some(_) => return fail(format!("{function}() got multiple values for argument '{name}'")),
                None => return fail(format!("{function}() got an unexpected keyword argument '{name}'")),
            }
        }
        if let Some(at) = bound[..required].iter().position(Option::is_none) {
            let name = params[at].trim_start_matches('/');
            return fail(format!("{function}() is missing a required argument: '{name}'"));
        }
        Ok(Bound(bound))
    }

    /// No arguments.
    pub(crate) fn none(self, function: &str) -> Res<()> {
        self.bind(function, &[], 0).map(|_| ())
    }
}

impl Bound {
    pub(crate) fn take(&mut self, at: usize) -> Option<Value> {
        self.0[at].take()
    }

    /// An argument that is required or has been checked to be there.
    pub(crate) fn value(&mut self, at: usize) -> Value {
        self.take(at).unwrap_or(Value::None)
    }

    /// A string; nothing if it was left out or is None.
    pub(crate) fn text(&mut self, at: usize) -> Res<Option<Arc<str>>> {
        match self.take(at) {
            None | Some(Value::None) => Ok(None),
            Some(Value::Str(text) | Value::Markup(text)) => Ok(Some(text)),
            Some(Value::Undefined(message)) => fail(&*message),
            Some(other) => fail(format!("expected str, got {}", other.type_name())),
        }
    }

    /// An integer; nothing if it was left out or is None.
    pub(crate) fn int(&mut self, at: usize) -> Res<Option<i128>> {
        match self.take(at) {
            None | Some(Value::None) => Ok(None),
            Some(Value::Undefined(message)) => fail(&*message),
            Some(other) => match integer(&other) {
                Some(i) => Ok(Some(i)),
                None => fail(format!("'{}' object cannot be interpreted as an integer", other.type_name())),
            },
        }
    }

    /// Whether an argument is true; `default` if it was left out.
    pub(crate) fn flag(&mut self, at: usize, default: bool) -> bool {
        self.take(at).map_or(default, |value| value.truthy())
    }
}
