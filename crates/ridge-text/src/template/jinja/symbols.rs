//! Which scope owns which name. jinja2 decides that before anything runs: a name that a scope sets is that scope's own
//! from its beginning to its end, so that for instance a variable set behind a loop hides, inside the loop, the one
//! that was given to the template. The rules here are those of its `idtracking.py`.

use std::collections::HashSet;
use std::sync::Arc;

use super::ast::{Body, Expr, ExprKind, Load, MacroDef, Node, Stmt, Symbols, Template, names};
use super::fault::{Res, fail, unsupported};
use super::specials::free_specials;
use super::{filters, tests};

/// Fills in the scopes of a template, and checks what jinja2 checks when it compiles.
pub(crate) fn resolve(template: &mut Template) -> Res<()> {
    let mut resolver = Resolver { scopes: Vec::new() };
    resolver.body(&mut template.body, &[], &[], false)
}

#[derive(Clone, Default)]
struct Scope {
    loads: Symbols,
    stores: HashSet<Arc<str>>,
}

impl Scope {
    fn owns(&self, name: &str) -> bool {
        self.loads.iter().any(|(n, _)| &**n == name)
    }

    fn define(&mut self, name: &Arc<str>, load: Load) {
        match self.loads.iter_mut().find(|(n, _)| n == name) {
            Some(entry) => entry.1 = load,
            None => self.loads.push((name.clone(), load)),
        }
    }

    fn param(&mut self, name: &Arc<str>) {
        self.stores.insert(name.clone());
        self.define(name, Load::Param);
    }
}

struct Resolver {
    scopes: Vec<Scope>,
}

impl Resolver {
    /// Opens a scope with these parameters, finds its names, and then those of the scopes in it. `extra` are
    /// expressions that are evaluated in the scope before its statements.
    fn body(&mut self, body: &mut Body, params: &[Arc<str>], extra: &[&Expr], in_loop: bool) -> Res<()> {
        let mut scope = Scope::default();
        params.iter().for_each(|name| scope.param(name));
        self.scopes.push(scope);
        for expr in extra {
            self.loads(expr)?;
        }
        self.shallow(&body.nodes)?;
        body.symbols.clone_from(&self.top().loads);
        for node in &mut body.nodes {
            self.deep(node, in_loop, false)?;
        }
        self.scopes.pop();
        Ok(())
    }

    fn top(&mut self) -> &mut Scope {
        // `body` pushes a scope before anything asks for one.
        if self.scopes.is_empty() {
            self.scopes.push(Scope::default());
        }
        let last = self.scopes.len() - 1;
        &mut self.scopes[last]
    }

    fn outside_owns(&self, name: &str) -> bool {
        self.scopes.split_last().is_some_and(|(_, outside)| outside.iter().any(|scope| scope.owns(name)))
    }

    fn load(&mut self, name: &Arc<str>) {
        if !self.outside_owns(name) && !self.top().owns(name) {
            self.top().define(name, Load::Resolve);
        }
    }

    fn store(&mut self, name: &Arc<str>) {
        let load = if self.outside_owns(name) { Load::Alias } else { Load::Unset };
        let scope = self.top();
        scope.stores.insert(name.clone());
        if !scope.owns(name) {
            scope.define(name, load);
        }
    }

    /// The names that an expression reads.
    fn loads(&mut self, expr: &Expr) -> Res<()> {
        match &*expr.kind {
            ExprKind::Name(name) if matches!(&**name, "self" | "super") => {
                unsupported(format!("the variable '{name}' is not supported")).map_err(|f| at(f, expr.line))
            }
            ExprKind::Name(name) | ExprKind::NsRef(name, _) => {
                self.load(name);
                Ok(())
            }
            kind => {
                let mut result = Ok(());
                kind.children(&mut |child| {
                    if result.is_ok() {
                        result = self.loads(child);
                    }
                });
                result
            }
        }
    }

    /// The names that an assignment sets.
    fn stores(&mut self, target: &Expr, as_param: bool) {
        match &*target.kind {
            ExprKind::Name(name) if as_param => self.top().param(name),
            ExprKind::Name(name) => self.store(name),
            ExprKind::NsRef(name, _) => self.load(name),
            kind => kind.children(&mut |child| self.stores(child, as_param)),
        }
    }

    /// The names that statements use in their own scope, without the scopes in them.
    fn shallow(&mut self, nodes: &[Node]) -> Res<()> {
        for node in nodes {
            match &node.stmt {
                Stmt::Set { target, value } => {
                    self.loads(value)?;
                    self.stores(target, false);
                }
                Stmt::SetBlock { target, .. } => self.stores(target, false),
                Stmt::For(each) => self.loads(&each.iter)?,
                Stmt::If { branches, otherwise } => self.branches(branches, otherwise)?,
                Stmt::Macro(def) => def.name.iter().for_each(|name| self.store(name)),
                Stmt::Print(expr) | Stmt::Call { call: expr, .. } | Stmt::Filter { filter: expr, .. } => {
                    self.loads(expr)?;
                }
                Stmt::With { values, .. } => values.iter().try_for_each(|value| self.loads(value))?,
                Stmt::Text(_)
                | Stmt::Generation(_)
                | Stmt::Block(_)
                | Stmt::Break
                | Stmt::Continue
                | Stmt::Refuse(_) => {}
            }
        }
        Ok(())
    }

    /// An `if`: a name that only some branches set is, in the others, what it would be without them.
    fn branches(&mut self, branches: &[(Expr, Vec<Node>)], otherwise: &[Node]) -> Res<()> {
        let Some(((test, body), rest)) = branches.split_first() else {
            return Ok(());
        };
        self.loads(test)?;
        let before = self.top().clone();
        let mut after = Vec::with_capacity(3);
        self.shallow(body)?;
        after.push(std::mem::replace(self.top(), before.clone()));
        for branch in rest {
            self.branches(std::slice::from_ref(branch), &[])?;
        }
        after.push(std::mem::replace(self.top(), before.clone()));
        self.shallow(otherwise)?;
        after.push(std::mem::replace(self.top(), before.clone()));
        let fresh: HashSet<Arc<str>> =
            after.iter().flat_map(|scope| &scope.stores).filter(|n| !before.stores.contains(*n)).cloned().collect();
        for scope in after {
            for (name, load) in &scope.loads {
                self.top().define(name, *load);
            }
            self.top().stores.extend(scope.stores);
        }
        for name in fresh {
            let load = if self.outside_owns(&name) { Load::Alias } else { Load::Resolve };
            self.top().define(&name, load);
        }
        Ok(())
    }

    /// The scopes inside a statement, and the checks of its expressions. `soft`: in a branch, where an unknown filter
    /// is an error only when it is reached.
    fn deep(&mut self, node: &mut Node, in_loop: bool, soft: bool) -> Res<()> {
        let line = node.line;
        self.statement(&mut node.stmt, in_loop, soft).map_err(|fault| at(fault, line))
    }

    fn statement(&mut self, stmt: &mut Stmt, in_loop: bool, soft: bool) -> Res<()> {
        match stmt {
            Stmt::Print(expr) => check(expr, soft),
            Stmt::Set { value, .. } => check(value, soft),
            Stmt::SetBlock { filter, body, .. } => {
                let extra: Vec<&Expr> = filter.iter().collect();
                extra.iter().try_for_each(|expr| check(expr, false))?;
                self.body(body, &[], &extra, in_loop)
            }
            Stmt::For(each) => {
                let Some(each) = Arc::get_mut(each) else {
                    return fail("a loop has two owners");
                };
                check(&each.iter, soft)?;
                let mut params: Vec<Arc<str>> = Vec::new();
                names(&each.target, &mut params);
                if params.iter().any(|name| &**name == "loop") || assigns_loop(&each.body.nodes) {
                    return fail("can't assign to special loop variable in for-loop");
                }
                if let Some((test, symbols)) = &mut each.test {
                    check(test, false)?;
                    let mut body = Body::default();
                    self.body(&mut body, &params, &[test], false)?;
                    *symbols = body.symbols;
                }
                params.push("loop".into());
                self.body(&mut each.body, &params, &[], true)?;
                let in_loop = in_loop && !each.recursive;
                each.otherwise.as_mut().map_or(Ok(()), |otherwise| self.body(otherwise, &[], &[], in_loop))
            }
            Stmt::If { branches, otherwise } => {
                for (test, nodes) in branches {
                    check(test, true)?;
                    nodes.iter_mut().try_for_each(|node| self.deep(node, in_loop, true))?;
                }
                otherwise.iter_mut().try_for_each(|node| self.deep(node, in_loop, true))
            }
            Stmt::Macro(def) => self.definition(def),
            Stmt::Call { call, caller } => {
                check(call, soft)?;
                self.definition(caller)
            }
            Stmt::Filter { filter, body } => {
                check(filter, false)?;
                self.body(body, &[], &[filter], in_loop)
            }
            Stmt::With { targets, values, body } => {
                values.iter().try_for_each(|value| check(value, soft))?;
                let mut params = Vec::new();
                targets.iter().for_each(|target| names(target, &mut params));
                self.body(body, &params, &[], in_loop)
            }
            Stmt::Generation(body) => {
                if !free_specials(&body.nodes).is_empty() {
                    return unsupported("caller, kwargs and varargs in a generation block are not supported");
                }
                self.body(body, &[], &[], false)
            }
            Stmt::Block(body) => {
                // A block sees what was given to the template and nothing of the scopes around it.
                let outside = std::mem::take(&mut self.scopes);
                let result = self.body(body, &[], &[], false);
                self.scopes = outside;
                result
            }
            Stmt::Break if !in_loop => fail("'break' outside loop"),
            Stmt::Continue if !in_loop => fail("'continue' not properly in loop"),
            Stmt::Text(_) | Stmt::Break | Stmt::Continue | Stmt::Refuse(_) => Ok(()),
        }
    }

    fn definition(&mut self, def: &mut Arc<MacroDef>) -> Res<()> {
        let Some(def) = Arc::get_mut(def) else {
            return fail("a macro has two owners");
        };
        if def.params.iter().any(|name| &**name == "caller") {
            return unsupported("a parameter named caller is not supported");
        }
        let free = free_specials(&def.body.nodes);
        let mut params = def.params.clone();
        let mut special = |name: &str| {
            let used = free.contains(name) && !def.params.iter().any(|p| &**p == name);
            if used {
                params.push(name.into());
            }
            used
        };
        def.uses_caller = special("caller");
        def.uses_kwargs = special("kwargs");
        def.uses_varargs = special("varargs");
        def.defaults.iter().try_for_each(|default| check(default, false))?;
        let defaults: Vec<&Expr> = def.defaults.iter().collect();
        self.body(&mut def.body, &params, &defaults, false)
    }
}

fn at(fault: Box<super::fault::Fault>, line: u32) -> Box<super::fault::Fault> {
    fault.at(line)
}

/// The filters and tests of an expression must exist.
fn check(expr: &Expr, soft: bool) -> Res<()> {
    let known = match &*expr.kind {
        ExprKind::Filter(_, name, _) => filters::exists(name),
        ExprKind::Test(_, name, _) => tests::exists(name),
        _ => true,
    };
    if !known
        && !soft
        && let ExprKind::Filter(_, name, _) | ExprKind::Test(_, name, _) = &*expr.kind
    {
        return fail(format!("no filter or test named '{name}'")).map_err(|f| at(f, expr.line));
    }
    let soft = soft || matches!(&*expr.kind, ExprKind::Cond(..));
    let mut result = Ok(());
    expr.kind.children(&mut |child| {
        if result.is_ok() {
            result = check(child, soft);
        }
    });
    result
}

/// Does any statement, however deep, set a variable named loop?
fn assigns_loop(nodes: &[Node]) -> bool {
    let target_is = |target: &Expr| {
        let mut found = Vec::new();
        names(target, &mut found);
        found.iter().any(|name| &**name == "loop")
    };
    nodes.iter().any(|node| match &node.stmt {
        Stmt::Set { target, .. } => target_is(target),
        Stmt::SetBlock { target, body, .. } => target_is(target) || assigns_loop(&body.nodes),
        Stmt::For(each) => {
            assigns_loop(&each.body.nodes) || each.otherwise.as_ref().is_some_and(|b| assigns_loop(&b.nodes))
        }
        Stmt::If { branches, otherwise } => {
            branches.iter().any(|(_, nodes)| assigns_loop(nodes)) || assigns_loop(otherwise)
        }
        Stmt::Macro(def) | Stmt::Call { caller: def, .. } => assigns_loop(&def.body.nodes),
        Stmt::Filter { body, .. } | Stmt::With { body, .. } | Stmt::Generation(body) | Stmt::Block(body) => {
            assigns_loop(&body.nodes)
        }
        Stmt::Text(_) | Stmt::Print(_) | Stmt::Break | Stmt::Continue | Stmt::Refuse(_) => false,
    })
}
