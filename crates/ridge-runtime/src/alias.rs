//! Reads of states alias them: a `state_read` is another name for the state's memory, without a launch or a copy.
//!
//! That is correct if all users of the value run before the state's next update. This pass orders the nodes of a function
//! accordingly. If no such order exists, the value is copied before the update; [`crate::plan`] counts such copies.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use ridge_graph::{FuncId, Function, Graph, Node, Op, Prim, Var};

/// The value whose memory `var` is: itself, or through views and in-place updates the value that it came from.
pub(crate) fn storage_root(function: &Function, mut var: Var) -> Var {
    while let Some(source) = alias_of(function, var) {
        var = source;
    }
    var
}

/// The input that shares memory with `var`: of a reshape, a component or a read its input, of a state's next version the
/// version before.
pub(crate) fn alias_of(function: &Function, var: Var) -> Option<Var> {
    let node = &function.nodes[var.index()];
    if function.ty(var).state && !matches!(node.op, Op::Arg(_)) {
        if let Op::Group(group) = &node.op {
            // As in its body: a group may give states in another order than it takes them.
            let of_body = storage_root(&group.body, group.body.outputs[var.out as usize].var);
            return match group.body.nodes[of_body.index()].op {
                Op::Arg(i) => Some(node.inputs[i]),
                _ => None,
            };
        }
        let position = node.outputs[..var.out as usize].iter().filter(|t| t.state).count();
        return node.inputs.iter().copied().filter(|v| function.ty(*v).state).nth(position);
    }
    matches!(node.op, Op::Prim(Prim::Reshape(_) | Prim::Component(_) | Prim::StateRead)).then(|| node.inputs[0])
}

/// Is the version `var` of a state another than the one that the function was given, or is it only read?
pub(crate) fn is_updated(graph: &Graph, func: FuncId, mut var: Var) -> bool {
    let function = graph.function(func);
    loop {
        match function.nodes[var.index()].op {
            Op::Arg(_) => return false,
            Op::Call(callee) => {
                let output = &graph.function(callee).outputs[var.out as usize];
                if is_updated(graph, callee, output.var) {
                    return true;
                }
            }
            _ => return true,
        }
        match alias_of(function, var) {
            Some(before) => var = before,
            None => return true,
        }
    }
}

/// Does the node only give memory another name?
pub(crate) fn is_view(node: &Node) -> bool {
    matches!(node.op, Op::Arg(_) | Op::Prim(Prim::Reshape(_) | Prim::Component(_) | Prim::StateRead))
}

/// A read of a state version that is replaced, and what must run before that.
struct AliasingRead {
    node: usize,
    /// The node that replaces the version.
    update: usize,
    /// The nodes that use what was read, through views too.
    users: Vec<usize>,
}

impl AliasingRead {
    fn is_in_order(&self) -> bool {
        self.users.iter().all(|user| *user < self.update)
    }
}

/// Reorders the nodes of `function`, and adds copies, until every use of a read comes before the update of its state.
pub(crate) fn order_reads(function: &mut Function) {
    let reads = replaced_reads(function);
    if reads.iter().all(AliasingRead::is_in_order) {
        return;
    }
    let (kept, late): (Vec<_>, Vec<_>) = reads.into_iter().partition(AliasingRead::is_in_order);
    let mut before = dependencies(function);
    for read in &kept {
        before[read.update].extend(&read.users);
    }
    let mut order: Vec<usize> = (0..function.nodes.len()).collect();
    let mut copied = Vec::new();
    for read in late {
        let known = before[read.update].len();
        before[read.update].extend(&read.users);
        match sorted(&before) {
            Some(found) => order = found,
            None => {
                before[read.update].truncate(known);
                copied.push(read.node);
            }
        }
    }
    rebuild(function, &order, &copied);
}

/// Moves the nodes of `function` that depend on a late step input behind all others. A call that is given a late value
/// depends on it as a whole.
pub(crate) fn defer_late(function: &mut Function) {
    if !function.args.iter().any(|arg| arg.late) {
        return;
    }
    let mut late = vec![false; function.nodes.len()];
    // Memory of states that a late node uses: what updates it later must stay behind that node.
    let mut used: Vec<Var> = Vec::new();
    for (index, node) in function.nodes.iter().enumerate() {
        let updates = node.outputs.iter().any(|t| t.state);
        late[index] = match node.op {
            Op::Arg(arg) => function.args[arg].late,
            _ => node.inputs.iter().any(|v| {
                let replaces_used = || updates && function.ty(*v).state && used.contains(&storage_root(function, *v));
                late[v.index()] || replaces_used()
            }),
        };
        if late[index] && !is_view(node) {
            used.extend(node.inputs.iter().map(|v| storage_root(function, *v)).filter(|root| function.ty(*root).state));
        }
    }
    let is_deferred = |index: &usize| late[*index] && !matches!(function.nodes[*index].op, Op::Arg(_));
    let (deferred, first): (Vec<usize>, Vec<usize>) = (0..function.nodes.len()).partition(is_deferred);
    let order: Vec<usize> = first.into_iter().chain(deferred).collect();
    rebuild(function, &order, &[]);
}

/// The reads of `function` whose state is updated later.
fn replaced_reads(function: &Function) -> Vec<AliasingRead> {
    let reads = function.nodes.iter().enumerate().filter(|(_, n)| matches!(n.op, Op::Prim(Prim::StateRead)));
    let of_read = |(node, read): (usize, &Node)| {
        let version = read.inputs[0];
        let updates = |n: &Node| n.inputs.contains(&version) && n.outputs.iter().any(|t| t.state);
        let update = function.nodes.iter().position(updates)?;
        let mut named = vec![node];
        let mut users = Vec::new();
        for (index, n) in function.nodes.iter().enumerate().skip(node + 1) {
            if n.inputs.iter().any(|v| named.contains(&v.index())) {
                if is_view(n) { named.push(index) } else { users.push(index) }
            }
        }
        Some(AliasingRead { node, update, users })
    };
    reads.filter_map(of_read).collect()
}

/// What each node comes after: its inputs, and the readers of a state version that it replaces.
fn dependencies(function: &Function) -> Vec<Vec<usize>> {
    let mut before: Vec<Vec<usize>> =
        function.nodes.iter().map(|n| n.inputs.iter().map(|v| v.index()).collect()).collect();
    for (index, node) in function.nodes.iter().enumerate().filter(|(_, n)| n.outputs.iter().any(|t| t.state)) {
        let replaced: Vec<Var> = node.inputs.iter().copied().filter(|v| function.ty(*v).state).collect();
        let readers = function.nodes.iter().enumerate().filter(|(_, n)| n.inputs.iter().any(|v| replaced.contains(v)));
        before[index].extend(readers.map(|(reader, _)| reader).filter(|reader| *reader != index));
    }
    before
}

/// The nodes in an order in which each comes after those `before` it, otherwise as they are numbered; `None` where they
/// depend on each other in a circle.
fn sorted(before: &[Vec<usize>]) -> Option<Vec<usize>> {
    let mut missing: Vec<usize> = before.iter().map(Vec::len).collect();
    let mut after = vec![Vec::new(); before.len()];
    for (node, before) in before.iter().enumerate() {
        before.iter().for_each(|b| after[*b].push(node));
    }
    let mut ready: BinaryHeap<Reverse<usize>> = (0..before.len()).filter(|n| missing[*n] == 0).map(Reverse).collect();
    let mut order = Vec::with_capacity(before.len());
    while let Some(Reverse(node)) = ready.pop() {
        order.push(node);
        for next in &after[node] {
            missing[*next] -= 1;
            if missing[*next] == 0 {
                ready.push(Reverse(*next));
            }
        }
    }
    (order.len() == before.len()).then_some(order)
}

/// `function` with its nodes in `order`, and a copy behind each of the reads `copied` that their users take instead.
fn rebuild(function: &mut Function, order: &[usize], copied: &[usize]) {
    let old = function.clone();
    let mut moved: Vec<usize> = vec![0; old.nodes.len()];
    let mut nodes: Vec<Node> = Vec::with_capacity(old.nodes.len() + copied.len());
    for index in order {
        let mut node = old.nodes[*index].clone();
        node.inputs = node.inputs.iter().map(|v| old.var(moved[v.index()], v.out as usize)).collect();
        nodes.push(node);
        if copied.contains(index) {
            let ty = old.nodes[*index].outputs[0].clone();
            nodes.push(Node {
                op: Op::Prim(Prim::Cast(ty.dtype)),
                inputs: vec![old.var(nodes.len() - 1, 0)],
                outputs: vec![ty],
                scope: Arc::clone(&old.nodes[*index].scope),
            });
        }
        moved[*index] = nodes.len() - 1;
    }
    for output in &mut function.outputs {
        output.var = old.var(moved[output.var.index()], output.var.out as usize);
    }
    function.nodes = nodes;
}

#[cfg(test)]
mod tests {
    use ridge_graph::passes::{Kernel, Pattern};
    use ridge_graph::{Bindings, Builder, DType, Graph, Role, Type};

    use crate::launches::{Place, Region};
    use crate::lower::lower;
    use crate::plan::plan;

    fn copies(graph: &Graph, outputs: &[&str]) -> Vec<(String, usize)> {
        let lowered = lower(graph, outputs, &[]).expect("lowers");
        plan(&lowered, &Bindings::new()).expect("plans").copies
    }

    fn ty() -> Type {
        Type::tensor(DType::F32, [4])
    }

    #[test]
    fn a_use_behind_the_update_is_moved_before_it() {
        let mut g = Builder::new();
        let (x, s) = (g.step_input("x", ty()).expect("fresh"), g.state("s", ty()).expect("fresh"));
        let old = g.state_read(s).expect("reads");
        g.state_write(s, x).expect("writes");
        let y = g.neg(old).expect("f32");
        let graph = g.finish(vec![("y".into(), y), ("old".into(), old)]).expect("finishes");
        assert_eq!(copies(&graph, &["y", "old"]), []);
    }

    #[test]
    fn new_minus_old_after_the_write_takes_one_copy() {
        let mut g = Builder::new();
        let (x, s) = (g.step_input("x", ty()).expect("fresh"), g.state("s", ty()).expect("fresh"));
        let old = g.state_read(s).expect("reads");
        let sum = g.add(old, x).expect("f32");
        let s = g.state_write(s, sum).expect("writes");
        let new = g.state_read(s).expect("reads");
        let change = g.sub(new, old).expect("f32");
        let graph = g.finish(vec![("change".into(), change)]).expect("finishes");
        assert_eq!(copies(&graph, &["change"]), [("s".to_owned(), 16)]);
    }

    #[test]
    fn of_two_states_that_are_exchanged_one_is_copied() {
        let mut g = Builder::new();
        let states = ["a", "b"].map(|name| g.state(name, ty()).expect("fresh"));
        let old = states.map(|s| g.state_read(s).expect("reads"));
        g.state_write(states[0], old[1]).expect("writes");
        g.state_write(states[1], old[0]).expect("writes");
        let graph = g.finish(Vec::new()).expect("finishes");
        assert_eq!(copies(&graph, &[]).len(), 1);
    }

    #[test]
    fn what_does_not_depend_on_a_late_input_comes_first() {
        let mut g = Builder::new();
        let mask = g.late_input("mask", ty()).expect("fresh");
        let (x, s) = (g.step_input("x", ty()).expect("fresh"), g.state("s", ty()).expect("fresh"));
        let t = g.state("t", ty()).expect("fresh");
        let (old, other) = (g.state_read(s).expect("reads"), g.state_read(t).expect("reads"));
        let masked = g.mul(old, mask).expect("f32");
        let product = g.exp(x).expect("f32");
        let product = g.sort(product, 0, true, 4).expect("sorts").0;
        // Must stay behind the masked read of `s`, though it does not depend on the mask.
        g.state_write(s, product).expect("writes");
        let sum = g.add(other, product).expect("f32");
        g.state_write(t, sum).expect("writes");
        let graph = g.finish(vec![("masked".into(), masked), ("product".into(), product)]).expect("finishes");
        let lowered = lower(&graph, &["masked", "product"], &[]).expect("lowers");
        let plan = plan(&lowered, &Bindings::new()).expect("plans");
        assert!(plan.cut > 0 && plan.cut < plan.launches.len(), "{} of {}", plan.cut, plan.launches.len());
        let writes = |state: u32| {
            let written = Place { region: Region::State(state), offset: 0 };
            plan.launches.iter().position(|launch| launch.outputs.contains(&written)).expect("is written")
        };
        let index = |name: &str| lowered.args(Role::State).position(|arg| &*arg.name == name).expect("is kept") as u32;
        assert!(writes(index("s")) >= plan.cut && writes(index("t")) < plan.cut, "{lowered}");
        let reads = |launch: &crate::launches::PlannedLaunch| {
            launch.inputs.iter().any(|place| place.region == Region::State(index("s")))
        };
        let read = plan.launches.iter().position(reads).expect("is read");
        assert!(read >= plan.cut && read <= writes(index("s")), "{lowered}");
    }

    #[test]
    fn a_group_may_give_states_in_another_order_than_it_takes_them() {
        let mut g = Builder::new();
        let ints = |shape: &[usize]| Type::tensor(DType::I32, ridge_graph::Shape::new(shape.iter().copied()));
        let mut x = g.step_input("x", Type::tensor(DType::F32, [3, 4])).expect("fresh");
        let w = g.weight("w", Type::tensor(DType::F32, [4, 2])).expect("fresh");
        let lines = g.step_input("lines", ints(&[2, 2])).expect("fresh");
        let (ids, starts) = (g.step_input("ids", ints(&[3])), g.step_input("starts", ints(&[3])));
        let of_tokens = [ids.expect("fresh"), starts.expect("fresh")];
        for name in ["s", "t"] {
            let table = g.state(name, Type::state(DType::F32, [5, 4])).expect("fresh");
            x = g.stateful_conv1d([x, w, table, lines], of_tokens, None, false).expect("convolves")[0];
        }
        let graph = g.finish(vec![("y".into(), x)]).expect("finishes");
        let first = "g@stateful_conv1d(x, w, s, lines, ids, starts).0";
        let both = Pattern::parse(&format!("stateful_conv1d({first}, w, t, lines, ids, starts), g.1"));
        let lowered = lower(&graph, &["y"], &[Kernel::at_roofline("both", both, |_| true)]).expect("lowers");
        let plan = plan(&lowered, &Bindings::new()).expect("plans");
        let [launch] = &plan.launches[..] else { panic!("{lowered}") };
        // It takes x, w, s, three more, w and t, and gives y, t and s.
        assert_eq!(launch.outputs[1..], [launch.inputs[7], launch.inputs[2]]);
        assert_ne!(launch.inputs[7], launch.inputs[2]);
    }

    #[test]
    fn what_is_given_to_a_function_that_updates_the_state_is_copied() {
        let mut g = Builder::new();
        let add = g
            .function("add", |g| {
                let by = g.arg("by", ty());
                let s = g.state("s", ty())?;
                let old = g.state_read(s)?;
                let sum = g.add(old, by)?;
                let s = g.state_write(s, sum)?;
                let new = g.state_read(s)?;
                Ok(vec![g.add(new, by)?])
            })
            .expect("builds");
        let s = g.state("s", ty()).expect("fresh");
        let old = g.state_read(s).expect("reads");
        let y = g.call(add, &[old]).expect("calls")[0];
        let graph = g.finish(vec![("y".into(), y)]).expect("finishes");
        assert_eq!(copies(&graph, &["y"]), [("s".to_owned(), 16)]);
    }
}
