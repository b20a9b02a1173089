//! Expressions.

use std::cmp::Ordering;
use std::rc::Rc;

use super::args::Args;
use super::ast::{self, Cmp, Expr, ExprKind};
use super::fault::{Res, fail, unsupported};
use super::ops::Num;
use super::renderer::Renderer;
use super::value::{Dict, Frame, Value};

impl Renderer<'_> {
    /// The value of an expression.
    pub(crate) fn eval(&self, expr: &Expr, frame: &Rc<Frame>) -> Res<Value> {
        self.step()?;
        Self::at(self.deeper(|| self.evaluate(expr, frame)), expr.line)
    }

    fn evaluate(&self, expr: &Expr, frame: &Rc<Frame>) -> Res<Value> {
        match &*expr.kind {
            ExprKind::None => Ok(Value::None),
            ExprKind::Bool(b) => Ok(Value::Bool(*b)),
            ExprKind::Int(i) => Ok(Value::Int(*i)),
            ExprKind::Float(x) => Ok(Value::Float(*x)),
            ExprKind::Str(text) => Ok(Value::Str(text.clone())),
            ExprKind::Name(name) => Ok(self.variable(frame, name)),
            ExprKind::List(items) => Value::list(self.all(items, frame)?),
            ExprKind::Tuple(items) => Value::tuple(self.all(items, frame)?),
            ExprKind::Dict(pairs) => self.dict(pairs, frame),
            ExprKind::Attr(object, name) => Self::attribute(&self.eval(object, frame)?, name),
            ExprKind::Item(object, index) => match &*index.kind {
                ExprKind::Slice(start, stop, step) => {
                    let object = self.eval(object, frame)?;
                    let part = |part: &Option<Expr>| part.as_ref().map(|e| self.eval(e, frame)).transpose();
                    self.slice(&object, [part(start)?, part(stop)?, part(step)?])
                }
                _ => {
                    let object = self.eval(object, frame)?;
                    self.item(&object, &self.eval(index, frame)?)
                }
            },
            ExprKind::Call(..) => self.eval_call(expr, frame, None),
            ExprKind::Filter(input, name, args) => match input {
                Some(input) => {
                    let input = self.eval(input, frame)?;
                    self.filter(name, input, self.args(args, frame)?)
                }
                None => fail("a filter has nothing to filter"),
            },
            ExprKind::Test(value, name, args) => {
                let value = self.eval(value, frame)?;
                self.test(name, &value, self.args(args, frame)?).map(Value::Bool)
            }
            ExprKind::Not(value) => Ok(Value::Bool(!self.eval(value, frame)?.truthy())),
            ExprKind::Neg(value) => negate(&self.eval(value, frame)?),
            ExprKind::Pos(value) => match self.eval(value, frame)? {
                Value::Bool(b) => Ok(Value::Int(i128::from(b))),
                value @ (Value::Int(_) | Value::Float(_)) => Ok(value),
                Value::Undefined(message) => fail(&*message),
                other => fail(format!("bad operand type for unary +: '{}'", other.type_name())),
            },
            ExprKind::Binary(op, a, b) => {
                let a = self.eval(a, frame)?;
                self.binary(*op, &a, &self.eval(b, frame)?)
            }
            ExprKind::Concat(parts) => {
                let values = self.all(parts, frame)?;
                let mut text = String::new();
                for value in &values {
                    self.write_text(&mut text, value)?;
                }
                Ok(Value::str(text))
            }
            ExprKind::Compare(first, rest) => self.chain(first, rest, frame),
            ExprKind::And(a, b) => {
                let a = self.eval(a, frame)?;
                if a.truthy() { self.eval(b, frame) } else { Ok(a) }
            }
            ExprKind::Or(a, b) => {
                let a = self.eval(a, frame)?;
                if a.truthy() { Ok(a) } else { self.eval(b, frame) }
            }
            ExprKind::Cond(test, then, otherwise) => {
                if self.eval(test, frame)?.truthy() {
                    return self.eval(then, frame);
                }
                match otherwise {
                    Some(otherwise) => self.eval(otherwise, frame),
                    None => Ok(Value::undefined(format!(
                        "the inline if-expression on line {} evaluated to false and no else section was defined.",
                        expr.line
                    ))),
                }
            }
            ExprKind::NsRef(..) | ExprKind::Slice(..) => unsupported("this expression is not supported here"),
        }
    }

    fn all(&self, exprs: &[Expr], frame: &Rc<Frame>) -> Res<Vec<Value>> {
        exprs.iter().map(|expr| self.eval(expr, frame)).collect()
    }

    fn dict(&self, pairs: &[(Expr, Expr)], frame: &Rc<Frame>) -> Res<Value> {
        let mut dict = Dict::default();
        for (key, value) in pairs {
            let key = self.eval(key, frame)?;
            self.work(key.as_str().map_or(0, str::len))?;
            dict.insert(key, self.eval(value, frame)?)?;
        }
        Ok(Value::dict(dict))
    }

    /// `a < b < c`: true if each comparison is, and no later one is evaluated once one is not.
    fn chain(&self, first: &Expr, rest: &[(Cmp, Expr)], frame: &Rc<Frame>) -> Res<Value> {
        let mut left = self.eval(first, frame)?;
        for (op, right) in rest {
            let right = self.eval(right, frame)?;
            let ordered = |op: &str, ok: fn(Ordering) -> bool| -> Res<bool> {
                Ok(self.compare(op, &left, &right)?.is_some_and(ok))
            };
            let holds = match op {
                Cmp::Eq => self.equal(&left, &right)?,
                Cmp::Ne => !self.equal(&left, &right)?,
                Cmp::Lt => ordered("<", Ordering::is_lt)?,
                Cmp::Le => ordered("<=", Ordering::is_le)?,
                Cmp::Gt => ordered(">", Ordering::is_gt)?,
                Cmp::Ge => ordered(">=", Ordering::is_ge)?,
                Cmp::In => self.contains(&right, &left)?,
                Cmp::NotIn => !self.contains(&right, &left)?,
            };
            if !holds {
                return Ok(Value::Bool(false));
            }
            left = right;
        }
        Ok(Value::Bool(true))
    }

    fn args(&self, args: &ast::Args, frame: &Rc<Frame>) -> Res<Args> {
        let mut evaluated = Args { positional: self.all(&args.positional, frame)?, named: Vec::new() };
        if let Some(rest) = &args.rest {
            let rest = self.eval(rest, frame)?;
            evaluated.positional.extend(self.items(&rest)?);
        }
        for (name, value) in &args.named {
            evaluated.named.push((name.clone(), self.eval(value, frame)?));
        }
        if let Some(rest) = &args.named_rest {
            let Value::Dict(dict) = self.eval(rest, frame)? else {
                return fail("the argument after ** must be a mapping");
            };
            for (key, value) in dict.entries() {
                let Value::Str(key) = key else {
                    return fail("keywords must be strings");
                };
                if evaluated.named.iter().any(|(name, _)| name == key) {
                    return fail(format!("got multiple values for keyword argument '{key}'"));
                }
                evaluated.named.push((key.clone(), value.clone()));
            }
        }
        Ok(evaluated)
    }

    /// A call; a call block hands its body over as `caller`.
    pub(crate) fn eval_call(&self, call: &Expr, frame: &Rc<Frame>, caller: Option<Value>) -> Res<Value> {
        let ExprKind::Call(function, args) = &*call.kind else {
            return fail("expected a call");
        };
        let function = self.eval(function, frame)?;
        let mut args = self.args(args, frame)?;
        if let Some(caller) = caller {
            if args.named.iter().any(|(name, _)| &**name == "caller") {
                return fail("got multiple values for keyword argument 'caller'");
            }
            args.named.push(("caller".into(), caller));
        }
        self.deeper(|| self.call(&function, args))
    }

    /// The filters of a filter block or a set block, whose innermost one has the block's text as its input.
    pub(crate) fn filter_block(&self, filter: &Expr, text: Value, frame: &Rc<Frame>) -> Res<Value> {
        let ExprKind::Filter(input, name, args) = &*filter.kind else {
            return fail("expected a filter");
        };
        let input = match input {
            Some(inner) => self.deeper(|| self.filter_block(inner, text, frame))?,
            None => text,
        };
        self.filter(name, input, self.args(args, frame)?)
    }
}

fn negate(value: &Value) -> Res<Value> {
    match (Num::of(value), value) {
        (Some(Num::Int(i)), _) => match i.checked_neg() {
            Some(i) => Ok(Value::Int(i)),
            None => unsupported("integers of more than 127 bits are not supported"),
        },
        (Some(Num::Float(x)), _) => Ok(Value::Float(-x)),
        (None, Value::Undefined(message)) => fail(&**message),
        (None, other) => fail(format!("bad operand type for unary -: '{}'", other.type_name())),
    }
}
