//! The names that a macro has without declaring them: `caller`, `kwargs` and `varargs`. Whether its body reads one
//! decides what the macro can be called with.

use std::collections::HashSet;

use super::ast::{Expr, ExprKind, MacroDef, Node, Stmt, names};

/// Which of `caller`, `kwargs` and `varargs` the statements read before they set them.
pub(crate) fn free_specials(nodes: &[Node]) -> HashSet<&'static str> {
    let mut finder = Free { wanted: HashSet::from(["caller", "kwargs", "varargs"]), found: HashSet::new() };
    finder.nodes(nodes);
    finder.found
}

struct Free {
    wanted: HashSet<&'static str>,
    found: HashSet<&'static str>,
}

impl Free {
    fn expr(&mut self, expr: &Expr) {
        match &*expr.kind {
            ExprKind::Name(name) => self.found.extend(self.wanted.get(&**name)),
            kind => kind.children(&mut |child| self.expr(child)),
        }
    }

    fn target(&mut self, target: &Expr) {
        let mut set = Vec::new();
        names(target, &mut set);
        set.iter().for_each(|name| {
            self.wanted.remove(&**name);
        });
    }

    fn nodes(&mut self, nodes: &[Node]) {
        for node in nodes {
            match &node.stmt {
                Stmt::Print(expr) => self.expr(expr),
                Stmt::Set { target, value } => {
                    self.target(target);
                    self.expr(value);
                }
                Stmt::SetBlock { target, filter, body } => {
                    self.target(target);
                    filter.iter().for_each(|filter| self.expr(filter));
                    self.nodes(&body.nodes);
                }
                Stmt::For(each) => {
                    self.target(&each.target);
                    self.expr(&each.iter);
                    self.nodes(&each.body.nodes);
                    each.otherwise.iter().for_each(|body| self.nodes(&body.nodes));
                    each.test.iter().for_each(|(test, _)| self.expr(test));
                }
                Stmt::If { branches, otherwise } => {
                    for (test, nodes) in branches {
                        self.expr(test);
                        self.nodes(nodes);
                    }
                    self.nodes(otherwise);
                }
                Stmt::Macro(def) => self.definition(def),
                Stmt::Call { call, caller } => {
                    self.expr(call);
                    self.definition(caller);
                }
                Stmt::Filter { filter, body } => {
                    self.nodes(&body.nodes);
                    self.expr(filter);
                }
                Stmt::With { targets, values, body } => {
                    targets.iter().for_each(|target| self.target(target));
                    values.iter().for_each(|value| self.expr(value));
                    self.nodes(&body.nodes);
                }
                Stmt::Generation(body) => self.nodes(&body.nodes),
                Stmt::Text(_) | Stmt::Block(_) | Stmt::Break | Stmt::Continue | Stmt::Refuse(_) => {}
            }
        }
    }

    fn definition(&mut self, def: &MacroDef) {
        def.params.iter().for_each(|name| {
            self.wanted.remove(&**name);
        });
        def.defaults.iter().for_each(|default| self.expr(default));
        self.nodes(&def.body.nodes);
    }
}
