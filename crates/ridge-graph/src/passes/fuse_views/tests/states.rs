//! Views of states, which are read before their updates, and calls that update them.

use std::collections::HashMap;

use super::{fused, lowered};
use crate::dim::Bindings;
use crate::dtype::DType;
use crate::error::Result;
use crate::eval::{Precision, evaluate};
use crate::graph::{Arg, Builder, FuncId, Function, Graph, GroupKind, Op, Var};
use crate::passes::fuse_views::fused as with_views;
use crate::prim::Prim;
use crate::sample::Rng;
use crate::shape::Shape;
use crate::tensor::Value;
use crate::types::Type;

const ROWS: usize = 4;

/// Outputs and states after a run with random inputs and states.
fn run(graph: &Graph, seed: u64) -> Vec<(String, Vec<u8>)> {
    let mut rng = Rng::new(seed);
    let args = graph.main().args.iter();
    let values: HashMap<String, Value> = args
        .map(|arg| (arg.name.to_string(), rng.normal(DType::F32, &arg.ty.shape.as_const().expect("numbers")).into()))
        .collect();
    let value = |arg: &Arg| values.get(&*arg.name).cloned();
    let outputs = evaluate(graph, &value, &Bindings::new(), Precision::Rounded);
    let outputs = outputs.unwrap_or_else(|why| panic!("{why}\n{graph}"));
    outputs.into_iter().map(|(name, value)| (name, value.tensor().to_bytes())).collect()
}

/// The states of `main` that are read after their update, and so copied ahead of it.
fn copied(graph: &Graph) -> Vec<String> {
    let main = graph.main();
    let is_state = |v: &Var| main.ty(*v).state;
    let mut updates: HashMap<Var, usize> = HashMap::new();
    for (index, node) in main.nodes.iter().enumerate().filter(|(_, n)| n.outputs.iter().any(|t| t.state)) {
        updates.extend(node.inputs.iter().filter(|v| is_state(v)).map(|v| (*v, index)));
    }
    let mut copied = Vec::new();
    for (index, node) in main.nodes.iter().enumerate() {
        let Op::Prim(Prim::StateRead) = node.op else { continue };
        let Some(update) = updates.get(&node.inputs[0]) else { continue };
        let users = main.nodes.iter().enumerate().filter(|(_, n)| n.inputs.iter().any(|v| v.index() == index));
        if users.map(|(user, _)| user).max().is_some_and(|user| user > *update) {
            copied.push(node.inputs[0].index().to_string());
        }
    }
    copied
}

/// What a function does to the state `name`: it adds `by` and gives a function of the sum.
fn updating(g: &mut Builder, name: &str, shape: [usize; 2]) -> Result<FuncId> {
    g.function(name, |g| {
        let by = g.arg("by", Type::tensor(DType::F32, shape));
        let state = g.state("s", Type::state(DType::F32, shape))?;
        let old = g.state_read(state)?;
        let new = g.add(old, by)?;
        g.state_write(state, new)?;
        Ok(vec![g.tanh(new)?])
    })
}

#[test]
fn a_reduction_of_what_a_call_returns_comes_after_the_call() {
    let mut g = Builder::new();
    let mut build = || {
        let f = updating(&mut g, "f", [ROWS, 6])?;
        let x = g.step_input("x", Type::tensor(DType::F32, [ROWS, 6]))?;
        let a = g.step_input("a", Type::tensor(DType::F32, [ROWS, 6]))?;
        let s = g.state("s", Type::state(DType::F32, [ROWS, 6]))?;
        let old = g.state_read(s)?;
        let e = g.exp(x)?;
        let y = g.call(f, &[e])?[0];
        let a = g.exp(a)?;
        let product = g.mul(a, y)?;
        let r = g.reduce_sum(product, 1)?;
        let o = g.transpose(old, &[1, 0])?;
        Ok::<_, crate::error::GraphError>(vec![("r".to_owned(), r), ("o".to_owned(), o)])
    };
    let outputs = build().expect("builds");
    let graph = g.finish(outputs).expect("finishes");
    let before = lowered(&graph);
    assert!(with_views(before.main()).is_some(), "{before}");
    let after = fused(&graph);
    assert_eq!(run(&after, 3), run(&graph, 3), "{after}");
    assert!(fused_groups(after.main()) > 0, "{after}");
}

#[test]
fn a_value_of_two_states_comes_before_the_updates_of_both() {
    let mut g = Builder::new();
    let ty = || Type::state(DType::F32, [4, 8]);
    let mut build = || {
        let x = g.step_input("x", Type::tensor(DType::F32, [4, 8]))?;
        let mut z = g.step_input("z", Type::tensor(DType::F32, [4, 8]))?;
        let (s1, s2) = (g.state("s1", ty())?, g.state("s2", ty())?);
        let (old1, old2) = (g.state_read(s1)?, g.state_read(s2)?);
        let sum = g.add(old1, old2)?;
        let n = g.transpose(sum, &[1, 0])?;
        for _ in 0..3 {
            z = g.sort(z, 1, true, 8)?.0;
        }
        g.state_write(s1, z)?;
        let s2 = g.state_write(s2, x)?;
        let new = g.state_read(s2)?;
        let m = g.exp(new)?;
        Ok::<_, crate::error::GraphError>(vec![("n".to_owned(), n), ("m".to_owned(), m)])
    };
    let outputs = build().expect("builds");
    let graph = g.finish(outputs).expect("finishes");
    let after = fused(&graph);
    assert_eq!(run(&after, 3), run(&graph, 3), "{after}");
    assert_eq!(copied(&after), [""; 0], "{after}");
    assert_eq!(fused_groups(after.main()), 2, "{after}");
}

fn fused_groups(function: &Function) -> usize {
    let is_fused = |op: &Op| matches!(op, Op::Group(group) if group.kind == GroupKind::Fused);
    function.nodes.iter().filter(|node| is_fused(&node.op)).count()
}

/// A random function of elements, views, reductions, sorts and products, with three states that it and its calls update.
fn random_graph(rng: &mut Rng) -> Result<Graph> {
    let wide = [ROWS, 8];
    let mut g = Builder::new();
    let f = updating(&mut g, "f", wide)?;
    let mut values: Vec<Var> =
        (0..3).map(|i| g.step_input(&format!("x{i}"), Type::tensor(DType::F32, wide))).collect::<Result<_>>()?;
    let names = ["s", "t", "u"];
    let mut outputs = Vec::new();
    for step in 0..5 + rng.below(30) {
        let recent = |rng: &mut Rng| {
            let back = if rng.below(3) == 0 { values.len() } else { values.len().min(5) };
            values[values.len() - 1 - rng.below(back)]
        };
        let (a, b) = (recent(rng), recent(rng));
        let name = names[rng.below(3)];
        let made = match rng.below(14) {
            0 => {
                let sum = g.reduce_sum(a, 1)?;
                g.mul(b, sum)?
            }
            1 => {
                let most = g.reduce_max(a, 1)?;
                g.sub(a, most)?
            }
            2 => g.sort(a, 1, true, 8)?.0,
            3 => {
                let turned = g.transpose(a, &[1, 0])?;
                let outer = g.matmul(turned, b, false, false, DType::F32)?;
                g.slice(outer, 0, 2, ROWS)?
            }
            4 => {
                let turned = g.transpose(a, &[1, 0])?;
                g.reshape(turned, Shape::new(wide))?
            }
            5 => {
                let (low, high) = (g.slice(a, 1, 0, 3)?, g.slice(b, 1, 3, 5)?);
                g.concat(&[high, low], 1)?
            }
            6 => {
                let part = g.slice(a, 0, 1, ROWS - 1)?;
                g.pad(part, 0, 0, 1, 0.5)?
            }
            7 | 8 => {
                let state = g.state(name, Type::state(DType::F32, wide))?;
                g.state_read(state)?
            }
            9 => {
                let state = g.state(name, Type::state(DType::F32, wide))?;
                let state = g.state_write(state, a)?;
                if rng.below(2) == 0 { b } else { g.state_read(state)? }
            }
            10 => g.call_named(f, &[a], |_| name.to_owned())?[0],
            11 => g.add(a, b)?,
            12 => g.tanh(a)?,
            _ => g.neg(a)?,
        };
        values.push(made);
        if rng.below(6) == 0 {
            outputs.push((step.to_string(), made));
        }
    }
    outputs.push(("last".into(), values[values.len() - 1]));
    g.finish(outputs)
}

#[test]
fn random_functions_with_states_and_calls_mean_the_same_with_their_views_fused() {
    let mut groups = 0;
    for seed in 0..600 {
        let graph = random_graph(&mut Rng::new(seed)).expect("builds");
        let before = lowered(&graph);
        for function in &before.functions {
            assert!(with_views(function).is_some(), "launches depend on each other, seed {seed}, of\n{before}");
        }
        let after = fused(&graph);
        assert!(run(&after, seed) == run(&graph, seed), "seed {seed}, of\n{before}\n{after}");
        let (few, many) = (copied(&before).len(), copied(&after).len());
        assert!(many <= few, "seed {seed}: {many} copies, not {few}, of\n{before}\n{after}");
        groups += fused_groups(after.main());
    }
    assert!(groups > 1000, "{groups} groups");
}

#[test]
fn a_launch_reads_no_more_than_its_parameters_have_room_for() {
    let mut g = Builder::new();
    let mut build = || {
        let x: Vec<Var> = (0..600)
            .map(|i| g.step_input(&format!("x{i}"), Type::tensor(DType::F32, [2, 3])))
            .collect::<Result<_>>()?;
        let turned = x.iter().map(|x| g.transpose(*x, &[1, 0])).collect::<Result<Vec<_>>>()?;
        // Few parts that read much, many parts, and a reduction that reads much.
        let sums = |g: &mut Builder, of: &[Var]| of[1..].iter().try_fold(of[0], |sum, x| g.add(sum, *x));
        let parts = turned.chunks(6).map(|of| sums(&mut g, of)).collect::<Result<Vec<_>>>()?;
        let few = g.concat(&parts, 1)?;
        let many = g.concat(&turned, 1)?;
        let all = sums(&mut g, &x)?;
        let all = g.reduce_sum(all, 1)?;
        Ok::<_, crate::error::GraphError>(vec![
            ("few".to_owned(), few),
            ("many".to_owned(), many),
            ("all".to_owned(), all),
        ])
    };
    let outputs = build().expect("builds");
    let graph = g.finish(outputs).expect("finishes");
    let after = fused(&graph);
    assert!(run(&after, 3) == run(&graph, 3), "another result");
    let groups = after.main().nodes.iter().filter(|n| matches!(n.op, Op::Group(_)));
    let most = groups.map(|n| n.inputs.len()).max();
    assert!(most.is_some_and(|most| most <= super::MAX_INPUTS), "a launch of {most:?} inputs");
    assert!(after.main().nodes.iter().any(|n| matches!(n.op, Op::Prim(Prim::Concat { .. }))), "a wide concat is fused");
}
