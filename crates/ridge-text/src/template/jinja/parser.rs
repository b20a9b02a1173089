//! Statements: tokens to a tree. Expressions are in `expressions.rs`.

use std::sync::Arc;

use super::ast::{Body, Expr, ExprKind, For, MacroDef, Node, Stmt, Symbols, Template};
use super::fault::{Res, fail, limit};
use super::lexer::{Tok, tokenize};
use super::symbols;

/// Blocks nest no deeper than this.
const MAX_BLOCKS: u32 = 40;

/// Parses a template and finds out its scopes.
pub(crate) fn parse(source: &str) -> Res<Template> {
    let mut parser = Parser { tokens: tokenize(source)?, at: 0, blocks: 0, nested: 0 };
    let nodes = parser.until(&[]).map_err(|fault| fault.at(parser.line()))?;
    let mut template = Template { body: Body { symbols: Symbols::new(), nodes } };
    symbols::resolve(&mut template)?;
    Ok(template)
}

pub(crate) struct Parser {
    pub(crate) tokens: Vec<(Tok, u32)>,
    pub(crate) at: usize,
    blocks: u32,
    /// How deep the parser is in expressions.
    pub(crate) nested: u32,
}

impl Parser {
    pub(crate) fn tok(&self) -> &Tok {
        &self.tokens[self.at].0
    }

    pub(crate) fn peek(&self) -> &Tok {
        &self.tokens[(self.at + 1).min(self.tokens.len() - 1)].0
    }

    pub(crate) fn line(&self) -> u32 {
        self.tokens[self.at].1
    }

    pub(crate) fn next(&mut self) -> Tok {
        let tok = self.tok().clone();
        if self.at + 1 < self.tokens.len() {
            self.at += 1;
        }
        tok
    }

    pub(crate) fn is_op(&self, op: &str) -> bool {
        matches!(self.tok(), Tok::Op(o) if *o == op)
    }

    pub(crate) fn is_name(&self, name: &str) -> bool {
        matches!(self.tok(), Tok::Name(n) if n == name)
    }

    pub(crate) fn skip_op(&mut self, op: &str) -> bool {
        let is = self.is_op(op);
        if is {
            self.next();
        }
        is
    }

    pub(crate) fn skip_name(&mut self, name: &str) -> bool {
        let is = self.is_name(name);
        if is {
            self.next();
        }
        is
    }

    pub(crate) fn expect_op(&mut self, op: &'static str) -> Res<()> {
        if self.skip_op(op) { Ok(()) } else { fail(format!("expected '{op}', got {}", self.described())) }
    }

    fn expect_keyword(&mut self, name: &str) -> Res<()> {
        if self.skip_name(name) { Ok(()) } else { fail(format!("expected '{name}', got {}", self.described())) }
    }

    pub(crate) fn expect_name(&mut self) -> Res<Arc<str>> {
        match self.tok() {
            Tok::Name(name) => {
                let name = name.as_str().into();
                self.next();
                Ok(name)
            }
            _ => fail(format!("expected a name, got {}", self.described())),
        }
    }

    fn expect(&mut self, tok: &Tok, what: &str) -> Res<()> {
        if self.tok() == tok {
            self.next();
            Ok(())
        } else {
            fail(format!("expected {what}, got {}", self.described()))
        }
    }

    /// The current token for error messages.
    pub(crate) fn described(&self) -> String {
        match self.tok() {
            Tok::Data(_) => "text".to_owned(),
            Tok::PrintBegin => "'{{'".to_owned(),
            Tok::PrintEnd => "'}}'".to_owned(),
            Tok::BlockBegin => "'{%'".to_owned(),
            Tok::BlockEnd => "'%}'".to_owned(),
            Tok::Name(name) => format!("'{name}'"),
            Tok::Str(_) => "a string".to_owned(),
            Tok::Int(i) => format!("'{i}'"),
            Tok::Float(x) => format!("'{x}'"),
            Tok::Op(op) => format!("'{op}'"),
            Tok::End => "the end of the template".to_owned(),
        }
    }

    /// Statements up to a tag that begins with one of `ends`, whose name is the current token then.
    fn until(&mut self, ends: &[&str]) -> Res<Vec<Node>> {
        self.blocks += 1;
        if self.blocks > MAX_BLOCKS {
            return limit(format!("blocks nest more than {MAX_BLOCKS} deep"));
        }
        let mut nodes = Vec::new();
        loop {
            let line = self.line();
            match self.next() {
                Tok::Data(text) => nodes.push(Node { line, stmt: Stmt::Text(text.into()) }),
                Tok::PrintBegin => {
                    let value = self.tuple(true, &[])?;
                    self.expect(&Tok::PrintEnd, "'}}'")?;
                    nodes.push(Node { line, stmt: Stmt::Print(value) });
                }
                Tok::BlockBegin => {
                    if matches!(self.tok(), Tok::Name(name) if ends.contains(&name.as_str())) {
                        break;
                    }
                    let line = self.line();
                    let stmt = self.statement()?;
                    self.expect(&Tok::BlockEnd, "'%}'")?;
                    nodes.extend(stmt.into_iter().map(|stmt| Node { line, stmt }));
                }
                Tok::End if ends.is_empty() => break,
                _ => return fail(format!("unexpected end of the template, looking for '{}'", ends.join("' or '"))),
            }
        }
        self.blocks -= 1;
        Ok(nodes)
    }

    /// The rest of a tag, then statements up to one of `ends`, whose name is the current token then.
    fn branch(&mut self, ends: &[&str]) -> Res<Vec<Node>> {
        self.skip_op(":");
        self.expect(&Tok::BlockEnd, "'%}'")?;
        self.until(ends)
    }

    /// [`branch`](Self::branch) to the one tag that ends the statement.
    fn body(&mut self, end: &str) -> Res<Body> {
        let nodes = self.branch(&[end])?;
        self.next();
        Ok(Body { symbols: Symbols::new(), nodes })
    }

    fn statement(&mut self) -> Res<Vec<Stmt>> {
        let tag = self.expect_name()?;
        Ok(vec![match &*tag {
            "set" => self.set()?,
            "for" => self.for_loop()?,
            "if" => self.condition()?,
            "macro" => {
                let name = self.expect_name()?;
                let (params, defaults) = self.signature()?;
                let body = self.body("endmacro")?;
                Stmt::Macro(Arc::new(MacroDef::new(Some(name), params, defaults, body)))
            }
            "call" => {
                let (params, defaults) = if self.is_op("(") { self.signature()? } else { (vec![], vec![]) };
                let call = self.expression(true)?;
                if !matches!(*call.kind, ExprKind::Call(..)) {
                    return fail("expected a call");
                }
                let body = self.body("endcall")?;
                Stmt::Call { call, caller: Arc::new(MacroDef::new(None, params, defaults, body)) }
            }
            "filter" => {
                let filter = self.filters(None, true)?.map_or_else(|| fail("expected a filter"), Ok)?;
                Stmt::Filter { filter, body: self.body("endfilter")? }
            }
            "with" => self.with()?,
            "generation" => Stmt::Generation(self.body("endgeneration")?),
            "print" => {
                let mut prints = Vec::new();
                while self.tok() != &Tok::BlockEnd {
                    if !prints.is_empty() {
                        self.expect_op(",")?;
                    }
                    prints.push(Stmt::Print(self.expression(true)?));
                }
                return Ok(prints);
            }
            "block" => {
                let name = self.expect_name()?;
                if self.skip_name("scoped") || self.skip_name("required") {
                    return super::fault::unsupported("blocks that are scoped or required are not supported");
                }
                let body = self.body("endblock")?;
                self.skip_name(&name);
                Stmt::Block(body)
            }
            "break" => Stmt::Break,
            "continue" => Stmt::Continue,
            "include" | "import" | "from" | "extends" => {
                while !matches!(self.tok(), Tok::BlockEnd | Tok::End) {
                    self.next();
                }
                Stmt::Refuse("a chat template cannot load other templates")
            }
            "autoescape" => return super::fault::unsupported("{% autoescape %} is not supported"),
            _ => return fail(format!("unknown tag '{tag}'")),
        }])
    }

    fn set(&mut self) -> Res<Stmt> {
        let target = self.target(true, &[])?;
        if self.skip_op("=") {
            return Ok(Stmt::Set { target, value: self.tuple(true, &[])? });
        }
        let filter = self.filters(None, false)?;
        Ok(Stmt::SetBlock { target, filter, body: self.body("endset")? })
    }

    fn for_loop(&mut self) -> Res<Stmt> {
        let target = self.target(false, &["in"])?;
        self.expect_keyword("in")?;
        let iter = self.tuple(false, &["recursive"])?;
        let test = if self.skip_name("if") { Some((self.expression(true)?, Symbols::new())) } else { None };
        let recursive = self.skip_name("recursive");
        let nodes = self.branch(&["endfor", "else"])?;
        let otherwise = if self.next() == Tok::Name("else".to_owned()) { Some(self.body("endfor")?) } else { None };
        let body = Body { symbols: Symbols::new(), nodes };
        Ok(Stmt::For(Arc::new(For { target, iter, test, recursive, body, otherwise })))
    }

    fn condition(&mut self) -> Res<Stmt> {
        let mut branches = Vec::new();
        loop {
            let test = self.tuple(false, &[])?;
            branches.push((test, self.branch(&["elif", "else", "endif"])?));
            match self.next() {
                Tok::Name(name) if name == "elif" => {}
                Tok::Name(name) if name == "else" => {
                    let otherwise = self.branch(&["endif"])?;
                    self.next();
                    return Ok(Stmt::If { branches, otherwise });
                }
                _ => return Ok(Stmt::If { branches, otherwise: Vec::new() }),
            }
        }
    }

    fn with(&mut self) -> Res<Stmt> {
        let (mut targets, mut values) = (Vec::new(), Vec::new());
        while self.tok() != &Tok::BlockEnd {
            if !targets.is_empty() {
                self.expect_op(",")?;
            }
            targets.push(self.target(false, &[])?);
            self.expect_op("=")?;
            values.push(self.expression(true)?);
        }
        Ok(Stmt::With { targets, values, body: self.body("endwith")? })
    }

    /// The parameters of a macro and the defaults of the last ones.
    fn signature(&mut self) -> Res<(Vec<Arc<str>>, Vec<Expr>)> {
        let (mut params, mut defaults) = (Vec::new(), Vec::new());
        self.expect_op("(")?;
        while !self.is_op(")") {
            if !params.is_empty() {
                self.expect_op(",")?;
            }
            let name = self.expect_name()?;
            if params.contains(&name) {
                return fail(format!("duplicate argument '{name}'"));
            }
            check_target(&name)?;
            params.push(name);
            if self.skip_op("=") {
                defaults.push(self.expression(true)?);
            } else if !defaults.is_empty() {
                return fail("non-default argument follows default argument");
            }
        }
        self.expect_op(")")?;
        Ok((params, defaults))
    }

    /// What an assignment assigns to: a name, a tuple of names, or with `namespaces` an attribute of a name.
    fn target(&mut self, namespaces: bool, ends: &[&str]) -> Res<Expr> {
        let line = self.line();
        let mut targets = Vec::new();
        let mut tuple = false;
        loop {
            let end = matches!(self.tok(), Tok::PrintEnd | Tok::BlockEnd | Tok::Op(")"))
                || matches!(self.tok(), Tok::Name(n) if ends.contains(&n.as_str()));
            if end {
                break;
            }
            targets.push(self.target_part(namespaces)?);
            if !self.skip_op(",") {
                break;
            }
            tuple = true;
        }
        match targets.pop() {
            Some(only) if !tuple => Ok(only),
            Some(last) => {
                targets.push(last);
                Ok(Expr::new(line, ExprKind::Tuple(targets)))
            }
            None => fail(format!("expected a name to assign to, got {}", self.described())),
        }
    }

    fn target_part(&mut self, namespaces: bool) -> Res<Expr> {
        let line = self.line();
        self.nested += 1;
        if self.nested > 20 {
            return limit("targets nest more than 20 deep");
        }
        let part = if self.skip_op("(") {
            let part = self.target(false, &[])?;
            self.expect_op(")")?;
            part
        } else {
            let name = self.expect_name()?;
            if namespaces && self.skip_op(".") {
                let attr = self.expect_name()?;
                Expr::new(line, ExprKind::NsRef(name, attr))
            } else {
                check_target(&name)?;
                Expr::new(line, ExprKind::Name(name))
            }
        };
        self.nested -= 1;
        Ok(part)
    }
}

impl MacroDef {
    fn new(name: Option<Arc<str>>, params: Vec<Arc<str>>, defaults: Vec<Expr>, body: Body) -> Self {
        Self { name, params, defaults, body, uses_caller: false, uses_kwargs: false, uses_varargs: false }
    }
}

fn check_target(name: &str) -> Res<()> {
    if matches!(name, "true" | "false" | "none" | "True" | "False" | "None") {
        return fail(format!("can't assign to '{name}'"));
    }
    Ok(())
}
