//! Random graphs: a main function over a function that calls another, with views, joins, reductions, states, weights
//! and outputs that are arguments, views or one value twice.
#![allow(dead_code, unreachable_pub)] // each test binary uses its part

use proptest::prelude::*;
use ridge_graph::format::Q8_0;
use ridge_graph::sample::Rng;
use ridge_graph::{Arg, Bindings, Builder, Combine, DType, Dim, FormatRef, FuncId, Graph, Shape, Type, Value, Var};

/// What to build, as numbers that say which op and which of the values there are.
pub type Recipe = Vec<(u8, u16, u16)>;

/// A graph and what it is run with.
pub struct Case {
    pub graph: Graph,
    pub outputs: Vec<String>,
    pub bindings: Bindings,
}

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "under {:?}\n{}", self.bindings, self.graph)
    }
}

impl Case {
    /// The value of an argument.
    pub fn value(&self, arg: &Arg) -> Value {
        let salt = arg.name.bytes().fold(7u64, |h, b| h.wrapping_mul(31).wrapping_add(u64::from(b)));
        let mut rng = Rng::new(salt);
        let shape = arg.ty.shape.eval(&self.bindings).expect("the case binds every symbol");
        let tensor = match arg.ty.dtype {
            DType::I32 if arg.name.as_ref() == "indices" => rng.integers(DType::I32, &shape, -1, 4),
            DType::I32 => rng.integers(DType::I32, &shape, -9, 10),
            dtype => rng.normal(dtype, &shape),
        };
        match &arg.ty.format {
            Some(format) => Value::stored(&tensor, format),
            None => Value::Plain(tensor),
        }
    }
}

/// Random cases whose values are of `dtype`, which is F32 or I32.
pub fn case(dtype: DType) -> impl Strategy<Value = Case> {
    let recipe = || proptest::collection::vec((any::<u8>(), any::<u16>(), any::<u16>()), 0..24);
    let chosen = proptest::collection::vec(any::<u16>(), 1..5);
    (recipe(), recipe(), recipe(), chosen, 0usize..6).prop_map(move |(inner, outer, main, chosen, rows)| {
        let (graph, outputs) = graph(dtype, [&inner, &outer, &main], &chosen);
        Case { graph, outputs, bindings: bindings(rows) }
    })
}

fn argument() -> Shape {
    Shape::new([Dim::sym("rows"), Dim::from(20)])
}

fn bindings(rows: usize) -> Bindings {
    Bindings::new().with("rows", rows)
}

fn graph(dtype: DType, recipes: [&Recipe; 3], chosen: &[u16]) -> (Graph, Vec<String>) {
    let mut g = Builder::new();
    let mut callees = Vec::new();
    for (i, recipe) in recipes[..2].iter().enumerate() {
        let known = callees.clone();
        let function = g.function(&format!("f{i}"), |g| {
            let x = g.arg("x", Type::tensor(dtype, argument()));
            let table = g.step_input("table", Type::tensor(dtype, [4usize, 30]))?;
            let values = build(g, dtype, recipe, vec![x, table], &known);
            Ok(chosen.iter().take(3).map(|c| values[*c as usize % values.len()]).collect())
        });
        callees.push(function.unwrap());
    }
    let x = g.step_input("x", Type::tensor(dtype, argument())).unwrap();
    let values = build(&mut g, dtype, recipes[2], vec![x], &callees);
    let names: Vec<String> = (0..chosen.len()).map(|i| format!("out{i}")).collect();
    let outputs = names.iter().zip(chosen).map(|(n, c)| (n.clone(), values[*c as usize % values.len()])).collect();
    (g.finish(outputs).unwrap(), names)
}

/// Applies a recipe to values of two axes, some of them of the symbol `rows`.
fn build(g: &mut Builder, dtype: DType, recipe: &Recipe, mut values: Vec<Var>, callees: &[FuncId]) -> Vec<Var> {
    for (number, (op, a, b)) in recipe.iter().enumerate() {
        let a = values[*a as usize % values.len()];
        let shape = g.ty(a).unwrap().shape.clone();
        let alike: Vec<Var> = values.iter().copied().filter(|v| g.ty(*v).unwrap().shape == shape).collect();
        let b = alike[*b as usize % alike.len()];
        let state = Type::state(dtype, shape.clone());
        let state_name = format!("state {shape}");
        match op % 18 {
            0 => values.push(g.add(a, b).unwrap()),
            1 if dtype.is_float() => values.push(g.exp(a).unwrap()),
            1 => values.push(g.neg(a).unwrap()),
            2 | 3 => values.push(g.transpose(a, &[1, 0]).unwrap()),
            4 => values.push(g.matmul(a, b, false, true, dtype).unwrap()),
            5 => values.push(g.concat(&[a, b], 1).unwrap()),
            6 => values.push(g.reshape(a, Shape(vec![shape.0[1].clone(), shape.0[0].clone()])).unwrap()),
            7 => {
                let (sorted, indices) = g.sort(a, 1, true, shape.0[1].clone()).unwrap();
                values.push(sorted);
                values.push(g.cast(indices, dtype).unwrap());
            }
            8 => values.push(g.scan_sum(a, 0).unwrap()),
            9 => {
                let now = g.state(&state_name, state).unwrap();
                values.push(g.state_read(now).unwrap());
            }
            10 => {
                let now = g.state(&state_name, state).unwrap();
                g.state_write(now, a).unwrap();
            }
            11 if dtype.is_float() => {
                // Weights in a format, read as components.
                let ty = Type::tensor(dtype, [5usize, 32]).stored_as(FormatRef::new(Q8_0));
                let w = g.weight("stored", ty).unwrap();
                values.push(g.decoded(w, dtype).unwrap());
            }
            // A weight's extents are numbers.
            11 | 12 if shape.as_const().is_none() => {}
            11 | 12 => values.push(g.weight(&format!("plain {shape}"), Type::tensor(dtype, shape)).unwrap()),
            13 => {
                let top = g.reduce_max(a, 1).unwrap();
                let below = g.sub(a, top).unwrap();
                let sum = g.reduce_sum(below, 1).unwrap();
                values.push(g.mul(b, sum).unwrap());
                values.push(below);
            }
            14 => {
                let less = g.lt(a, b).unwrap();
                let place = g.iota(shape, 0, dtype).unwrap();
                let twice = g.add(place, place).unwrap();
                values.push(g.select(less, twice, b).unwrap());
            }
            15 => {
                let indices = g.step_input("indices", Type::tensor(DType::I32, [7usize])).unwrap();
                let rows = g.gather(a, indices, 0).unwrap();
                values.push(g.scatter_add(b, indices, rows, 0).unwrap());
                values.push(rows);
            }
            16 => values.push(g.reduce(Combine::Min, a, 0).unwrap()),
            _ => {
                let fits = |f: &&FuncId| g.ty(a).unwrap().shape == argument() && f.index() < callees.len();
                if let Some(callee) = callees.iter().rev().find(fits) {
                    values.extend(g.scoped(&format!("call{number}"), |g| g.call(*callee, &[a])).unwrap());
                }
            }
        }
        // Extents stay small.
        let small = |ty: &Type| ty.shape.eval(&bindings(3)).unwrap().iter().product::<usize>() < 4000;
        if !values.last().is_some_and(|v| small(g.ty(*v).unwrap())) {
            values.pop();
        }
    }
    values
}
