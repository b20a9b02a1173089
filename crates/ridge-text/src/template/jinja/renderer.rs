//! The state of one rendering: its bounds, its variables and its output.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use super::ast::{Load, Symbols};
use super::builtins::Function;
use super::fault::{Fault, Res, fail, limit};
use super::frame::Lookup;
use super::strftime::Clock;
use super::value::{Dict, Frame, Value, range_len};

/// What a rendering may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Steps: expressions evaluated, items walked over, and a share for every byte that is read.
    pub(crate) steps: u64,
    /// Bytes written to texts and lists, the intermediate ones included.
    pub(crate) bytes: u64,
    /// How deep statements, expressions and calls of macros may be in one another.
    pub(crate) depth: u32,
}

/// A rendering that is under way.
pub(crate) struct Renderer<'a> {
    steps: Cell<u64>,
    bytes: Cell<u64>,
    depth: Cell<u32>,
    pub(crate) clock: &'a Clock,
    /// What was given to the template, and what it set at its top level.
    context: RefCell<HashMap<Arc<str>, Value>>,
    /// Where generation blocks are in the output, in bytes; nothing once one was written to a buffer.
    pub(crate) generations: RefCell<Option<Vec<Range<usize>>>>,
    /// What may hold itself and is emptied in the end.
    namespaces: RefCell<Vec<Rc<RefCell<Dict>>>>,
    frames: RefCell<Vec<Rc<Frame>>>,
}

/// Where statements write to.
pub(crate) struct Out {
    pub(crate) text: String,
    /// Is this the output itself and no buffer?
    pub(crate) root: bool,
}

impl<'a> Renderer<'a> {
    /// A rendering with these variables.
    pub(crate) fn new(variables: HashMap<Arc<str>, Value>, clock: &'a Clock, bounds: Bounds) -> Self {
        Self {
            steps: Cell::new(bounds.steps),
            bytes: Cell::new(bounds.bytes),
            depth: Cell::new(bounds.depth),
            clock,
            context: RefCell::new(variables),
            generations: RefCell::new(Some(Vec::new())),
            namespaces: RefCell::default(),
            frames: RefCell::default(),
        }
    }

    /// Pays for one step.
    pub(crate) fn step(&self) -> Res<()> {
        self.steps(1)
    }

    fn steps(&self, count: u64) -> Res<()> {
        match self.steps.get().checked_sub(count) {
            Some(left) => {
                self.steps.set(left);
                Ok(())
            }
            None => limit("the template takes too many steps"),
        }
    }

    /// Pays for reading this many bytes.
    pub(crate) fn work(&self, bytes: usize) -> Res<()> {
        self.steps(1 + bytes as u64 / 64)
    }

    /// Pays for this many new bytes, before they are there.
    pub(crate) fn charge(&self, bytes: usize) -> Res<()> {
        self.work(bytes)?;
        match self.bytes.get().checked_sub(bytes as u64) {
            Some(left) => {
                self.bytes.set(left);
                Ok(())
            }
            None => limit("the template makes more text than it may"),
        }
    }

    /// A string that was paid for or is not longer than one that was.
    pub(crate) fn string(&self, text: String) -> Res<Value> {
        self.charge(text.len())?;
        Ok(Value::str(text))
    }

    /// Runs `inner` one level deeper.
    pub(crate) fn deeper<T>(&self, inner: impl FnOnce() -> Res<T>) -> Res<T> {
        let Some(left) = self.depth.get().checked_sub(1) else {
            return limit("the template goes too deep; does a macro call itself without end?");
        };
        self.depth.set(left);
        let result = inner();
        self.depth.set(left + 1);
        result
    }

    /// Makes the names of a scope that is entered.
    pub(crate) fn declare(&self, frame: &Frame, symbols: &Symbols) {
        for (name, load) in symbols {
            match load {
                Load::Param => {}
                Load::Resolve => frame.declare(name, self.resolve(name)),
                Load::Alias => {
                    let outside = frame.parent().map(|outer| outer.find(name));
                    let value = if let Some(Lookup::Set(value)) = outside { Some(value) } else { None };
                    frame.declare(name, value);
                }
                Load::Unset => frame.declare(name, None),
            }
        }
    }

    /// A variable of the context, or a function that every template has.
    fn resolve(&self, name: &str) -> Option<Value> {
        self.context.borrow().get(name).cloned().or_else(|| Function::from_name(name).map(Value::Function))
    }

    pub(crate) fn variable(&self, frame: &Frame, name: &str) -> Value {
        let value = match frame.find(name) {
            Lookup::Set(value) => Some(value),
            Lookup::Unset => None,
            Lookup::Unknown => self.resolve(name),
        };
        value.unwrap_or_else(|| Value::undefined_name(name))
    }

    /// Sets a variable of a scope; of the outermost one, blocks see it too.
    pub(crate) fn assign(&self, frame: &Frame, top: bool, name: &Arc<str>, value: Value) {
        if top {
            self.context.borrow_mut().insert(name.clone(), value.clone());
        }
        frame.declare(name, Some(value));
    }

    pub(crate) fn namespace(&self, dict: Dict) -> Value {
        let namespace = Rc::new(RefCell::new(dict));
        self.namespaces.borrow_mut().push(namespace.clone());
        Value::Namespace(namespace)
    }

    /// Remembers a scope that a macro holds on to.
    pub(crate) fn keep(&self, frame: &Rc<Frame>) {
        self.frames.borrow_mut().push(frame.clone());
    }

    /// Empties whatever may hold itself, so that it is freed, and not one inside another without end.
    pub(crate) fn take_apart(&self) {
        for frame in self.frames.take() {
            frame.clear();
        }
        for namespace in self.namespaces.take() {
            let contents = std::mem::take(&mut *namespace.borrow_mut());
            drop(contents);
        }
        self.context.take();
    }

    /// Appends to the output or to a buffer.
    pub(crate) fn write(&self, out: &mut Out, text: &str) -> Res<()> {
        self.charge(text.len())?;
        out.text.push_str(text);
        Ok(())
    }

    /// The items of a value, as `iter()` gives them; those of a generator are gone from it then.
    pub(crate) fn items(&self, value: &Value) -> Res<Vec<Value>> {
        let items: VecDeque<Res<Value>> = std::mem::take(&mut *self.iterate(value)?.borrow_mut());
        items.into_iter().collect()
    }

    /// An iterator over a value; a generator is its own.
    pub(crate) fn iterate(&self, value: &Value) -> Res<Rc<RefCell<VecDeque<Res<Value>>>>> {
        if let Some(count) = value.len() {
            self.charge(16 * count)?;
        }
        let items: VecDeque<Res<Value>> = match value {
            Value::Undefined(_) => VecDeque::new(),
            Value::Str(text) | Value::Markup(text) => text.chars().map(|c| Ok(Value::str(c.to_string()))).collect(),
            Value::List(items) | Value::Tuple(items) => items.iter().cloned().map(Ok).collect(),
            Value::Dict(dict) => dict.keys().cloned().map(Ok).collect(),
            Value::View(view, dict) => dict.entries().iter().map(|entry| view.item(entry)).collect(),
            Value::Range(start, _, step) => {
                (0..range_len(value) as i128).map(|at| Ok(Value::Int(start + at * step))).collect()
            }
            Value::Iter(_, items) => return Ok(items.clone()),
            Value::Loop(_) => {
                return super::fault::unsupported("walking over the loop variable is not supported");
            }
            other => return fail(format!("'{}' object is not iterable", other.type_name())),
        };
        Ok(Rc::new(RefCell::new(items)))
    }

    /// Puts the line into a fault that has none.
    pub(crate) fn at<T>(result: Res<T>, line: u32) -> Res<T> {
        result.map_err(|fault: Box<Fault>| fault.at(line))
    }
}
