//! A plan is followed launch by launch over simulated memory, in which every cache line says which value it holds: a
//! launch must find each of its operands whole, as the graph means it, and write no place that it reads.

use std::collections::HashMap;

use crate::decoder::{Step, decoder};
use crate::random::case;
use proptest::prelude::*;
use ridge_graph::{Bindings, DType, FuncId, Function, Graph, Node, Op, Prim, Role, Type, Var};
use ridge_runtime::{Place, Plan, PlannedLaunch, Region, component_offsets, lower, plan};

const LINE: usize = 64;

/// Follows a plan and the graph's meaning side by side.
struct Follower<'a> {
    graph: &'a Graph,
    bindings: &'a Bindings,
    plan: &'a Plan,
    next: usize,
    /// Which value each cache line holds.
    memory: HashMap<(Region, usize), u64>,
    values: u64,
}

impl<'a> Follower<'a> {
    fn bytes(&self, ty: &Type) -> usize {
        component_offsets(ty, self.bindings).expect("bound").1
    }

    fn fresh(&mut self) -> u64 {
        self.values += 1;
        self.values
    }

    fn lines(place: Place, bytes: usize) -> impl Iterator<Item = (Region, usize)> {
        assert!(place.offset.is_multiple_of(LINE), "{place:?} is not aligned");
        (place.offset / LINE..(place.offset + bytes).div_ceil(LINE)).map(move |line| (place.region, line))
    }

    fn fill(&mut self, place: Place, bytes: usize, value: u64) {
        for line in Self::lines(place, bytes) {
            self.memory.insert(line, value);
        }
    }

    fn expect(&self, place: Place, bytes: usize, value: u64, what: &str) {
        for line in Self::lines(place, bytes) {
            assert_eq!(self.memory.get(&line), Some(&value), "{what}: {place:?} holds another value at {line:?}");
        }
    }

    /// Runs a function whose arguments have these values, and gives its outputs' values.
    fn run(&mut self, func: FuncId, args: &[u64]) -> Vec<u64> {
        let function: &'a Function = self.graph.function(func);
        let mut values: Vec<Vec<u64>> = Vec::new();
        for (index, node) in function.nodes.iter().enumerate() {
            let inputs: Vec<u64> = node.inputs.iter().map(|v| values[v.index()][v.out as usize]).collect();
            values.push(match &node.op {
                Op::Arg(arg) => vec![args[*arg]],
                Op::Prim(Prim::Reshape(_) | Prim::Component(_) | Prim::StateRead) => inputs,
                Op::Call(callee) => self.run(*callee, &inputs),
                _ => self.launch(func, function, index, node, &inputs),
            });
        }
        function.outputs.iter().map(|o| values[o.var.index()][o.var.out as usize]).collect()
    }

    fn launch(&mut self, func: FuncId, function: &Function, index: usize, node: &Node, inputs: &[u64]) -> Vec<u64> {
        let launch: &'a PlannedLaunch = &self.plan.launches[self.next];
        self.next += 1;
        let kernel = &self.plan.kernels[launch.kernel];
        assert_eq!((kernel.func, kernel.node), (func, index), "launches follow the graph's order");
        let types: Vec<&Type> = node.inputs.iter().map(|v: &Var| function.ty(*v)).collect();
        for ((place, ty), value) in launch.inputs.iter().zip(&types).zip(inputs) {
            self.expect(*place, self.bytes(ty), *value, node.op_name());
        }
        for (place, ty) in launch.outputs.iter().zip(&node.outputs) {
            let written: Vec<_> = Self::lines(*place, self.bytes(ty)).collect();
            for (other, other_ty) in launch.inputs.iter().zip(&types) {
                let in_place = ty.state && other_ty.state && place == other;
                let overlaps = Self::lines(*other, self.bytes(other_ty)).any(|line| written.contains(&line));
                assert!(in_place || !overlaps, "{} writes over what it reads", node.op_name());
            }
            if place.region == Region::Arena {
                assert!(place.offset + self.bytes(ty) <= self.plan.arena_bytes, "{place:?} ends past the workspace");
            }
        }
        let mut outputs = Vec::new();
        for (place, ty) in launch.outputs.iter().zip(&node.outputs) {
            let value = self.fresh();
            self.fill(*place, self.bytes(ty), value);
            outputs.push(value);
        }
        // Nor do a launch's outputs overlap one another.
        for ((place, ty), value) in launch.outputs.iter().zip(&node.outputs).zip(&outputs) {
            self.expect(*place, self.bytes(ty), *value, node.op_name());
        }
        outputs
    }
}

/// Requires that the plan of a lowered graph computes what the graph means.
fn follow(graph: &Graph, bindings: &Bindings) -> Plan {
    let plan = plan(graph, bindings).expect("plans");
    let mut follower = Follower { graph, bindings, plan: &plan, next: 0, memory: HashMap::new(), values: 0 };
    let main = graph.main();
    let mut counts: HashMap<Role, u32> = HashMap::new();
    let mut args = Vec::new();
    let mut states = HashMap::new();
    for arg in &main.args {
        let count = counts.entry(arg.role).or_insert(0);
        let region = match arg.role {
            Role::Weight => Region::Weight(*count),
            Role::State => Region::State(*count),
            Role::StepInput | Role::Data | Role::Key => Region::Input(*count),
        };
        *count += 1;
        let value = follower.fresh();
        let place = Place { region, offset: 0 };
        if arg.role == Role::State {
            states.insert(arg.name.clone(), place);
        }
        follower.fill(place, follower.bytes(&arg.ty), value);
        args.push(value);
    }
    let outputs = follower.run(graph.main, &args);
    assert_eq!(follower.next, plan.launches.len(), "every launch is in the graph");
    let mut data = 0;
    for (output, value) in main.outputs.iter().zip(outputs) {
        let place = match output.role {
            Role::State => states[&output.name],
            _ => {
                data += 1;
                Place { region: Region::Output(data - 1), offset: 0 }
            }
        };
        follower.expect(place, follower.bytes(main.ty(output.var)), value, &output.name);
    }
    plan
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_launch_finds_an_operand_overwritten(case in case(DType::F32)) {
        let names: Vec<&str> = case.outputs.iter().map(String::as_str).collect();
        let lowered = lower(&case.graph, &names, &[]).expect("lowers");
        follow(&lowered, &case.bindings);
    }
}

#[test]
fn a_decoder_is_planned_soundly_and_its_layers_share_their_workspace() {
    let graph = decoder(DType::F32, true).expect("builds");
    let lowered = lower(&graph, &["logits", "next"], &[]).expect("lowers");
    for lengths in [&[(0, 5), (3, 1)][..], &[(0, 1)], &[(2, 20)]] {
        let plan = follow(&lowered, &Step::new(lengths, 1).bindings);
        let apart: usize = plan
            .launches
            .iter()
            .flat_map(|l| l.outputs.iter().zip(&plan.kernels[l.kernel].outputs))
            .filter(|(place, _)| place.region == Region::Arena)
            .map(|(_, shape)| shape.iter().product::<usize>() * 4)
            .sum();
        assert!(plan.arena_bytes * 3 < apart, "{} bytes of workspace for {apart} bytes of values", plan.arena_bytes);
    }
}

#[test]
fn extents_beyond_memory_are_an_error() {
    let mut g = ridge_graph::Builder::new();
    let ty = ridge_graph::Type::tensor(ridge_graph::DType::F32, [ridge_graph::Dim::sym("n")]);
    let x = g.step_input("x", ty).expect("a fresh name");
    let y = g.neg(x).expect("f32");
    let graph = g.finish(vec![("y".into(), y)]).expect("y is main's");
    let lowered = ridge_runtime::lower(&graph, &["y"], &[]).expect("lowers");
    for n in [1 << 62, usize::MAX] {
        let planned = ridge_runtime::plan(&lowered, &ridge_graph::Bindings::new().with("n", n));
        assert!(planned.is_err(), "{n} elements are planned");
    }
}
