//! The text form of a graph, for people, errors and snapshot tests: the same on every machine.
//!
//! ```text
//! fn layer(
//!   x: f32[tokens, 64],
//!   weight norm: f32[64],
//! ) {
//!   %2 = rms_norm(x, norm) {eps: 1e-5} : f32[tokens, 64]  # input_layernorm
//!   -> 0: %2
//! }
//! ```
//!
//! Functions come before their callers. A line is a node: its values, the op with its inputs and static attributes,
//! the types of the values, and the scope. Arguments go by their names. The nodes inside a group are written `$n`.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::{self, Write as _};

use crate::graph::{FuncId, Function, Graph, Op, Role, Var};

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = function_names(&self.functions);
        for (i, function) in self.functions.iter().enumerate() {
            if i > 0 {
                f.write_char('\n')?;
            }
            let mark = if i == self.main.index() && &*names[i] != "main" { "  # main" } else { "" };
            write_function(f, function, &names[i], &names, mark)?;
        }
        Ok(())
    }
}

impl fmt::Display for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_function(f, self, &self.name, &[], "")
    }
}

/// The functions' names, with their index where several have one name.
fn function_names(functions: &[Function]) -> Vec<Cow<'_, str>> {
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for function in functions {
        *counts.entry(&function.name).or_default() += 1;
    }
    let name = |(i, function): (usize, &'_ Function)| {
        if counts[&*function.name] > 1 { format!("{}@{i}", function.name) } else { function.name.to_string() }
    };
    functions.iter().enumerate().map(name).map(Cow::Owned).collect()
}

fn write_function(
    f: &mut fmt::Formatter<'_>,
    function: &Function,
    name: &str,
    callees: &[Cow<'_, str>],
    mark: &str,
) -> fmt::Result {
    let names = arg_names(function);
    writeln!(f, "fn {name}({mark}")?;
    for (arg, shown) in function.args.iter().zip(&names) {
        let role = match arg.role {
            // A state's type says that it is one.
            Role::Data | Role::State => "",
            Role::Weight => "weight ",
            Role::StepInput if arg.late => "late input ",
            Role::StepInput => "input ",
            Role::Key => "key ",
        };
        let alias = if *shown == *arg.name { String::new() } else { format!(" as {shown}") };
        writeln!(f, "  {role}{}{alias}: {},", arg.name, arg.ty)?;
    }
    f.write_str(") {\n")?;
    Body { function, args: &names, sigil: '%', indent: 1, callees }.write(f)?;
    f.write_str("}\n")
}

/// What each argument is called in the body: its name, or its node's number where the name is a number or not its own.
fn arg_names(function: &Function) -> Vec<String> {
    let mut names: Vec<String> = function.args.iter().map(|a| a.name.to_string()).collect();
    for (n, node) in function.nodes.iter().enumerate() {
        let Op::Arg(i) = node.op else { continue };
        let name = &function.args[i].name;
        let shared = function.args.iter().filter(|a| a.name == *name).count() > 1;
        if shared || name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) {
            names[i] = format!("%{n}");
        }
    }
    names
}

/// The nodes and outputs of a function or a group.
struct Body<'a> {
    function: &'a Function,
    /// What each argument is called.
    args: &'a [String],
    /// What the numbers of nodes begin with.
    sigil: char,
    indent: usize,
    /// Names of the graph's functions, if it is known.
    callees: &'a [Cow<'a, str>],
}

impl Body<'_> {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pad = "  ".repeat(self.indent);
        for (n, node) in self.function.nodes.iter().enumerate() {
            if matches!(node.op, Op::Arg(_)) {
                continue;
            }
            let values: Vec<Var> = (0..node.outputs.len()).map(|out| self.function.var(n, out)).collect();
            let types: Vec<String> = node.outputs.iter().map(ToString::to_string).collect();
            let (op, attrs) = self.op(&node.op);
            if !values.is_empty() {
                write!(f, "{pad}{} = ", self.values(&values))?;
            }
            write!(f, "{op}({})", self.values(&node.inputs))?;
            if !attrs.is_empty() {
                write!(f, " {{{attrs}}}")?;
            }
            write!(f, " : {}", types.join(", "))?;
            if !node.scope.is_empty() {
                write!(f, "  # {}", node.scope)?;
            }
            f.write_char('\n')?;
            if let Op::Group(group) = &node.op {
                // The body's arguments are the group's inputs: they keep the names they have outside.
                let args: Vec<String> = node.inputs.iter().map(|v| self.value(*v)).collect();
                let sigil = if self.sigil == '%' { '$' } else { self.sigil };
                Body { function: &group.body, args: &args, sigil, indent: self.indent + 1, ..*self }.write(f)?;
            }
        }
        for output in &self.function.outputs {
            let state = if output.role == Role::State { "state " } else { "" };
            writeln!(f, "{pad}-> {state}{}: {}", output.name, self.value(output.var))?;
        }
        Ok(())
    }

    /// The op's name and its static attributes.
    fn op<'a>(&self, op: &'a Op) -> (Cow<'a, str>, String) {
        match op {
            Op::Arg(i) => ("arg".into(), i.to_string()),
            Op::Prim(prim) => (prim.name().into(), prim.attrs()),
            Op::Composite(composite) => (composite.name().into(), fields(&format!("{composite:?}"))),
            Op::Call(callee) => (format!("call {}", self.callee(*callee)).into(), String::new()),
            Op::Group(group) => (format!("group {}", group.name()).into(), String::new()),
        }
    }

    fn callee(&self, id: FuncId) -> Cow<'_, str> {
        self.callees.get(id.index()).cloned().unwrap_or_else(|| format!("@{}", id.index()).into())
    }

    fn values(&self, vars: &[Var]) -> String {
        let values: Vec<String> = vars.iter().map(|v| self.value(*v)).collect();
        values.join(", ")
    }

    fn value(&self, var: Var) -> String {
        match self.function.nodes.get(var.index()).map(|n| &n.op) {
            Some(Op::Arg(i)) if *i < self.args.len() => self.args[*i].clone(),
            _ if var.out > 0 => format!("{}{}.{}", self.sigil, var.node, var.out),
            _ => format!("{}{}", self.sigil, var.node),
        }
    }
}

/// What stands within the braces or parentheses of a struct's `Debug` text; nothing of a unit struct's.
fn fields(debug: &str) -> String {
    let inner = debug.find(['{', '(']).map(|start| &debug[start + 1..]);
    inner.and_then(|inner| inner.strip_suffix(['}', ')'])).unwrap_or_default().trim().to_owned()
}
