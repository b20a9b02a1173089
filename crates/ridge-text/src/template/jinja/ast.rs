//! A parsed template.

use std::sync::Arc;

/// A whole template.
#[derive(Debug, Default)]
pub(crate) struct Template {
    pub(crate) body: Body,
}

/// Statements that run in a scope of their own.
#[derive(Debug, Default)]
pub(crate) struct Body {
    pub(crate) symbols: Symbols,
    pub(crate) nodes: Vec<Node>,
}

/// The names that a scope owns and what they are when it is entered; filled in by `symbols.rs`.
pub(crate) type Symbols = Vec<(Arc<str>, Load)>;

/// What a name of a scope is when the scope is entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Load {
    /// It is set by whoever enters.
    Param,
    /// The variable that was given to the template, if there is one.
    Resolve,
    /// What it is in the scope outside.
    Alias,
    /// Nothing yet.
    Unset,
}

/// A statement and its line.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) line: u32,
    pub(crate) stmt: Stmt,
}

#[derive(Debug)]
pub(crate) enum Stmt {
    Text(Arc<str>),
    Print(Expr),
    Set {
        target: Expr,
        value: Expr,
    },
    SetBlock {
        target: Expr,
        filter: Option<Expr>,
        body: Body,
    },
    For(Arc<For>),
    /// Conditions with their branches, and the last branch.
    If {
        branches: Vec<(Expr, Vec<Node>)>,
        otherwise: Vec<Node>,
    },
    Macro(Arc<MacroDef>),
    /// The call, and the body as a macro named caller.
    Call {
        call: Expr,
        caller: Arc<MacroDef>,
    },
    Filter {
        filter: Expr,
        body: Body,
    },
    With {
        targets: Vec<Expr>,
        values: Vec<Expr>,
        body: Body,
    },
    Generation(Body),
    Block(Body),
    Break,
    Continue,
    /// A statement that fails when it is reached.
    Refuse(&'static str),
}

#[derive(Debug)]
pub(crate) struct For {
    pub(crate) target: Expr,
    pub(crate) iter: Expr,
    pub(crate) test: Option<(Expr, Symbols)>,
    pub(crate) recursive: bool,
    pub(crate) body: Body,
    pub(crate) otherwise: Option<Body>,
}

#[derive(Debug)]
pub(crate) struct MacroDef {
    pub(crate) name: Option<Arc<str>>,
    pub(crate) params: Vec<Arc<str>>,
    /// Defaults of the last parameters.
    pub(crate) defaults: Vec<Expr>,
    pub(crate) body: Body,
    pub(crate) uses_caller: bool,
    pub(crate) uses_kwargs: bool,
    pub(crate) uses_varargs: bool,
}

/// An expression.
#[derive(Debug)]
pub(crate) struct Expr {
    pub(crate) line: u32,
    /// How deep the tree below is, this node included.
    pub(crate) depth: u32,
    pub(crate) kind: Box<ExprKind>,
}

#[derive(Debug)]
pub(crate) enum ExprKind {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
    Name(Arc<str>),
    /// `name.attr` as the target of an assignment.
    NsRef(Arc<str>, Arc<str>),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Attr(Expr, Arc<str>),
    Item(Expr, Expr),
    Slice(Option<Expr>, Option<Expr>, Option<Expr>),
    Call(Expr, Args),
    /// Without an expression inside a filter block, where the input is the block.
    Filter(Option<Expr>, Arc<str>, Args),
    Test(Expr, Arc<str>, Args),
    Not(Expr),
    Neg(Expr),
    Pos(Expr),
    Binary(Op, Expr, Expr),
    Concat(Vec<Expr>),
    Compare(Expr, Vec<(Cmp, Expr)>),
    And(Expr, Expr),
    Or(Expr, Expr),
    /// Condition, then, otherwise.
    Cond(Expr, Expr, Option<Expr>),
}

/// The arguments of a call, as they are written.
#[derive(Debug, Default)]
pub(crate) struct Args {
    pub(crate) positional: Vec<Expr>,
    pub(crate) named: Vec<(Arc<str>, Expr)>,
    pub(crate) rest: Option<Expr>,
    pub(crate) named_rest: Option<Expr>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Mod,
    Pow,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cmp {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    NotIn,
}

impl Expr {
    pub(crate) fn new(line: u32, kind: ExprKind) -> Self {
        let mut depth = 0;
        kind.children(&mut |child| depth = depth.max(child.depth));
        Self { line, depth: depth + 1, kind: Box::new(kind) }
    }
}

impl Args {
    fn children<'a>(&'a self, visit: &mut dyn FnMut(&'a Expr)) {
        self.positional.iter().for_each(&mut *visit);
        self.named.iter().for_each(|(_, value)| visit(value));
        self.rest.iter().for_each(&mut *visit);
        self.named_rest.iter().for_each(visit);
    }
}

impl ExprKind {
    /// The expressions right below, in the order in which jinja2 visits them.
    pub(crate) fn children<'a>(&'a self, visit: &mut dyn FnMut(&'a Expr)) {
        match self {
            Self::None
            | Self::Bool(_)
            | Self::Int(_)
            | Self::Float(_)
            | Self::Str(_)
            | Self::Name(_)
            | Self::NsRef(..) => {}
            Self::List(items) | Self::Tuple(items) | Self::Concat(items) => items.iter().for_each(visit),
            Self::Dict(pairs) => pairs.iter().for_each(|(key, value)| {
                visit(key);
                visit(value);
            }),
            Self::Attr(a, _) | Self::Not(a) | Self::Neg(a) | Self::Pos(a) => visit(a),
            Self::Item(a, b) | Self::Binary(_, a, b) | Self::And(a, b) | Self::Or(a, b) => {
                visit(a);
                visit(b);
            }
            Self::Slice(a, b, c) => [a, b, c].into_iter().flatten().for_each(visit),
            Self::Call(a, args) | Self::Test(a, _, args) => {
                visit(a);
                args.children(visit);
            }
            Self::Filter(a, _, args) => {
                a.iter().for_each(&mut *visit);
                args.children(visit);
            }
            Self::Compare(a, rest) => {
                visit(a);
                rest.iter().for_each(|(_, b)| visit(b));
            }
            Self::Cond(test, then, otherwise) => {
                visit(test);
                visit(then);
                otherwise.iter().for_each(visit);
            }
        }
    }
}

/// Appends the names in a target of an assignment.
pub(crate) fn names(target: &Expr, into: &mut Vec<Arc<str>>) {
    match &*target.kind {
        ExprKind::Name(name) => into.push(name.clone()),
        kind => kind.children(&mut |child| names(child, into)),
    }
}
