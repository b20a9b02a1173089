//! Rewrites a graph function by function, once for each distinct signature of a function's arguments: the part that
//! sharding and retyping share. A signature is one tag an argument, such as a placement or a type. Eighty calls of a
//! layer whose arguments have the same tags become eighty calls of one new function.

use std::collections::HashMap;
use std::hash::Hash;

use crate::builder::join;
use crate::error::Result;
use crate::graph::{Arg, Builder, FuncId, Function, Graph, Node, Op, Output, Var};
use crate::types::Type;
use crate::why::Why;

/// How the values and nodes of a function are rewritten.
pub(crate) trait Rewrite {
    /// What is known of a value, and tells one signature of a function from another.
    type Tag: Clone + Eq + Hash;

    /// The type of an argument of the new function.
    fn arg(&self, arg: &Arg, tag: &Self::Tag) -> Result<Type, Why>;

    /// Emits what takes the place of `node`, which is neither an argument nor a call, and gives one value with its
    /// tag for each of the node's outputs. The scope is set already.
    fn node(&self, g: &mut Builder, frame: &mut Frame<'_, Self::Tag>, node: &Node) -> Result<Vec<(Var, Self::Tag)>>;

    /// The form in which a value is passed to a call.
    fn passed(&self, _g: &mut Builder, frame: &mut Frame<'_, Self::Tag>, var: Var) -> Result<(Var, Self::Tag)> {
        Ok(frame.value(var).clone())
    }

    /// The form in which an output is returned.
    fn returned(
        &self,
        _g: &mut Builder,
        frame: &mut Frame<'_, Self::Tag>,
        output: &Output,
    ) -> Result<(Var, Self::Tag)> {
        Ok(frame.value(output.var).clone())
    }
}

/// A function being rewritten, and what its values have become.
pub(crate) struct Frame<'g, T> {
    /// The function as it was.
    pub(crate) function: &'g Function,
    /// The scopes of the calls that led here.
    pub(crate) path: String,
    /// Is it the function that is run?
    pub(crate) is_main: bool,
    /// The node that is being rewritten.
    pub(crate) at: usize,
    /// By node and output: the value itself, then other forms of it that were made since.
    forms: Vec<Vec<Vec<(Var, T)>>>,
    uses: Vec<Vec<u32>>,
}

impl<T> Frame<'_, T> {
    /// What `var` of the old function has become.
    pub(crate) fn value(&self, var: Var) -> &(Var, T) {
        &self.forms(var)[0]
    }

    /// Every form of `var` that there is, the one it was computed in first.
    pub(crate) fn forms(&self, var: Var) -> &[(Var, T)] {
        &self.forms[var.index()][var.out as usize]
    }

    /// Remembers another form of `var`.
    pub(crate) fn add_form(&mut self, var: Var, form: Var, tag: T) {
        self.forms[var.index()][var.out as usize].push((form, tag));
    }

    /// How many nodes and outputs of the old function use `var`.
    pub(crate) fn uses(&self, var: Var) -> u32 {
        self.uses[var.index()][var.out as usize]
    }

    /// The argument that `var` is, if it is one.
    pub(crate) fn arg_of(&self, var: Var) -> Option<&Arg> {
        match self.function.nodes[var.index()].op {
            Op::Arg(index) => self.function.args.get(index),
            _ => None,
        }
    }

    /// The name of a weight or state as the main function has it.
    pub(crate) fn full_name(&self, arg: &Arg) -> String {
        join(&self.path, &arg.name)
    }
}

/// The graph that `rewrite` makes of `graph`, whose main arguments have `tags`, and the tags of its main outputs.
/// Functions that nothing calls are left out.
pub(crate) fn respecialise<R: Rewrite>(graph: &Graph, tags: Vec<R::Tag>, rewrite: &R) -> Result<(Graph, Vec<R::Tag>)> {
    let mut run = Respecialiser { graph, rewrite, builder: Builder::new(), done: HashMap::new() };
    let (main, outputs) = run.function(graph.main, tags, String::new())?;
    Ok((Graph { functions: run.builder.into_functions(), main }, outputs))
}

/// A function of the old graph with the tags of its arguments.
type Signature<T> = (FuncId, Vec<T>);

struct Respecialiser<'g, R: Rewrite> {
    graph: &'g Graph,
    rewrite: &'g R,
    builder: Builder,
    /// The new function and the tags of its outputs.
    done: HashMap<Signature<R::Tag>, Signature<R::Tag>>,
}

impl<R: Rewrite> Respecialiser<'_, R> {
    fn function(&mut self, id: FuncId, tags: Vec<R::Tag>, path: String) -> Result<Signature<R::Tag>> {
        let key = (id, tags);
        if let Some(known) = self.done.get(&key) {
            return Ok(known.clone());
        }
        let old = self.graph.function(id);
        let name = self.free_name(&old.name);
        self.builder.begin(&name);
        let forms = old.nodes.iter().map(|n| vec![Vec::new(); n.outputs.len()]).collect();
        let mut frame = Frame { function: old, path, is_main: id == self.graph.main, at: 0, forms, uses: old.uses() };
        self.args(&mut frame, &key.1)?;
        for (index, node) in old.nodes.iter().enumerate() {
            self.builder.set_scope(&node.scope);
            frame.at = index;
            let values = match node.op {
                Op::Arg(_) => continue,
                Op::Call(callee) => self.call(&mut frame, node, callee)?,
                _ => self.rewrite.node(&mut self.builder, &mut frame, node)?,
            };
            frame.forms[index] = values.into_iter().map(|v| vec![v]).collect();
        }
        let mut outputs = old.outputs.clone();
        let mut returned = Vec::with_capacity(outputs.len());
        for output in &mut outputs {
            self.builder.set_scope(&old.nodes[output.var.index()].scope);
            let (var, tag) = self.rewrite.returned(&mut self.builder, &mut frame, output)?;
            output.var = var;
            returned.push(tag);
        }
        let function = self.builder.end(outputs);
        let functions = self.builder.functions_mut();
        functions.push(function);
        let made = (FuncId(functions.len() as u32 - 1), returned);
        self.done.insert(key, made.clone());
        Ok(made)
    }

    /// All arguments first and in their order, whatever the order of the nodes.
    fn args(&mut self, frame: &mut Frame<'_, R::Tag>, tags: &[R::Tag]) -> Result<()> {
        let old = frame.function;
        for (i, (arg, tag)) in old.args.iter().zip(tags).enumerate() {
            let node = old.nodes.iter().position(|n| matches!(n.op, Op::Arg(a) if a == i));
            self.builder.set_scope(node.map_or("", |n| &old.nodes[n].scope));
            let ty = self.rewrite.arg(arg, tag).map_err(|why| crate::GraphError::usage(&frame.path, why))?;
            let var = self.builder.push_arg(Arg { ty, ..arg.clone() });
            if let Some(node) = node {
                frame.forms[node][0] = vec![(var, tag.clone())];
            }
        }
        Ok(())
    }

    fn call(&mut self, frame: &mut Frame<'_, R::Tag>, node: &Node, callee: FuncId) -> Result<Vec<(Var, R::Tag)>> {
        let mut inputs = Vec::with_capacity(node.inputs.len());
        let mut tags = Vec::with_capacity(node.inputs.len());
        for var in &node.inputs {
            let (var, tag) = self.rewrite.passed(&mut self.builder, frame, *var)?;
            inputs.push(var);
            tags.push(tag);
        }
        let path = join(&frame.path, &node.scope);
        let (new, outputs) = self.function(callee, tags, path).map_err(|e| e.within(&node.scope))?;
        Ok(self.builder.emit(Op::Call(new), &inputs)?.into_iter().zip(outputs).collect())
    }

    /// `name`, or with a number where another signature of the function has it already.
    fn free_name(&mut self, name: &str) -> String {
        let functions = self.builder.functions_mut();
        let taken = |n: &str| functions.iter().any(|f| &*f.name == n);
        let numbered = (2..).map(|i| format!("{name}.{i}"));
        std::iter::once(name.to_owned()).chain(numbered).find(|n| !taken(n)).unwrap_or_default()
    }
}
