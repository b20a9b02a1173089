//! A graph for many inputs at once from a graph for one (`jax.vmap`): values that depend on what is batched get a first axis
//! more. Composites are taken apart, so each primitive's rule (`vmap/rules.rs`) is all there is; functions are rebuilt once for
//! each set of arguments that are batched.

mod rules;

use std::collections::HashMap;

use crate::dim::Dim;
use crate::error::{GraphError, Result, place};
use crate::graph::{Arg, Builder, CompositeRef, FuncId, Function, Graph, Op, Output, Role, Var};
use crate::types::Type;

/// `graph` with a first axis of `size` for each argument of main named in `names`, which are step inputs or data, and for every
/// output: row `i` of an output is what `graph` gives for row `i` of those arguments. Weights and other arguments are shared,
/// and so are random keys: all rows have the same random numbers.
///
/// # Errors
/// When the graph has states, a name is of no plain step input, or what is batched meets a collective, a linear recurrence, a
/// quantisation or a group of kernels.
pub fn vmap(graph: &Graph, size: usize, names: &[impl AsRef<str>]) -> Result<Graph> {
    let main = graph.main();
    if let Some(state) = main.args.iter().find(|arg| arg.role == Role::State) {
        return Err(GraphError::usage(&state.name, "is a state, which has one value for all rows"));
    }
    for name in names {
        let found = main.args.iter().find(|arg| *arg.name == *name.as_ref());
        if !found.is_some_and(|arg| matches!(arg.role, Role::StepInput | Role::Data) && arg.ty.is_plain()) {
            return Err(GraphError::usage(name.as_ref(), "is no plain step input of the graph"));
        }
    }
    let is_named = |name: &str| names.iter().any(|n| n.as_ref() == name);
    let mut all = Batcher { g: Builder::new(), source: graph, size: Dim::from(size), made: HashMap::new() };
    let mut args = Vec::with_capacity(main.args.len());
    for arg in &main.args {
        let is_batched = is_named(&arg.name);
        let ty = if is_batched { all.batched(&arg.ty) } else { arg.ty.clone() };
        let var = all.g.push_arg(Arg { ty, ..arg.clone() });
        args.push(Row { var, is_batched });
    }
    let values = all.inline(main, &args)?;
    let mut outputs = Vec::with_capacity(values.len());
    for (output, value) in main.outputs.iter().zip(values) {
        let ty = main.ty(output.var).clone();
        outputs.push((output.name.to_string(), all.wide(value, &ty)?));
    }
    all.g.finish(outputs)
}

/// A value, of one row or of all.
#[derive(Clone, Copy, Debug)]
struct Row {
    var: Var,
    is_batched: bool,
}

/// A function for a set of batched arguments, and which of its outputs are batched.
type Batched = (FuncId, Vec<bool>);

struct Batcher<'a> {
    g: Builder,
    source: &'a Graph,
    size: Dim,
    made: HashMap<(FuncId, Vec<bool>), Batched>,
}

impl Batcher<'_> {
    /// The type of all rows of a value.
    fn batched(&self, ty: &Type) -> Type {
        let mut shape = ty.shape.clone();
        shape.0.insert(0, self.size.clone());
        Type { shape, ..ty.clone() }
    }

    /// All rows of a value of type `ty`.
    fn wide(&mut self, value: Row, ty: &Type) -> Result<Var> {
        let shape = self.batched(ty).shape;
        if value.is_batched { Ok(value.var) } else { self.g.broadcast(value.var, shape) }
    }

    /// The nodes of `function` in the function now open; gives its outputs.
    fn inline(&mut self, function: &Function, args: &[Row]) -> Result<Vec<Row>> {
        let mut values: Vec<Vec<Row>> = Vec::with_capacity(function.nodes.len());
        for node in &function.nodes {
            self.g.set_scope(&node.scope);
            let inputs: Vec<Row> = node.inputs.iter().map(|v| values[v.index()][v.out as usize]).collect();
            let is_batched = inputs.iter().any(|row| row.is_batched);
            let vars = || inputs.iter().map(|row| row.var).collect::<Vec<_>>();
            let alike = |vars: Vec<Var>| vars.into_iter().map(|var| Row { var, is_batched }).collect::<Vec<_>>();
            values.push(match &node.op {
                Op::Arg(index) => vec![args[*index]],
                Op::Call(callee) => self.call(*callee, &inputs)?,
                Op::Group(_) => {
                    return Err(GraphError::Op {
                        at: place(&node.scope),
                        op: node.op_name().into(),
                        inputs: function.types(&node.inputs),
                        why: "a group has no rows; make a graph for many inputs before kernels are matched".into(),
                    });
                }
                op if !is_batched => alike(self.g.emit(op.clone(), &vars())?),
                Op::Composite(op) => {
                    let body = self.decomposed(op, &function.types(&node.inputs), &node.scope)?;
                    self.inline(&body, &inputs)?
                }
                Op::Prim(prim) => {
                    let made = self.prim(prim, &inputs, &function.types(&node.inputs), &node.outputs)?;
                    alike(made.ok_or_else(|| GraphError::Op {
                        at: place(&node.scope),
                        op: node.op_name().into(),
                        inputs: function.types(&node.inputs),
                        why: "has no rule for many inputs at once".into(),
                    })?)
                }
            });
        }
        self.g.set_scope("");
        Ok(function.outputs.iter().map(|o| values[o.var.index()][o.var.out as usize]).collect())
    }

    fn decomposed(&mut self, op: &CompositeRef, types: &[Type], scope: &str) -> Result<Function> {
        self.g.begin(op.name());
        self.g.set_scope(scope);
        let args: Vec<Var> = types.iter().enumerate().map(|(i, ty)| self.g.arg(&i.to_string(), ty.clone())).collect();
        let outputs = op.decompose(&mut self.g, &args)?;
        let named = |(i, var): (usize, Var)| Output { name: i.to_string().into(), var, role: Role::Data };
        Ok(self.g.end(outputs.into_iter().enumerate().map(named).collect()))
    }

    fn call(&mut self, callee: FuncId, inputs: &[Row]) -> Result<Vec<Row>> {
        let scope = self.g.scope().to_owned();
        let mask: Vec<bool> = inputs.iter().map(|row| row.is_batched).collect();
        let (function, outputs) = match self.made.get(&(callee, mask.clone())) {
            Some(made) => made.clone(),
            None => self.function(callee, mask)?,
        };
        self.g.set_scope(&scope);
        let vars: Vec<Var> = inputs.iter().map(|row| row.var).collect();
        let made = self.g.emit(Op::Call(function), &vars)?;
        Ok(made.into_iter().zip(outputs).map(|(var, is_batched)| Row { var, is_batched }).collect())
    }

    fn function(&mut self, callee: FuncId, mask: Vec<bool>) -> Result<Batched> {
        let source = &self.source.functions[callee.index()];
        self.g.begin(&source.name);
        let mut args = Vec::with_capacity(mask.len());
        for (arg, is_batched) in source.args.iter().zip(&mask) {
            let ty = if *is_batched { self.batched(&arg.ty) } else { arg.ty.clone() };
            let var = self.g.push_arg(Arg { ty, ..arg.clone() });
            args.push(Row { var, is_batched: *is_batched });
        }
        let values = self.inline(source, &args)?;
        let flags = values.iter().map(|row| row.is_batched).collect();
        let outputs = source.outputs.iter().zip(&values).map(|(o, row)| Output { var: row.var, ..o.clone() }).collect();
        let function = self.g.end(outputs);
        self.g.functions_mut().push(function);
        let made = (FuncId(self.g.functions().len() as u32 - 1), flags);
        self.made.insert((callee, mask), made.clone());
        Ok(made)
    }
}
