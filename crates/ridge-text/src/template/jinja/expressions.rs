//! Expressions: jinja2's grammar, with its binding of operators, which is not Python's (`-2 ** 2` is 4).

use super::ast::{Args, Cmp, Expr, ExprKind, Op};
use super::fault::{Res, fail, limit};
use super::lexer::Tok;
use super::parser::Parser;

/// Brackets and prefixes nest no deeper than this.
const MAX_NESTED: u32 = 80;
/// No tree of operators is deeper than this, chains included.
const DEEPEST: u32 = 160;

impl Parser {
    fn make(line: u32, kind: ExprKind) -> Res<Expr> {
        let expr = Expr::new(line, kind);
        if expr.depth > DEEPEST {
            return limit(format!("an expression is more than {DEEPEST} operations deep"));
        }
        Ok(expr)
    }

    fn enter(&mut self) -> Res<()> {
        self.nested += 1;
        if self.nested > MAX_NESTED {
            return limit(format!("an expression nests more than {MAX_NESTED} deep"));
        }
        Ok(())
    }

    /// An expression; with `conditional`, `a if b else c` is one.
    pub(crate) fn expression(&mut self, conditional: bool) -> Res<Expr> {
        self.enter()?;
        let expr = if conditional { self.cond() } else { self.or() }?;
        self.nested -= 1;
        Ok(expr)
    }

    /// Expressions with commas between, which are a tuple, or one without.
    pub(crate) fn tuple(&mut self, conditional: bool, ends: &[&str]) -> Res<Expr> {
        match self.maybe_tuple(conditional, ends)? {
            Some(expr) => Ok(expr),
            None => fail(format!("expected an expression, got {}", self.described())),
        }
    }

    fn maybe_tuple(&mut self, conditional: bool, ends: &[&str]) -> Res<Option<Expr>> {
        let line = self.line();
        let mut items = Vec::new();
        let mut tuple = false;
        loop {
            let end = matches!(self.tok(), Tok::PrintEnd | Tok::BlockEnd | Tok::Op(")"))
                || matches!(self.tok(), Tok::Name(n) if ends.contains(&n.as_str()));
            if end {
                break;
            }
            items.push(self.expression(conditional)?);
            if !self.skip_op(",") {
                break;
            }
            tuple = true;
        }
        if tuple {
            return Self::make(line, ExprKind::Tuple(items)).map(Some);
        }
        Ok(items.pop())
    }

    fn cond(&mut self) -> Res<Expr> {
        let mut line = self.line();
        let mut then = self.or()?;
        while self.skip_name("if") {
            let test = self.or()?;
            let otherwise = if self.skip_name("else") { Some(self.expression(true)?) } else { None };
            then = Self::make(line, ExprKind::Cond(test, then, otherwise))?;
            line = self.line();
        }
        Ok(then)
    }

    fn or(&mut self) -> Res<Expr> {
        let line = self.line();
        let mut left = self.and()?;
        while self.skip_name("or") {
            left = Self::make(line, ExprKind::Or(left, self.and()?))?;
        }
        Ok(left)
    }

    fn and(&mut self) -> Res<Expr> {
        let line = self.line();
        let mut left = self.not()?;
        while self.skip_name("and") {
            left = Self::make(line, ExprKind::And(left, self.not()?))?;
        }
        Ok(left)
    }

    fn not(&mut self) -> Res<Expr> {
        let line = self.line();
        if !self.skip_name("not") {
            return self.compare();
        }
        self.enter()?;
        let negated = self.not()?;
        self.nested -= 1;
        Self::make(line, ExprKind::Not(negated))
    }

    fn compare(&mut self) -> Res<Expr> {
        let line = self.line();
        let left = self.sum()?;
        let mut rest = Vec::new();
        loop {
            let op = match self.tok() {
                Tok::Op("==") => Cmp::Eq,
                Tok::Op("!=") => Cmp::Ne,
                Tok::Op("<") => Cmp::Lt,
                Tok::Op("<=") => Cmp::Le,
                Tok::Op(">") => Cmp::Gt,
                Tok::Op(">=") => Cmp::Ge,
                Tok::Name(n) if n == "in" => Cmp::In,
                Tok::Name(n) if n == "not" && matches!(self.peek(), Tok::Name(n) if n == "in") => {
                    self.next();
                    Cmp::NotIn
                }
                _ => break,
            };
            self.next();
            rest.push((op, self.sum()?));
        }
        if rest.is_empty() { Ok(left) } else { Self::make(line, ExprKind::Compare(left, rest)) }
    }

    fn sum(&mut self) -> Res<Expr> {
        self.binary(&[("+", Op::Add), ("-", Op::Sub)], Self::concat)
    }

    fn concat(&mut self) -> Res<Expr> {
        let line = self.line();
        let mut parts = vec![self.product()?];
        while self.skip_op("~") {
            parts.push(self.product()?);
        }
        match parts.len() {
            1 => Ok(parts.remove(0)),
            _ => Self::make(line, ExprKind::Concat(parts)),
        }
    }

    fn product(&mut self) -> Res<Expr> {
        self.binary(&[("*", Op::Mul), ("/", Op::Div), ("//", Op::FloorDiv), ("%", Op::Mod)], Self::power)
    }

    fn power(&mut self) -> Res<Expr> {
        self.binary(&[("**", Op::Pow)], |parser| parser.unary(true))
    }

    /// Operators of one rank, which bind to the left.
    fn binary(&mut self, ops: &[(&str, Op)], operand: fn(&mut Self) -> Res<Expr>) -> Res<Expr> {
        let line = self.line();
        let mut left = operand(self)?;
        while let Some(&(_, op)) = ops.iter().find(|(text, _)| self.is_op(text)) {
            self.next();
            left = Self::make(line, ExprKind::Binary(op, left, operand(self)?))?;
        }
        Ok(left)
    }

    fn unary(&mut self, with_filter: bool) -> Res<Expr> {
        self.enter()?;
        let line = self.line();
        let expr = if self.skip_op("-") {
            Self::make(line, ExprKind::Neg(self.unary(false)?))?
        } else if self.skip_op("+") {
            Self::make(line, ExprKind::Pos(self.unary(false)?))?
        } else {
            self.primary()?
        };
        let mut expr = self.postfix(expr)?;
        if with_filter {
            loop {
                let line = self.line();
                if self.is_op("|") {
                    // There is an expression, so there is one with a filter around it.
                    let Some(filtered) = self.filters(Some(expr), false)? else {
                        return fail("expected a filter");
                    };
                    expr = filtered;
                } else if self.skip_name("is") {
                    expr = self.test(expr, line)?;
                } else if self.is_op("(") {
                    expr = Self::make(line, ExprKind::Call(expr, self.args()?))?;
                } else {
                    break;
                }
            }
        }
        self.nested -= 1;
        Ok(expr)
    }

    fn primary(&mut self) -> Res<Expr> {
        let line = self.line();
        let kind = match self.tok().clone() {
            Tok::Name(name) => {
                self.next();
                match name.as_str() {
                    "true" | "True" => ExprKind::Bool(true),
                    "false" | "False" => ExprKind::Bool(false),
                    "none" | "None" => ExprKind::None,
                    _ => ExprKind::Name(name.into()),
                }
            }
            Tok::Str(mut text) => {
                self.next();
                while let Tok::Str(more) = self.tok() {
                    text.push_str(more);
                    self.next();
                }
                ExprKind::Str(text.into())
            }
            Tok::Int(i) => {
                self.next();
                ExprKind::Int(i)
            }
            Tok::Float(x) => {
                self.next();
                ExprKind::Float(x)
            }
            Tok::Op("(") => {
                self.next();
                let inner = self.maybe_tuple(true, &[])?;
                self.expect_op(")")?;
                return inner.map_or_else(|| Self::make(line, ExprKind::Tuple(Vec::new())), Ok);
            }
            Tok::Op("[") => {
                self.next();
                let mut items = Vec::new();
                while !self.is_op("]") {
                    items.push(self.expression(true)?);
                    if !self.skip_op(",") {
                        break;
                    }
                }
                self.expect_op("]")?;
                ExprKind::List(items)
            }
            Tok::Op("{") => {
                self.next();
                let mut pairs = Vec::new();
                while !self.is_op("}") {
                    let key = self.expression(true)?;
                    self.expect_op(":")?;
                    pairs.push((key, self.expression(true)?));
                    if !self.skip_op(",") {
                        break;
                    }
                }
                self.expect_op("}")?;
                ExprKind::Dict(pairs)
            }
            _ => return fail(format!("expected an expression, got {}", self.described())),
        };
        Self::make(line, kind)
    }

    fn postfix(&mut self, mut expr: Expr) -> Res<Expr> {
        loop {
            let line = self.line();
            if self.skip_op(".") {
                expr = match self.next() {
                    Tok::Name(name) => Self::make(line, ExprKind::Attr(expr, name.into()))?,
                    Tok::Int(i) => Self::make(line, ExprKind::Item(expr, Expr::new(line, ExprKind::Int(i))))?,
                    _ => return fail("expected a name or a number behind '.'"),
                };
            } else if self.skip_op("[") {
                let mut items = Vec::new();
                while !self.is_op("]") {
                    if !items.is_empty() {
                        self.expect_op(",")?;
                    }
                    items.push(self.subscript()?);
                }
                self.expect_op("]")?;
                let item = match items.len() {
                    1 => items.remove(0),
                    _ => Self::make(line, ExprKind::Tuple(items))?,
                };
                expr = Self::make(line, ExprKind::Item(expr, item))?;
            } else if self.is_op("(") {
                expr = Self::make(line, ExprKind::Call(expr, self.args()?))?;
            } else {
                return Ok(expr);
            }
        }
    }

    /// What stands in square brackets: an expression or a slice.
    fn subscript(&mut self) -> Res<Expr> {
        let line = self.line();
        let start = if self.is_op(":") { None } else { Some(self.expression(true)?) };
        if !self.skip_op(":") {
            return start.map_or_else(|| fail("expected a subscript"), Ok);
        }
        let ends = |parser: &Self| parser.is_op("]") || parser.is_op(",");
        let stop = if self.is_op(":") || ends(self) { None } else { Some(self.expression(true)?) };
        let step = if self.skip_op(":") && !ends(self) { Some(self.expression(true)?) } else { None };
        Self::make(line, ExprKind::Slice(start, stop, step))
    }

    fn args(&mut self) -> Res<Args> {
        let mut args = Args::default();
        self.expect_op("(")?;
        while !self.is_op(")") {
            let ensure = |ok: bool| if ok { Ok(()) } else { fail("invalid syntax for function call expression") };
            if self.skip_op("*") {
                ensure(args.rest.is_none() && args.named_rest.is_none())?;
                args.rest = Some(self.expression(true)?);
            } else if self.skip_op("**") {
                ensure(args.named_rest.is_none())?;
                args.named_rest = Some(self.expression(true)?);
            } else if matches!(self.tok(), Tok::Name(_)) && self.peek() == &Tok::Op("=") {
                ensure(args.named_rest.is_none())?;
                let name = self.expect_name()?;
                self.next();
                if args.named.iter().any(|(n, _)| *n == name) {
                    return fail(format!("keyword argument repeated: {name}"));
                }
                args.named.push((name, self.expression(true)?));
            } else {
                ensure(args.rest.is_none() && args.named_rest.is_none() && args.named.is_empty())?;
                args.positional.push(self.expression(true)?);
            }
            if !self.skip_op(",") {
                break;
            }
        }
        self.expect_op(")")?;
        Ok(args)
    }

    /// The name of a filter or test, which may have dots.
    fn dotted_name(&mut self) -> Res<std::sync::Arc<str>> {
        let mut name = self.expect_name()?;
        while self.skip_op(".") {
            name = format!("{name}.{}", self.expect_name()?).into();
        }
        Ok(name)
    }

    /// Filters behind `expr`; `inline` if the first one has no bar before it.
    pub(crate) fn filters(&mut self, mut expr: Option<Expr>, mut inline: bool) -> Res<Option<Expr>> {
        while inline || self.skip_op("|") {
            inline = false;
            let line = self.line();
            let name = self.dotted_name()?;
            let args = if self.is_op("(") { self.args()? } else { Args::default() };
            expr = Some(Self::make(line, ExprKind::Filter(expr, name, args))?);
        }
        Ok(expr)
    }

    fn test(&mut self, expr: Expr, line: u32) -> Res<Expr> {
        let negated = self.skip_name("not");
        let name = self.dotted_name()?;
        let mut args = Args::default();
        let operand = match self.tok() {
            Tok::Op("(") => {
                args = self.args()?;
                false
            }
            Tok::Name(n) if n == "is" => return fail("tests cannot be chained with is"),
            Tok::Name(n) => !matches!(n.as_str(), "else" | "or" | "and"),
            Tok::Str(_) | Tok::Int(_) | Tok::Float(_) | Tok::Op("[" | "{") => true,
            _ => false,
        };
        if operand {
            let operand = self.primary()?;
            args.positional.push(self.postfix(operand)?);
        }
        let test = Self::make(line, ExprKind::Test(expr, name, args))?;
        if negated { Self::make(line, ExprKind::Not(test)) } else { Ok(test) }
    }
}
