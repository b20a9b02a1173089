//! Which nodes of a function compute rows alone: those that everybody reads by rows, and whose op gives rows from rows.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::rc::Rc;

use super::rule::{Moved, Rows, Taken, part};
use crate::graph::{FuncId, Function, Graph, Node, Op, Role, Var};
use crate::ops::TakeRows;
use crate::passes::linears::of_one_input;
use crate::prim::Prim;
use crate::types::Type;
use crate::work::Work;

/// The outputs of a function that are read by rows, and along which axis.
pub(super) type Wanted = BTreeMap<usize, usize>;

/// What becomes of a function that gives rows.
#[derive(Debug)]
pub(super) struct Plan {
    /// The nodes that give rows, by index.
    pub(super) steps: BTreeMap<usize, Step>,
    /// Arguments that are given as rows, and along which axis.
    args: BTreeMap<usize, usize>,
    /// Does it take rows of values within, so that it needs their index?
    pub(super) takes: bool,
}

/// What becomes of a node that gives rows.
#[derive(Debug)]
pub(super) enum Step {
    /// It computes them.
    Node(Moved),
    /// It is an argument of this type.
    Arg(Type),
    /// It calls a function that gives these outputs as rows; all outputs have types.
    Call { callee: FuncId, wanted: Wanted, plan: Rc<Plan>, outputs: Vec<Type> },
}

impl Step {
    /// What `node` reads: a part of each input, or the whole.
    pub(super) fn inputs(&self, node: &Node) -> Vec<Option<Rows>> {
        match self {
            Self::Node(moved) => moved.inputs.clone(),
            Self::Arg(_) => Vec::new(),
            Self::Call { plan, .. } => {
                (0..node.inputs.len()).map(|arg| plan.args.get(&arg).map(|axis| Rows::Of(*axis))).collect()
            }
        }
    }
}

impl Plan {
    /// Is this value of the function rows?
    pub(super) fn is_rows(&self, var: Var) -> bool {
        match self.steps.get(&var.index()) {
            Some(Step::Call { wanted, .. }) => wanted.contains_key(&(var.out as usize)),
            Some(Step::Node(_) | Step::Arg(_)) => true,
            None => false,
        }
    }
}

/// How a value is read by all.
#[derive(Clone, Copy, PartialEq)]
enum Read {
    Part(Rows),
    Whole,
}

/// Along which axis a node takes rows, if it does.
pub(super) fn axis_of(node: &Node) -> Option<usize> {
    match &node.op {
        Op::Composite(op) => op.downcast::<TakeRows>().map(|op| op.axis),
        _ => None,
    }
}

/// Does the node take the rows that `index` names?
pub(super) fn is_taking(node: &Node, index: Var) -> bool {
    axis_of(node).is_some() && node.inputs[1] == index
}

pub(super) struct Planner<'g> {
    graph: &'g Graph,
    taken: Taken,
    known: HashMap<(FuncId, Wanted), Option<Rc<Plan>>>,
}

impl<'g> Planner<'g> {
    pub(super) fn new(graph: &'g Graph, taken: Taken) -> Self {
        Self { graph, taken, known: HashMap::new() }
    }

    /// What becomes of main, of which `index` names rows; `None` if nothing is gained.
    pub(super) fn main(&mut self, index: Var) -> Option<Rc<Plan>> {
        self.search(self.graph.main, &Wanted::new(), Some(index))
    }

    /// What becomes of a function whose `wanted` outputs are read by rows; `None` if nothing is gained.
    pub(super) fn plan(&mut self, id: FuncId, wanted: &Wanted) -> Option<Rc<Plan>> {
        let key = (id, wanted.clone());
        if let Some(known) = self.known.get(&key) {
            return known.clone();
        }
        let plan = self.search(id, wanted, None);
        self.known.insert(key, plan.clone());
        plan
    }

    /// The most nodes that give rows: all that can, less those that others keep from it.
    fn search(&mut self, id: FuncId, wanted: &Wanted, index: Option<Var>) -> Option<Rc<Plan>> {
        let graph = self.graph;
        let function = graph.function(id);
        let together = of_one_input(function);
        let mut stay = index.map_or_else(HashSet::new, |index| before(function, index));
        loop {
            let mut plan = self.sweep(function, wanted, index, &stay);
            let kept = kept(function, &plan, &together);
            if kept.is_empty() {
                plan.takes |= wanted.keys().any(|output| !plan.is_rows(function.outputs[*output].var));
                let gains = |(at, step): (&usize, &Step)| match step {
                    Step::Call { .. } => true,
                    Step::Node(_) => is_product(&function.nodes[*at]),
                    Step::Arg(_) => false,
                };
                return plan.steps.iter().any(gains).then(|| Rc::new(plan));
            }
            stay.extend(kept);
        }
    }

    /// The nodes whose outputs are read by rows alone, from the last to the first, without those that `stay`.
    fn sweep(&mut self, function: &Function, wanted: &Wanted, index: Option<Var>, stay: &HashSet<usize>) -> Plan {
        let mut read: HashMap<Var, Read> = HashMap::new();
        let ask = |read: &mut HashMap<Var, Read>, var: Var, how: Read| {
            let all = read.entry(var).or_insert(how);
            if *all != how {
                *all = Read::Whole;
            }
        };
        for (nth, output) in function.outputs.iter().enumerate() {
            let how = wanted.get(&nth).map_or(Read::Whole, |axis| Read::Part(Rows::Of(*axis)));
            ask(&mut read, output.var, how);
        }
        let mut plan = Plan { steps: BTreeMap::new(), args: BTreeMap::new(), takes: false };
        for (at, node) in function.nodes.iter().enumerate().rev() {
            let asked: Vec<Option<Read>> =
                (0..node.outputs.len()).map(|out| read.get(&function.var(at, out)).copied()).collect();
            let step = match stay.contains(&at) {
                true => None,
                false => self.step(function, at, &asked, index.is_some()),
            };
            if let (Some(Step::Arg(_)), Op::Arg(arg), Some(Some(Read::Part(Rows::Of(axis))))) =
                (&step, &node.op, asked.first())
            {
                plan.args.insert(*arg, *axis);
            }
            let of_inputs = match (&step, index) {
                (Some(step), _) => step.inputs(node),
                (None, Some(index)) if is_taking(node, index) => vec![axis_of(node).map(Rows::Of), None],
                (None, _) => vec![None; node.inputs.len()],
            };
            for (var, rows) in node.inputs.iter().zip(of_inputs) {
                let fits = rows.filter(|rows| part(function, function.ty(*var), *rows, &self.taken).is_some());
                ask(&mut read, *var, fits.map_or(Read::Whole, Read::Part));
            }
            plan.takes |= matches!(&step, Some(Step::Call { plan, .. }) if plan.takes);
            plan.steps.extend(step.map(|step| (at, step)));
        }
        let takes = frontier(function, &plan).next().is_some();
        plan.takes |= takes;
        plan
    }

    /// What becomes of a node whose outputs are so read; `None` if it stays as it is.
    fn step(&mut self, function: &Function, at: usize, asked: &[Option<Read>], is_main: bool) -> Option<Step> {
        let node = &function.nodes[at];
        let rows = |read: &Option<Read>| match read {
            Some(Read::Part(rows)) => Some(*rows),
            Some(Read::Whole) | None => None,
        };
        if let Op::Call(callee) = node.op {
            let of = |(out, read): (usize, &Option<Read>)| match rows(read) {
                Some(Rows::Of(axis)) if node.outputs[out].is_plain() => Some((out, axis)),
                _ => None,
            };
            let wanted: Wanted = asked.iter().enumerate().filter_map(of).collect();
            let plan = if wanted.is_empty() { None } else { self.plan(callee, &wanted) }?;
            let mut outputs = node.outputs.clone();
            for (out, axis) in &wanted {
                outputs[*out] = part(function, &node.outputs[*out], Rows::Of(*axis), &self.taken)?;
            }
            return Some(Step::Call { callee, wanted, plan, outputs });
        }
        if asked.contains(&Some(Read::Whole)) {
            return None;
        }
        let asked: Vec<Option<Rows>> = asked.iter().map(rows).collect();
        if let Op::Arg(arg) = node.op {
            let is_value =
                matches!(function.args[arg].role, Role::Data | Role::StepInput) && node.outputs[0].is_plain();
            let rows = asked[0].filter(|rows| is_value && !is_main && matches!(rows, Rows::Of(_)))?;
            return part(function, &node.outputs[0], rows, &self.taken).map(Step::Arg);
        }
        Moved::of(function, at, &asked, &self.taken).map(Step::Node)
    }
}

/// The nodes of a plan that others keep from giving rows: those that read a part which nobody makes, and products of an input
/// of which others stay.
fn kept(function: &Function, plan: &Plan, together: &[Vec<usize>]) -> BTreeSet<usize> {
    let missing = frontier(function, plan).filter(|(_, var, rows)| {
        let ty = function.ty(*var);
        !matches!(rows, Rows::Of(_)) || !ty.is_plain()
    });
    let mut kept: BTreeSet<usize> = missing.map(|(at, ..)| at).collect();
    let moves = |at: &&usize| plan.steps.contains_key(at);
    for group in together.iter().filter(|group| !group.iter().all(|at| moves(&at))) {
        kept.extend(group.iter().filter(moves));
    }
    kept
}

/// What the nodes of a plan read by rows of values that are no rows yet, and which node does.
fn frontier<'a>(function: &'a Function, plan: &'a Plan) -> impl Iterator<Item = (usize, Var, Rows)> + 'a {
    plan.steps.iter().flat_map(move |(at, step)| {
        let node = &function.nodes[*at];
        let inputs = node.inputs.iter().zip(step.inputs(node));
        inputs.filter_map(move |(var, rows)| Some((*at, *var, rows.filter(|_| !plan.is_rows(*var))?)))
    })
}

/// Is it a product or attention, which cost more the more rows they have?
fn is_product(node: &Node) -> bool {
    matches!(node.op, Op::Prim(Prim::MatMul { .. }))
        || matches!(node.work(), Work::Product { .. } | Work::Experts { .. } | Work::Attention(_))
}

/// The nodes that `var` depends on.
fn before(function: &Function, var: Var) -> HashSet<usize> {
    let mut found = HashSet::from([var.index()]);
    for at in (0..=var.index()).rev().filter(|at| *at < function.nodes.len()) {
        if found.contains(&at) {
            found.extend(function.nodes[at].inputs.iter().map(|input| input.index()));
        }
    }
    found
}
