//! Statements.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use super::args::Args;
use super::ast::{Body, Expr, ExprKind, For, Node, Stmt};
use super::fault::{Res, fail};
use super::renderer::{Out, Renderer};
use super::value::{Dict, Frame, Loop, Macro, Value};

/// How a row of statements ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    Next,
    Break,
    Continue,
}

impl Renderer<'_> {
    /// Runs statements in a scope; `top` if that is the template's own.
    pub(crate) fn nodes(&self, nodes: &[Node], frame: &Rc<Frame>, top: bool, out: &mut Out) -> Res<Flow> {
        for node in nodes {
            self.step()?;
            let flow = Self::at(self.statement(&node.stmt, frame, top, out), node.line)?;
            if flow != Flow::Next {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    /// Runs statements in a scope of their own into a buffer.
    fn buffered(&self, body: &Body, frame: &Rc<Frame>) -> Res<(String, Flow, Rc<Frame>)> {
        let inner = Rc::new(Frame::new(Some(frame.clone())));
        self.declare(&inner, &body.symbols);
        let mut buffer = Out { text: String::new(), root: false };
        let flow = self.deeper(|| self.nodes(&body.nodes, &inner, false, &mut buffer))?;
        Ok((buffer.text, flow, inner))
    }

    fn statement(&self, stmt: &Stmt, frame: &Rc<Frame>, top: bool, out: &mut Out) -> Res<Flow> {
        match stmt {
            Stmt::Text(text) => self.write(out, text)?,
            Stmt::Print(expr) => {
                let value = self.eval(expr, frame)?;
                match value.as_str() {
                    Some(text) => self.write(out, text)?,
                    None => self.write(out, &self.text(&value)?)?,
                }
            }
            Stmt::Set { target, value } => {
                let value = self.eval(value, frame)?;
                self.check_namespaces(target, frame)?;
                self.set(target, value, frame, top)?;
            }
            Stmt::SetBlock { target, filter, body } => {
                let (text, flow, inner) = self.buffered(body, frame)?;
                if flow != Flow::Next {
                    return Ok(flow);
                }
                let value = Value::str(text);
                let value = match filter {
                    Some(filter) => self.filter_block(filter, value, &inner)?,
                    None => value,
                };
                self.check_namespaces(target, frame)?;
                self.set(target, value, frame, top)?;
            }
            Stmt::For(each) => return self.deeper(|| self.for_loop(each, frame, out)),
            Stmt::If { branches, otherwise } => {
                for (test, nodes) in branches {
                    if self.eval(test, frame)?.truthy() {
                        return self.deeper(|| self.nodes(nodes, frame, top, out));
                    }
                }
                return self.deeper(|| self.nodes(otherwise, frame, top, out));
            }
            Stmt::Macro(def) => {
                self.keep(frame);
                let value = Value::Macro(Rc::new(Macro { def: def.clone(), scope: frame.clone() }));
                if let Some(name) = &def.name {
                    self.assign(frame, top, name, value);
                }
            }
            Stmt::Call { call, caller } => {
                self.keep(frame);
                let caller = Value::Macro(Rc::new(Macro { def: caller.clone(), scope: frame.clone() }));
                let value = self.eval_call(call, frame, Some(caller))?;
                self.write_string(out, &value)?;
            }
            Stmt::Filter { filter, body } => {
                let (text, flow, inner) = self.buffered(body, frame)?;
                if flow != Flow::Next {
                    return Ok(flow);
                }
                let value = self.filter_block(filter, Value::str(text), &inner)?;
                self.write_string(out, &value)?;
            }
            Stmt::With { targets, values, body } => {
                let inner = Rc::new(Frame::new(Some(frame.clone())));
                self.declare(&inner, &body.symbols);
                for (target, value) in targets.iter().zip(values) {
                    let value = self.eval(value, frame)?;
                    self.set(target, value, &inner, false)?;
                }
                return self.deeper(|| self.nodes(&body.nodes, &inner, false, out));
            }
            Stmt::Generation(body) => {
                let (text, _, _) = self.buffered(body, frame)?;
                let start = out.text.len();
                match &mut *self.generations.borrow_mut() {
                    Some(places) if out.root => places.push(start..start + text.len()),
                    places => *places = None,
                }
                self.write(out, &text)?;
            }
            Stmt::Block(body) => {
                let inner = Rc::new(Frame::new(None));
                self.declare(&inner, &body.symbols);
                self.deeper(|| self.nodes(&body.nodes, &inner, false, out))?;
            }
            Stmt::Break => return Ok(Flow::Break),
            Stmt::Continue => return Ok(Flow::Continue),
            Stmt::Refuse(why) => return fail(*why),
        }
        Ok(Flow::Next)
    }

    /// Writes what a call block or a filter block gave, which must be a string.
    fn write_string(&self, out: &mut Out, value: &Value) -> Res<()> {
        match value.as_str() {
            Some(text) => self.write(out, text),
            None => fail(format!("a block must return a string, but returned a {}", value.type_name())),
        }
    }

    /// Attributes are set of namespaces only, and that is found out before anything is set.
    fn check_namespaces(&self, target: &Expr, frame: &Frame) -> Res<()> {
        match &*target.kind {
            ExprKind::NsRef(name, _) => match self.variable(frame, name) {
                Value::Namespace(_) => Ok(()),
                _ => fail("cannot assign attribute on non-namespace object"),
            },
            kind => {
                let mut result = Ok(());
                kind.children(&mut |child| {
                    if result.is_ok() {
                        result = self.check_namespaces(child, frame);
                    }
                });
                result
            }
        }
    }

    fn set(&self, target: &Expr, value: Value, frame: &Rc<Frame>, top: bool) -> Res<()> {
        match &*target.kind {
            ExprKind::Name(name) => self.assign(frame, top, name, value),
            ExprKind::NsRef(name, attr) => {
                check_attribute(attr)?;
                if let Value::Namespace(namespace) = self.variable(frame, name) {
                    namespace.borrow_mut().insert_str(attr, value)?;
                }
            }
            ExprKind::Tuple(targets) => {
                let items = self.items(&value)?;
                if items.len() > targets.len() {
                    return fail(format!("too many values to unpack (expected {})", targets.len()));
                }
                if items.len() < targets.len() {
                    let (want, got) = (targets.len(), items.len());
                    return fail(format!("not enough values to unpack (expected {want}, got {got})"));
                }
                for (target, item) in targets.iter().zip(items) {
                    self.set(target, item, frame, top)?;
                }
            }
            _ => return fail("cannot assign to this"),
        }
        Ok(())
    }

    fn for_loop(&self, each: &Arc<For>, frame: &Rc<Frame>, out: &mut Out) -> Res<Flow> {
        let value = self.eval(&each.iter, frame)?;
        if each.recursive {
            let text = self.recurse(each, frame, &value, 0)?;
            self.write(out, &text)?;
            return Ok(Flow::Next);
        }
        self.iterations(each, frame, &value, 0, out)
    }

    /// The text of a recursive loop over `value`.
    pub(crate) fn recurse(&self, each: &Arc<For>, frame: &Rc<Frame>, value: &Value, depth0: usize) -> Res<String> {
        let mut buffer = Out { text: String::new(), root: false };
        self.deeper(|| self.iterations(each, frame, value, depth0, &mut buffer))?;
        Ok(buffer.text)
    }

    fn iterations(&self, each: &Arc<For>, frame: &Rc<Frame>, value: &Value, depth0: usize, out: &mut Out) -> Res<Flow> {
        let mut known_length = value.len();
        let mut rest = self.iterate(value)?;
        if let Some((test, symbols)) = &each.test {
            known_length = None;
            let mut kept = VecDeque::new();
            loop {
                let next = rest.borrow_mut().pop_front();
                let Some(item) = next else { break };
                let passed = item.and_then(|item| {
                    let inner = Rc::new(Frame::new(Some(frame.clone())));
                    self.declare(&inner, symbols);
                    self.set(&each.target, item.clone(), &inner, false)?;
                    Ok(self.eval(test, &inner)?.truthy().then_some(item))
                });
                match passed {
                    Ok(item) => kept.extend(item.map(Ok)),
                    Err(fault) => {
                        // It is raised when the loop gets there.
                        kept.push_back(Err(fault));
                        break;
                    }
                }
            }
            rest = Rc::new(RefCell::new(kept));
        }
        let state = Rc::new(Loop {
            rest,
            known_length: Cell::new(known_length),
            index0: Cell::new(0),
            before: RefCell::default(),
            current: RefCell::default(),
            last_changed: RefCell::default(),
            depth0,
            recursive: each.recursive.then(|| (each.clone(), frame.clone())),
        });
        let name: Arc<str> = "loop".into();
        let (mut ran, mut completed) = (false, false);
        loop {
            let next = state.rest.borrow_mut().pop_front();
            let Some(item) = next else { break };
            let item = item?;
            self.step()?;
            if ran {
                state.index0.set(state.index0.get() + 1);
            }
            ran = true;
            let current = state.current.replace(Some(item.clone()));
            state.before.replace(current);
            let inner = Rc::new(Frame::new(Some(frame.clone())));
            self.set(&each.target, item, &inner, false)?;
            inner.declare(&name, Some(Value::Loop(state.clone())));
            self.declare(&inner, &each.body.symbols);
            match self.nodes(&each.body.nodes, &inner, false, out)? {
                Flow::Next => completed = true,
                Flow::Continue => {}
                Flow::Break => break,
            }
        }
        // jinja2 takes the other branch unless an iteration came to its end, which one with a break or continue did not.
        if !completed && let Some(otherwise) = &each.otherwise {
            let inner = Rc::new(Frame::new(Some(frame.clone())));
            self.declare(&inner, &otherwise.symbols);
            return self.nodes(&otherwise.nodes, &inner, false, out);
        }
        Ok(Flow::Next)
    }

    /// Calls a macro.
    pub(crate) fn call_macro(&self, called: &Macro, args: Args) -> Res<Value> {
        let def = &called.def;
        let name = def.name.as_deref().map_or("None".to_owned(), |name| format!("'{name}'"));
        let frame = Rc::new(Frame::new(Some(called.scope.clone())));
        let Args { positional, mut named } = args;
        let mut positional = positional.into_iter();
        let mut take = |name: &str| named.iter().position(|(n, _)| &**n == name).map(|at| named.remove(at).1);
        // The first ones by place, the others by name; without either they are unset until their default is evaluated.
        let given: Vec<Option<Value>> =
            def.params.iter().map(|param| positional.next().or_else(|| take(param))).collect();
        let caller = if def.uses_caller { take("caller").filter(|c| !matches!(c, Value::None)) } else { None };
        let more: Vec<Value> = positional.collect();
        if !def.uses_kwargs
            && let Some((key, _)) = named.first()
        {
            return fail(format!("macro {name} takes no keyword argument '{key}'"));
        }
        if !def.uses_varargs && !more.is_empty() {
            return fail(format!("macro {name} takes not more than {} argument(s)", def.params.len()));
        }
        for (param, value) in def.params.iter().zip(&given) {
            frame.declare(param, value.clone());
        }
        let special = |used: bool, name: &str, value: Value| {
            if used {
                frame.declare(&name.into(), Some(value));
            }
        };
        let undefined_caller = || Value::undefined("No caller defined");
        special(def.uses_caller, "caller", caller.unwrap_or_else(undefined_caller));
        let kwargs = named.into_iter().map(|(key, value)| (Value::Str(key), value));
        special(def.uses_kwargs, "kwargs", Value::dict(Dict::from_entries(kwargs)?));
        special(def.uses_varargs, "varargs", Value::tuple(more)?);
        self.declare(&frame, &def.body.symbols);
        let first_default = def.params.len() - def.defaults.len();
        for (at, param) in def.params.iter().enumerate().filter(|(at, _)| given[*at].is_none()) {
            let value = match at.checked_sub(first_default) {
                Some(default) => self.eval(&def.defaults[default], &frame)?,
                None => Value::undefined(format!("parameter '{param}' was not provided")),
            };
            frame.declare(param, Some(value));
        }
        let mut buffer = Out { text: String::new(), root: false };
        self.deeper(|| self.nodes(&def.body.nodes, &frame, false, &mut buffer))?;
        Ok(Value::str(buffer.text))
    }
}

/// Namespaces take no names that begin with an underscore.
pub(crate) fn check_attribute(name: &str) -> Res<()> {
    if name.starts_with('_') {
        return fail(format!(
            "chat templates cannot store underscore-prefixed attributes on a namespace, but got '{name}'"
        ));
    }
    Ok(())
}
