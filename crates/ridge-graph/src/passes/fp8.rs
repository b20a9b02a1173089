//! Products of 8-bit floats for the linears of a training graph.

use std::collections::HashMap;

use crate::dtype::DType;
use crate::error::{GraphError, Result};
use crate::format::CodeType;
use crate::graph::{Builder, Function, Graph, Node, Op, Role, Var};
use crate::ops::{Fp8Linears, Fp8Scaling, Linear, LinearGroup, MoeRouter};
use crate::types::Type;

/// What the name of a weight ends with that holds largest magnitudes of earlier steps: of x, of each weight, and of the
/// cotangent of each output of the linears whose first weight's name it begins with.
pub const FP8_AMAX: &str = ".fp8_amax";

/// N and K of the weights that are multiplied so are multiples of this, which tensor cores ask for.
const MULTIPLE: usize = 16;

/// `graph` with its linears, and groups of them, as [`Fp8Linears`] of quantised x and weights. It takes those in the functions
/// that main calls, so not the output projection, whose weights have N and K that are multiples of 16; what chooses experts
/// stays as it is. With [`Fp8Scaling::Delayed`] the graph gets f32 weights [`FP8_AMAX`], whose gradients are the largest
/// magnitudes of this step.
///
/// # Errors
/// When the graph has states, or no such linear.
pub fn with_fp8(graph: &Graph, scaling: Fp8Scaling, gradients: CodeType) -> Result<Graph> {
    let mut g = Builder::new();
    let mut rewrite = Rewrite { scaling, gradients, added: Vec::with_capacity(graph.functions.len()), linears: 0 };
    for (index, function) in graph.functions.iter().enumerate() {
        if index == graph.main.index() {
            // Main is the last and is made below.
            rewrite.added.push(Vec::new());
            continue;
        }
        let mut added = Vec::new();
        g.function(&function.name, |g| rewrite.rebuilt(g, function, Some(&mut added)))?;
        rewrite.added.push(added);
    }
    if rewrite.linears == 0 {
        let why = format!("no function has a linear by weights [N, K] whose N and K are multiples of {MULTIPLE}");
        return Err(GraphError::usage("fp8", why));
    }
    let main = graph.main();
    let values = rewrite.rebuilt(&mut g, main, None)?;
    let names = main.outputs.iter().filter(|output| output.role == Role::Data).map(|output| output.name.to_string());
    g.finish(names.zip(values).collect())
}

struct Rewrite {
    scaling: Fp8Scaling,
    gradients: CodeType,
    /// The weights that each function takes beside what it took, by name and number of elements.
    added: Vec<Vec<(String, usize)>>,
    linears: usize,
}

impl Rewrite {
    /// The nodes of `function` once more; gives its data outputs. `added` gets the weights that it takes besides; main's
    /// linears stay.
    fn rebuilt(
        &mut self,
        g: &mut Builder,
        function: &Function,
        mut added: Option<&mut Vec<(String, usize)>>,
    ) -> Result<Vec<Var>> {
        if let Some(state) = function.args.iter().find(|arg| arg.role == Role::State) {
            return Err(GraphError::usage(&state.name, "is a state; products of 8 bits are for graphs without any"));
        }
        let args: Vec<Var> = function.args.iter().map(|arg| g.push_arg(arg.clone())).collect();
        let mut values: Vec<Vec<Var>> = Vec::with_capacity(function.nodes.len());
        let mut quantised = HashMap::new();
        for node in &function.nodes {
            g.set_scope(&node.scope);
            let mut inputs: Vec<Var> = node.inputs.iter().map(|v| values[v.index()][v.out as usize]).collect();
            let made = match (&node.op, &mut added) {
                (Op::Arg(index), _) => vec![args[*index]],
                (Op::Call(callee), _) => {
                    for (name, elements) in &self.added[callee.index()] {
                        inputs.push(g.weight(name, Type::tensor(DType::F32, [*elements]))?);
                        if let Some(added) = &mut added {
                            let scope = if node.scope.is_empty() { String::new() } else { format!("{}.", node.scope) };
                            added.push((format!("{scope}{name}"), *elements));
                        }
                    }
                    g.emit(Op::Call(*callee), &inputs)?
                }
                (op, Some(added)) => match group_of(function, node) {
                    Some(group) => {
                        let Op::Arg(first) = function.nodes[node.inputs[1].index()].op else {
                            unreachable!("weights are arguments")
                        };
                        let amax = format!("{}{FP8_AMAX}", function.args[first].name);
                        self.linears += 1;
                        self.products(g, group, &inputs, &amax, &mut quantised, added)?
                    }
                    None => g.emit(op.clone(), &inputs)?,
                },
                (op, None) => g.emit(op.clone(), &inputs)?,
            };
            values.push(made);
        }
        g.set_scope("");
        let data = function.outputs.iter().filter(|output| output.role == Role::Data);
        Ok(data.map(|output| values[output.var.index()][output.var.out as usize]).collect())
    }

    /// The linears of `group` by `inputs`: x, weights, biases.
    fn products(
        &self,
        g: &mut Builder,
        group: LinearGroup,
        inputs: &[Var],
        amax: &str,
        quantised: &mut HashMap<Var, Var>,
        added: &mut Vec<(String, usize)>,
    ) -> Result<Vec<Var>> {
        let Self { scaling, gradients, .. } = *self;
        let LinearGroup { count, biases } = group;
        let [of_x, of_w] = scaling.formats();
        let (x, weights) = (inputs[0], &inputs[1..=count]);
        let op = Fp8Linears { count, biases, scaling, gradients };
        let mut operands = Vec::with_capacity(inputs.len() + 2);
        if scaling != Fp8Scaling::Delayed {
            let codes = if let Some(codes) = quantised.get(&x) { *codes } else { g.quantize(x, of_x)? };
            quantised.insert(x, codes);
            operands.push(codes);
            if scaling == Fp8Scaling::Blocks {
                operands.push(x);
            }
            for w in weights {
                operands.push(g.quantize(*w, of_w)?);
            }
            operands.extend(&inputs[1 + count..]);
            return g.composite(op, &operands);
        }
        let elements = 1 + 2 * count;
        let scope = g.scope().to_owned();
        // Names of weights are those of the function's arguments.
        g.set_scope("");
        let magnitudes = g.weight(amax, Type::tensor(DType::F32, [elements]))?;
        added.push((amax.to_owned(), elements));
        g.set_scope(&scope);
        for (i, value) in [x].iter().chain(weights).enumerate() {
            let amax = g.slice(magnitudes, 0, i, 1usize)?;
            operands.push(g.quantize_delayed(*value, amax, if i == 0 { of_x } else { of_w })?[0]);
        }
        operands.extend(&inputs[1 + count..]);
        operands.push(g.slice(magnitudes, 0, 1 + count, count)?);
        g.composite(op, &operands)
    }
}

/// `node` as linears whose products can be those of 8-bit floats, if it is that.
fn group_of(function: &Function, node: &Node) -> Option<LinearGroup> {
    let Op::Composite(op) = &node.op else { return None };
    let group = match (op.downcast::<Linear>(), op.downcast::<LinearGroup>()) {
        (Some(one), _) => LinearGroup { count: 1, biases: one.bias },
        (_, Some(group)) => *group,
        _ => return None,
    };
    let suits = |w: &Var| {
        let ty = function.ty(*w);
        let is_arg = matches!(function.nodes[w.index()].op, Op::Arg(i) if function.args[i].role == Role::Weight);
        let whole = |dim: &crate::Dim| dim.as_const().is_some_and(|n| n > 0 && n.is_multiple_of(MULTIPLE));
        is_arg && ty.is_plain() && ty.shape.0.iter().all(whole)
    };
    let chooses = |user: &Node| {
        let router = matches!(&user.op, Op::Composite(op) if op.downcast::<MoeRouter>().is_some());
        router && user.inputs.iter().any(|v| std::ptr::eq(&raw const function.nodes[v.index()], node))
    };
    let plain = function.ty(node.inputs[0]).is_plain();
    (plain && node.inputs[1..=group.count].iter().all(suits) && !function.nodes.iter().any(chooses)).then_some(group)
}
