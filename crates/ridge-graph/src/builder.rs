//! The methods of [`Builder`]: scopes, functions and calls, arguments asked for by name, and the emission of nodes.
//! `builder/prims.rs` has a method for each primitive, `builder/decoding.rs` decodes stored parameters,
//! `builder/random.rs` derives keys of random numbers, `builder/loops.rs` repeats calls; each file of `ops/`
//! adds the method of its op.

mod decoding;
mod loops;
mod prims;
mod random;

use std::sync::Arc;

use crate::error::{GraphError, Result, place};
use crate::graph::{
    Arg, Builder, Composite, CompositeRef, FuncId, Function, Graph, Node, Op, OpenFunction, Output, Role, Var,
};
use crate::prim::Prim;
use crate::types::Type;

impl Default for Builder {
    fn default() -> Self {
        Self::new()
    }
}

impl Builder {
    /// Starts a graph whose main function is called `main`.
    pub fn new() -> Self {
        Self::resume(Vec::new(), "main")
    }

    /// Goes on with functions built before; the function now open is called `name`.
    pub(crate) fn resume(functions: Vec<Function>, name: &str) -> Self {
        let owners = functions.iter().map(|f| f.owner).max().unwrap_or(0);
        let mut builder = Self { functions, open: Vec::new(), owners };
        builder.begin(name);
        builder
    }

    /// Goes on with the main function of `graph`, such as to add a loss to a model: gives the builder after its last
    /// node, and its outputs that are no states. What it asked for can be asked for again.
    pub fn reopen(mut graph: Graph) -> (Self, Vec<(String, Var)>) {
        graph.drop_uncalled();
        // Callees come before their callers, so main is the last that is left.
        let main = graph.functions.pop().expect("a graph has a main function");
        let mut builder = Self::resume(graph.functions, &main.name);
        let latest = |arg: &Arg| main.outputs.iter().find(|o| o.role == Role::State && o.name == arg.name);
        let states: Vec<_> = main.args.iter().enumerate().filter_map(|(i, arg)| Some((i, latest(arg)?.var))).collect();
        let values =
            main.nodes.iter().enumerate().flat_map(|(n, node)| (0..node.outputs.len()).map(move |out| (n, out)));
        let replaced = |var: &Var| main.ty(*var).state && states.iter().all(|(_, latest)| latest != var);
        let stale = values.map(|(node, out)| main.var(node, out)).filter(replaced).collect();
        let data = main.outputs.iter().filter(|o| o.role == Role::Data);
        let outputs = data.map(|o| (o.name.to_string(), o.var)).collect();
        builder.owners = builder.owners.max(main.owner);
        let arg = |(node, n): (usize, &Node)| match n.op {
            Op::Arg(i) => Some(((main.args[i].role, Arc::clone(&main.args[i].name)), (i, main.var(node, 0)))),
            _ => None,
        };
        let named = main.nodes.iter().enumerate().filter_map(arg).collect();
        builder.open = vec![OpenFunction { function: main, stale, states, named, ..OpenFunction::default() }];
        (builder, outputs)
    }

    /// Goes on with the main function of `graph` behind what `first` builds, which gives values for some of its step
    /// inputs by name, such as tables on the device that are read where a host filled an input. Gives the builder after
    /// the last node, and the outputs that are no states.
    ///
    /// # Errors
    /// Those of `first`, and when it gives a value of another type or for an input that the graph has not.
    pub fn behind(
        mut graph: Graph,
        first: impl FnOnce(&mut Self) -> Result<Vec<(String, Var)>>,
    ) -> Result<(Self, Vec<(String, Var)>)> {
        graph.drop_uncalled();
        let main = graph.functions.pop().expect("a graph has a main function");
        let mut builder = Self::resume(graph.functions, &main.name);
        let given = first(&mut builder)?;
        let asks = |name: &str| main.args.iter().any(|arg| arg.role == Role::StepInput && &*arg.name == name);
        if let Some((name, _)) = given.iter().find(|(name, _)| !asks(name)) {
            return Err(GraphError::usage(name, "is given, but the graph has no step input of that name"));
        }
        let mut values: Vec<Vec<Var>> = Vec::with_capacity(main.nodes.len());
        for node in &main.nodes {
            builder.set_scope(&node.scope);
            let made = match &node.op {
                Op::Arg(index) => vec![builder.arg_or(&main.args[*index], &given)?],
                op => {
                    let inputs: Vec<Var> = node.inputs.iter().map(|v| values[v.index()][v.out as usize]).collect();
                    builder.emit(op.clone(), &inputs)?
                }
            };
            values.push(made);
        }
        builder.set_scope("");
        let data = main.outputs.iter().filter(|o| o.role == Role::Data);
        let outputs = data.map(|o| (o.name.to_string(), values[o.var.index()][o.var.out as usize])).collect();
        Ok((builder, outputs))
    }

    /// The value given for a step input, or the argument itself.
    fn arg_or(&mut self, arg: &Arg, given: &[(String, Var)]) -> Result<Var> {
        let found = given.iter().find(|(name, _)| arg.role == Role::StepInput && *name == *arg.name);
        let Some((_, var)) = found else {
            return match arg.role {
                Role::Data => Ok(self.push_arg(arg.clone())),
                _ => Ok(self.named_arg(arg.clone())?.1),
            };
        };
        let ty = self.ty(*var)?;
        if *ty != arg.ty {
            return Err(GraphError::usage(&arg.name, format!("is given as {ty}, but the graph takes {}", arg.ty)));
        }
        Ok(*var)
    }

    pub(crate) fn begin(&mut self, name: &str) {
        self.owners += 1;
        let function = Function { name: name.into(), owner: self.owners, ..Function::default() };
        self.open.push(OpenFunction { function, ..OpenFunction::default() });
    }

    fn top(&self) -> &OpenFunction {
        self.open.last().expect("the main function is open until finish")
    }

    fn top_mut(&mut self) -> &mut OpenFunction {
        self.open.last_mut().expect("the main function is open until finish")
    }

    /// The scope that the next op will have.
    pub fn scope(&self) -> &str {
        &self.top().scope
    }

    /// Runs `build` with `name` added to the scope; weights and states asked for inside get it as a prefix.
    pub fn scoped<T>(&mut self, name: &str, build: impl FnOnce(&mut Self) -> T) -> T {
        let outer = self.top().scope.clone();
        self.top_mut().scope = join(&outer, name);
        let result = build(self);
        self.top_mut().scope = outer;
        result
    }

    pub(crate) fn set_scope(&mut self, scope: &str) {
        scope.clone_into(&mut self.top_mut().scope);
    }

    /// Adds an ordinary argument. State is asked for by name instead, see [`Builder::state`]: a program is not made of
    /// functions that take it as an ordinary argument, whose updates would be lost to the caller.
    pub fn arg(&mut self, name: &str, ty: Type) -> Var {
        self.push_arg(Arg::new(name, ty, Role::Data))
    }

    /// The parameter `name` within the scope; asked for twice, it is the same value.
    ///
    /// # Errors
    /// When it was asked for with another type, or its format does not fit its shape.
    pub fn weight(&mut self, name: &str, ty: Type) -> Result<Var> {
        self.full_weight(join(self.scope(), name), ty)
    }

    fn full_weight(&mut self, full: String, ty: Type) -> Result<Var> {
        if let Some(format) = &ty.format {
            format.check(&ty.shape).map_err(|why| GraphError::usage(&full, why))?;
        }
        Ok(self.named_arg(Arg::new(full, ty, Role::Weight))?.1)
    }

    /// The latest version of the state `name` within the scope.
    ///
    /// # Errors
    /// When it was asked for with another type.
    pub fn state(&mut self, name: &str, ty: Type) -> Result<Var> {
        self.full_state(join(self.scope(), name), ty)
    }

    fn full_state(&mut self, full: String, ty: Type) -> Result<Var> {
        let (index, var) = self.named_arg(Arg::new(full, Type { state: true, ..ty }, Role::State))?;
        Ok(self.top().states.iter().find(|(a, _)| *a == index).map_or(var, |(_, latest)| *latest))
    }

    /// The step input `name`, one for the whole graph whatever the scope.
    ///
    /// # Errors
    /// When it was asked for with another type.
    pub fn step_input(&mut self, name: &str, ty: Type) -> Result<Var> {
        Ok(self.named_arg(Arg::new(name, ty, Role::StepInput))?.1)
    }

    /// The step input `name` as [`step_input`](Self::step_input) gives it, which may be given after the step was
    /// submitted. What does not depend on it runs before.
    ///
    /// # Errors
    /// When it was asked for with another type, or as a step input that is not late.
    pub fn late_input(&mut self, name: &str, ty: Type) -> Result<Var> {
        Ok(self.named_arg(Arg { late: true, ..Arg::new(name, ty, Role::StepInput) })?.1)
    }

    fn named_arg(&mut self, arg: Arg) -> Result<(usize, Var)> {
        if let Some((index, var)) = self.top().named.get(&(arg.role, Arc::clone(&arg.name))).copied() {
            let known = &self.top().function.args[index];
            if known.ty != arg.ty {
                let why = format!("asked for as {}, but it is {} elsewhere in the graph", arg.ty, known.ty);
                return Err(GraphError::usage(&arg.name, why));
            }
            if known.late != arg.late {
                let text = |late: bool| if late { "a late step input" } else { "a step input that is not late" };
                let why = format!("asked for as {}, but it is {} elsewhere", text(arg.late), text(known.late));
                return Err(GraphError::usage(&arg.name, why));
            }
            return Ok((index, var));
        }
        let index = self.top().function.args.len();
        Ok((index, self.push_arg(arg)))
    }

    pub(crate) fn push_arg(&mut self, arg: Arg) -> Var {
        let open = self.top_mut();
        let index = open.function.args.len();
        let node = Node {
            op: Op::Arg(index),
            inputs: Vec::new(),
            outputs: vec![arg.ty.clone()],
            scope: open.scope.as_str().into(),
        };
        let is_state = arg.role == Role::State;
        let name = (arg.role, Arc::clone(&arg.name));
        open.function.args.push(arg);
        open.function.nodes.push(node);
        let var = open.function.var(open.function.nodes.len() - 1, 0);
        open.named.insert(name, (index, var));
        if is_state {
            open.states.push((index, var));
        }
        var
    }

    /// Type of a value of the function being built.
    ///
    /// # Errors
    /// When the value belongs to another function.
    pub fn ty(&self, var: Var) -> Result<&Type> {
        let function = &self.top().function;
        if var.owner != function.owner || var.index() >= function.nodes.len() {
            return Err(GraphError::usage(
                self.scope(),
                format!("{var:?} is a value of another function; pass it as an argument"),
            ));
        }
        Ok(function.ty(var))
    }

    /// Builds a function that can be called from the function now open.
    ///
    /// # Errors
    /// Those of `build`.
    pub fn function(&mut self, name: &str, build: impl FnOnce(&mut Self) -> Result<Vec<Var>>) -> Result<FuncId> {
        self.begin(name);
        let built = build(self).and_then(|outputs| {
            self.check_outputs(&outputs)?;
            Ok(outputs)
        });
        let open = self.open.pop().expect("begun above");
        let named = built?.into_iter().enumerate().map(|(i, v)| (i.to_string(), v)).collect();
        Ok(self.seal(open, named))
    }

    /// Refuses outputs of another function.
    fn check_outputs(&self, outputs: &[Var]) -> Result<()> {
        outputs.iter().try_for_each(|var| self.ty(*var).map(|_| ()))
    }

    fn seal(&mut self, mut open: OpenFunction, outputs: Vec<(String, Var)>) -> FuncId {
        let data = outputs.into_iter().map(|(name, var)| Output { name: name.as_str().into(), var, role: Role::Data });
        let states = open.states.iter().map(|(arg, var)| Output {
            name: Arc::clone(&open.function.args[*arg].name),
            var: *var,
            role: Role::State,
        });
        open.function.outputs = data.chain(states).collect();
        self.functions.push(open.function);
        FuncId(self.functions.len() as u32 - 1)
    }

    /// Closes the function opened by `begin` with outputs as they are, states not added.
    pub(crate) fn end(&mut self, outputs: Vec<Output>) -> Function {
        let mut open = self.open.pop().expect("begun before");
        open.function.outputs = outputs;
        open.function
    }

    pub(crate) fn into_functions(self) -> Vec<Function> {
        self.functions
    }

    /// The functions built so far.
    pub(crate) fn functions(&self) -> &[Function] {
        &self.functions
    }

    /// The function now open.
    pub(crate) fn current(&self) -> &Function {
        &self.top().function
    }

    pub(crate) fn functions_mut(&mut self) -> &mut Vec<Function> {
        &mut self.functions
    }

    /// Calls `func` with `args` for its ordinary arguments. Its weights and states are found in the caller under the
    /// scope, its step inputs by name; states continue as the versions that the call returns.
    ///
    /// # Errors
    /// When arguments do not fit, each named with the scope.
    pub fn call(&mut self, func: FuncId, args: &[Var]) -> Result<Vec<Var>> {
        let scope = self.scope().to_owned();
        self.call_named(func, args, |name| join(&scope, name))
    }

    /// As [`Builder::call`], where the weight or state that `func` calls `name` is the caller's of the whole name
    /// `full_name(name)`: calls that give one name share it.
    ///
    /// # Errors
    /// As for [`Builder::call`].
    pub fn call_named(&mut self, func: FuncId, args: &[Var], full_name: impl Fn(&str) -> String) -> Result<Vec<Var>> {
        let callee = self
            .functions
            .get(func.index())
            .ok_or_else(|| GraphError::usage(self.scope(), "call of a function that is not built yet"))?;
        let (params, name) = (callee.args.clone(), Arc::clone(&callee.name));
        let mut given = args.iter();
        let mut inputs = Vec::with_capacity(params.len());
        for param in params {
            inputs.push(match param.role {
                Role::Data => *given.next().ok_or_else(|| {
                    GraphError::usage(self.scope(), format!("call of {name}: argument `{}` is missing", param.name))
                })?,
                Role::Weight => self.full_weight(full_name(&param.name), param.ty)?,
                Role::State => self.full_state(full_name(&param.name), param.ty)?,
                Role::StepInput => self.named_arg(param)?.1,
                Role::Key => self.random_key()?,
            });
        }
        if given.next().is_some() {
            return Err(GraphError::usage(self.scope(), format!("call of {name}: too many arguments")));
        }
        let outputs = self.emit(Op::Call(func), &inputs)?;
        let data = self.functions[func.index()].outputs.iter().filter(|o| o.role == Role::Data).count();
        Ok(outputs[..data].to_vec())
    }

    /// Applies a composite op.
    ///
    /// # Errors
    /// When the inputs do not fit.
    pub fn composite(&mut self, op: impl Composite, inputs: &[Var]) -> Result<Vec<Var>> {
        self.emit(Op::Composite(CompositeRef::new(op)), inputs)
    }

    /// Applies a primitive.
    ///
    /// # Errors
    /// When the inputs do not fit.
    pub fn prim(&mut self, prim: Prim, inputs: &[Var]) -> Result<Vec<Var>> {
        self.emit(Op::Prim(prim), inputs)
    }

    /// Applies any op: infers its types, checks the use of states, and adds the node.
    ///
    /// # Errors
    /// When the inputs do not fit, or a replaced version of a state is used.
    pub fn emit(&mut self, op: Op, inputs: &[Var]) -> Result<Vec<Var>> {
        let types = inputs.iter().map(|v| self.ty(*v).cloned()).collect::<Result<Vec<_>>>()?;
        let named = Node { op, inputs: inputs.to_vec(), outputs: Vec::new(), scope: self.scope().into() };
        if let Some(stale) = inputs.iter().find(|v| self.top().stale.contains(v)) {
            return Err(GraphError::usage(
                self.scope(),
                format!(
                    "{}: {stale:?} is a version of a state that has been replaced; use the latest",
                    named.op_name()
                ),
            ));
        }
        let outputs = self.infer(&named.op, &types).map_err(|why| GraphError::Op {
            at: place(&named.scope),
            op: named.op_name().into(),
            inputs: types.clone(),
            why,
        })?;
        let open = self.open.last_mut().expect("the main function is open until finish");
        let node = open.function.nodes.len();
        let vars: Vec<Var> = (0..outputs.len()).map(|out| open.function.var(node, out)).collect();
        // An op with state outputs replaces its state inputs, in order.
        let old = inputs.iter().zip(&types).filter(|(_, t)| t.state).map(|(v, _)| *v);
        let new = vars.iter().zip(&outputs).filter(|(_, t)| t.state).map(|(v, _)| *v);
        for (old, new) in old.zip(new) {
            open.stale.insert(old);
            for (_, latest) in &mut open.states {
                if *latest == old {
                    *latest = new;
                }
            }
        }
        open.function.nodes.push(Node { outputs, ..named });
        Ok(vars)
    }

    fn infer(&self, op: &Op, inputs: &[Type]) -> Result<Vec<Type>, String> {
        match op {
            Op::Arg(_) => Err("arguments are added by name, not emitted".into()),
            Op::Prim(p) => p.infer(inputs),
            Op::Composite(c) => c.infer(inputs),
            Op::Call(func) => {
                let callee = self.functions.get(func.index()).ok_or("call of a function that is not built yet")?;
                check_args(callee, inputs)?;
                Ok(callee.outputs.iter().map(|o| callee.ty(o.var).clone()).collect())
            }
            Op::Group(group) => {
                check_args(&group.body, inputs)?;
                Ok(group.body.outputs.iter().map(|o| group.body.ty(o.var).clone()).collect())
            }
        }
    }

    /// Ends the main function with these named outputs, and the graph.
    ///
    /// # Errors
    /// When an output belongs to another function.
    pub fn finish(mut self, outputs: Vec<(String, Var)>) -> Result<Graph> {
        let vars: Vec<Var> = outputs.iter().map(|(_, var)| *var).collect();
        self.check_outputs(&vars)?;
        let open = self.open.pop().expect("the main function is open until finish");
        let main = self.seal(open, outputs);
        Ok(Graph { functions: self.functions, main })
    }
}

fn check_args(callee: &Function, inputs: &[Type]) -> Result<(), String> {
    if callee.args.len() != inputs.len() {
        return Err(format!("{} takes {} arguments, got {}", callee.name, callee.args.len(), inputs.len()));
    }
    for (param, ty) in callee.args.iter().zip(inputs) {
        if param.ty != *ty {
            return Err(format!("{}: argument `{}` must be {}, got {ty}", callee.name, param.name, param.ty));
        }
    }
    Ok(())
}

/// `name` within `scope`.
pub(crate) fn join(scope: &str, name: &str) -> String {
    match (scope.is_empty(), name.is_empty()) {
        (true, _) => name.into(),
        (_, true) => scope.into(),
        _ => format!("{scope}.{name}"),
    }
}
