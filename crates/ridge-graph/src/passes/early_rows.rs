//! Rows are taken before they are computed. A prompt's step wants logits behind its last token alone, so of the last layer only
//! that token's row is wanted, once keys and values of all tokens are in the cache: `take_rows(f(x, w), rows)` becomes
//! `f(take_rows(x, rows), w)`, through calls of layer functions too, whose last calls become calls of functions of their own.
//!
//! Read `early_rows/rule.rs` for the ops that rows are taken through and `early_rows/plan.rs` for what becomes of a function; this
//! file rewrites functions by such plans.

mod plan;
mod rule;

use std::collections::{HashMap, HashSet};

use self::plan::{Plan, Planner, Step, Wanted, axis_of, is_taking};
use self::rule::{Rows, Taken};
use super::order::Draft;
use super::tidy::tidy;
use crate::graph::{Arg, CompositeRef, FuncId, Function, Graph, Node, Op, Role, Var};
use crate::ops::TakeRows;
use crate::types::Type;

/// Moves the [`TakeRows`] of main towards its arguments, as far as all that they pass is read by rows alone, so that nothing is
/// computed twice, and if products or attention are among it. Of what is taken by several indices, the first that something
/// is gained by moves. Products of one input stay together: see [`group_linears`](super::group_linears).
///
/// Rows of padding, those of negative indices, change; others do not. Indices must be below the extent that they index. Nothing
/// moves behind an index that is computed from a state after an update, where what would move reads the state before it.
pub fn take_rows_early(graph: &mut Graph) {
    let main = graph.main();
    let mut indices: Vec<(Var, Taken)> = Vec::new();
    for node in &main.nodes {
        let (Some(axis), [x, rows]) = (axis_of(node), &node.inputs[..]) else { continue };
        let all = main.ty(*x).shape.0[axis].clone();
        let taken = Taken { all, some: main.ty(*rows).shape.last() };
        if taken.all != taken.some && indices.iter().all(|(known, _)| known != rows) {
            indices.push((*rows, taken));
        }
    }
    for (rows, taken) in indices {
        let mut planner = Planner::new(graph, taken);
        if let Some(plan) = planner.main(rows) {
            let index = main.ty(rows).clone();
            let owner = graph.functions.iter().map(|function| function.owner).max().unwrap_or(0);
            let names = graph.functions.iter().map(|function| function.name.to_string()).collect();
            let (made, functions) = (HashMap::new(), Vec::new());
            let mut rewriter = Rewriter { graph, planner, index, made, functions, owner, names };
            let Some(main) = rewriter.rewritten(graph.main().clone(), &plan, &Wanted::new(), Some(rows)) else {
                continue;
            };
            let made = rewriter.functions;
            graph.functions.truncate(graph.main.index());
            graph.functions.extend(made);
            graph.main = FuncId(graph.functions.len() as u32);
            graph.functions.push(main);
            tidy(graph);
            graph.drop_uncalled();
            return;
        }
    }
}

struct Rewriter<'g> {
    graph: &'g Graph,
    planner: Planner<'g>,
    /// The type of the index.
    index: Type,
    /// The functions of calls that give rows, and whether they take the index.
    made: HashMap<(FuncId, Wanted), (FuncId, bool)>,
    /// Functions made, which are to come behind those of the graph but for main.
    functions: Vec<Function>,
    /// The last owner of values that a function has, finished or not.
    owner: u32,
    /// The names of all functions, finished or not.
    names: HashSet<String>,
}

impl Rewriter<'_> {
    /// The function that gives the `wanted` outputs of `callee` as rows, and whether it takes the index behind its other arguments;
    /// `None` as of [`Self::rewritten`].
    fn function(&mut self, callee: FuncId, wanted: &Wanted) -> Option<(FuncId, bool)> {
        let key = (callee, wanted.clone());
        if let Some(made) = self.made.get(&key) {
            return Some(*made);
        }
        let plan = self.planner.plan(callee, wanted).expect("was planned with its caller");
        let mut function = self.graph.function(callee).clone();
        let numbered = (2..).map(|nth| format!("{}_rows_{nth}", function.name));
        let mut names = std::iter::once(format!("{}_rows", function.name)).chain(numbered);
        // Those that it calls are made while it is not finished.
        let name = names.find(|name| !self.names.contains(name)).unwrap_or_default();
        function.name = name.as_str().into();
        self.names.insert(name);
        self.owner += 1;
        own(&mut function, self.owner);
        let index = plan.takes.then(|| {
            function.args.push(Arg::new("taken_rows", self.index.clone(), Role::Data));
            function.nodes.push(Node {
                op: Op::Arg(function.args.len() - 1),
                inputs: Vec::new(),
                outputs: vec![self.index.clone()],
                scope: "".into(),
            });
            function.var(function.nodes.len() - 1, 0)
        });
        let function = self.rewritten(function, &plan, wanted, index)?;
        self.functions.push(function);
        let made = (FuncId((self.graph.main.index() + self.functions.len() - 1) as u32), plan.takes);
        self.made.insert(key, made);
        Some(made)
    }

    /// `function` as `plan` says, with the `wanted` outputs as rows, which `index` names; `None` where nodes would have to come
    /// before what they depend on: the index depends on an update of a state that a node reads before it.
    fn rewritten(
        &mut self,
        mut function: Function,
        plan: &Plan,
        wanted: &Wanted,
        index: Option<Var>,
    ) -> Option<Function> {
        let nodes = function.nodes.len();
        let mut takes = Takes { index, made: HashMap::new(), places: Vec::new() };
        for (&at, step) in &plan.steps {
            let mut node = function.nodes[at].clone();
            let read = step.inputs(&node);
            for (input, rows) in node.inputs.iter_mut().zip(read) {
                if let Some(Rows::Of(axis)) = rows
                    && !plan.is_rows(*input)
                {
                    *input = takes.of(&mut function, *input, axis, at);
                }
            }
            match step {
                Step::Node(moved) => (node.op, node.outputs) = (moved.op.clone(), moved.outputs.clone()),
                Step::Arg(ty) => {
                    node.outputs = vec![ty.clone()];
                    if let Op::Arg(arg) = node.op {
                        function.args[arg].ty = ty.clone();
                    }
                }
                Step::Call { callee, wanted, outputs, .. } => {
                    let (made, takes_index) = self.function(*callee, wanted)?;
                    node.op = Op::Call(made);
                    node.outputs.clone_from(outputs);
                    node.inputs.extend(index.filter(|_| takes_index));
                }
            }
            function.nodes[at] = node;
        }
        for (output, axis) in wanted {
            let var = function.outputs[*output].var;
            if !plan.is_rows(var) {
                function.outputs[*output].var = takes.of(&mut function, var, *axis, nodes);
            }
        }
        // Rows were taken of a value that is rows already.
        let of_rows = |at: &usize| {
            let node = &function.nodes[*at];
            index.is_some_and(|index| is_taking(node, index)) && plan.is_rows(node.inputs[0])
        };
        let needless: Vec<usize> = (0..nodes).filter(of_rows).collect();
        let places = takes.places;
        let mut draft = Draft::new(function);
        for at in needless {
            if let Some(node) = draft.nodes[at].take() {
                draft.replace(draft.var(at, 0), node.inputs[0]);
            }
        }
        draft.try_finish(|node| node.checked_sub(nodes).map_or(node, |new| places[new]))
    }
}

/// The takings of rows that are added to a function.
struct Takes {
    index: Option<Var>,
    made: HashMap<(Var, usize), Var>,
    /// Where each is first read.
    places: Vec<usize>,
}

impl Takes {
    /// The rows of `x` along `axis`, read by node `at`.
    fn of(&mut self, function: &mut Function, x: Var, axis: usize, at: usize) -> Var {
        if let Some(taken) = self.made.get(&(x, axis)) {
            return *taken;
        }
        let index = self.index.expect("a function that takes rows has their index");
        let mut ty = function.ty(x).clone();
        ty.shape.0[axis] = function.ty(index).shape.last();
        let op = Op::Composite(CompositeRef::new(TakeRows { axis }));
        let scope = function.nodes.get(at).map_or_else(|| "".into(), |node| node.scope.clone());
        function.nodes.push(Node { op, inputs: vec![x, index], outputs: vec![ty], scope });
        self.places.push(at);
        let taken = function.var(function.nodes.len() - 1, 0);
        self.made.insert((x, axis), taken);
        taken
    }
}

/// Makes the values of a copied function its own.
fn own(function: &mut Function, owner: u32) {
    function.owner = owner;
    let vars = function.nodes.iter_mut().flat_map(|node| &mut node.inputs);
    vars.chain(function.outputs.iter_mut().map(|output| &mut output.var)).for_each(|var| var.owner = owner);
}

#[cfg(test)]
mod tests;
