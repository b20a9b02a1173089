//! From a lowered graph and a binding of its symbols to a list of launches at fixed places in memory.
//!
//! Each function is planned once: its values get offsets in a frame by their lifetimes, and a call's frame is laid
//! over the memory that is free at the call. The launches of all calls are then written out one after another.

use std::collections::HashMap;

use ridge_graph::{Bindings, FuncId, Function, Graph, Memory, Node, Op, Prim, Role, Type, Var};

use crate::alias::{alias_of, is_view, storage_root};
use crate::error::Result;
use crate::lanes;
use crate::launches::{Place, Plan, PlannedKernel, PlannedLaunch, Region, component_offsets, round_up};

/// Plans `graph`, as `lower` made it, for one binding of its symbols.
///
/// # Errors
/// When a symbol is unbound.
pub fn plan(graph: &Graph, bindings: &Bindings) -> Result<Plan> {
    let mut planner = Planner { graph, bindings, frames: Vec::new(), plan: Plan::default() };
    for index in 0..graph.functions.len() {
        let frame = planner.frame(FuncId(index as u32))?;
        planner.frames.push(frame);
    }
    let main = graph.main();
    let mut counts: HashMap<Role, u32> = HashMap::new();
    let mut args = Vec::new();
    for arg in &main.args {
        let count = counts.entry(arg.role).or_insert(0);
        let (region, sizes) = match arg.role {
            Role::Weight => (Region::Weight(*count), &mut planner.plan.weight_bytes),
            Role::State => (Region::State(*count), &mut planner.plan.state_bytes),
            // Main has no key: its caller would be the step, whose inputs it takes instead.
            Role::StepInput | Role::Data | Role::Key => (Region::Input(*count), &mut planner.plan.input_bytes),
        };
        *count += 1;
        sizes.push(component_offsets(&arg.ty, bindings)?.1);
        args.push(Place { region, offset: 0 });
    }
    let mut outputs = Vec::new();
    for output in main.outputs.iter().filter(|o| o.role == Role::Data) {
        planner.plan.output_bytes.push(component_offsets(main.ty(output.var), bindings)?.1);
        outputs.push(Place { region: Region::Output(outputs.len() as u32), offset: 0 });
    }
    let blocks = [Region::Arena, Region::Host].map(|region| Place { region, offset: 0 });
    [planner.plan.arena_bytes, planner.plan.host_bytes] = planner.frames[graph.main.index()].bytes;
    planner.expand(graph.main, &args, &outputs, blocks, &mut Vec::new());
    let mut plan = planner.plan;
    let late: Vec<Region> =
        main.args.iter().zip(&args).filter(|(arg, _)| arg.late).map(|(_, place)| place.region).collect();
    let reads_late = |launch: &PlannedLaunch| launch.inputs.iter().any(|place| late.contains(&place.region));
    plan.cut = plan.launches.iter().position(reads_late).unwrap_or(plan.launches.len());
    lanes::assign(&mut plan, graph, bindings)?;
    Ok(plan)
}

/// Where each value of a function is, relative to what its caller gives.
#[derive(Clone, Copy, Debug)]
enum Spot {
    /// At an argument, this many bytes in.
    Arg(usize, usize),
    /// At the place that the caller gives for data output `i`, this many bytes in.
    Output(usize, usize),
    /// In the frame of this memory.
    Frame(usize, usize),
}

/// Memory of one function, whoever calls it: `[device, host]`.
struct Frame {
    bytes: [usize; 2],
    /// By node and output.
    spots: Vec<Vec<Spot>>,
    /// Of a call node, where its callee's frames are; of others unused.
    callee_frames: Vec<[usize; 2]>,
    /// Of nodes that run, the index into `Plan::kernels`.
    kernels: Vec<Option<usize>>,
}

struct Planner<'a> {
    graph: &'a Graph,
    bindings: &'a Bindings,
    frames: Vec<Frame>,
    plan: Plan,
}

impl Planner<'_> {
    fn frame(&mut self, func: FuncId) -> Result<Frame> {
        let function = self.graph.function(func);
        let mut frame = Frame {
            bytes: [0; 2],
            spots: vec![Vec::new(); function.nodes.len()],
            callee_frames: vec![[0; 2]; function.nodes.len()],
            kernels: vec![None; function.nodes.len()],
        };
        let last_use = last_uses(function);
        let mut free = [FreeList::default(), FreeList::default()];
        let given: HashMap<Var, usize> = function
            .outputs
            .iter()
            .filter(|o| o.role == Role::Data)
            .enumerate()
            .map(|(i, o)| (storage_root(function, o.var), i))
            .collect();
        // Frame memory to give back after each node.
        let mut dying: Vec<Vec<(usize, usize, usize)>> = vec![Vec::new(); function.nodes.len()];
        for (index, node) in function.nodes.iter().enumerate() {
            // What the function gives has memory of its own.
            let in_place = self.is_in_place(node)? && !given.contains_key(&function.var(index, 0));
            for (out, ty) in node.outputs.iter().enumerate() {
                let var = function.var(index, out);
                let spot = if let Op::Arg(arg) = node.op {
                    Spot::Arg(arg, 0)
                } else if let Op::Prim(Prim::Component(part)) = node.op {
                    let (offsets, _) = component_offsets(function.ty(node.inputs[0]), self.bindings)?;
                    match frame.spots[node.inputs[0].index()][node.inputs[0].out as usize] {
                        Spot::Arg(arg, base) => Spot::Arg(arg, base + offsets[part]),
                        Spot::Output(output, base) => Spot::Output(output, base + offsets[part]),
                        Spot::Frame(memory, base) => Spot::Frame(memory, base + offsets[part]),
                    }
                } else if let Some(source) = alias_of(function, var) {
                    frame.spots[source.index()][source.out as usize]
                } else if in_place {
                    frame.spots[node.inputs[0].index()][node.inputs[0].out as usize]
                } else if let Some(output) = given.get(&var) {
                    Spot::Output(*output, 0)
                } else {
                    let bytes = round_up(component_offsets(ty, self.bindings)?.1);
                    let memory = usize::from(matches!(node.op, Op::Prim(Prim::Move(Memory::Host))));
                    let offset = free[memory].take(bytes);
                    let last = last_use[index][out].max(index);
                    dying[last].push((memory, offset, bytes));
                    Spot::Frame(memory, offset)
                };
                frame.spots[index].push(spot);
            }
            if let Op::Call(callee) = node.op {
                for (memory, free) in free.iter_mut().enumerate() {
                    let bytes = round_up(self.frames[callee.index()].bytes[memory]);
                    let offset = free.take(bytes);
                    frame.callee_frames[index][memory] = offset;
                    dying[index].push((memory, offset, bytes));
                }
            } else if !is_view(node) && !in_place {
                frame.kernels[index] = Some(self.kernel(func, index)?);
            }
            for (memory, offset, bytes) in dying[index].drain(..) {
                free[memory].give(offset, bytes);
            }
        }
        frame.bytes = free.map(|free| free.high_water);
        Ok(frame)
    }

    /// Is `node` a fetch of a parameter that the step reads where it is kept?
    fn is_in_place(&self, node: &Node) -> Result<bool> {
        match &node.op {
            Op::Prim(Prim::Fetch(fetch)) => Ok(fetch.is_in_place(self.bindings)?),
            _ => Ok(false),
        }
    }

    fn kernel(&mut self, func: FuncId, node: usize) -> Result<usize> {
        let function = self.graph.function(func);
        let n = &function.nodes[node];
        let shapes = |types: Vec<&Type>| -> Result<Vec<Vec<usize>>> {
            types.into_iter().map(|t| Ok(t.shape.eval(self.bindings)?)).collect()
        };
        self.plan.kernels.push(PlannedKernel {
            func,
            node,
            inputs: shapes(n.inputs.iter().map(|v| function.ty(*v)).collect())?,
            outputs: shapes(n.outputs.iter().collect())?,
            output_bytes: n
                .outputs
                .iter()
                .map(|ty| Ok(component_offsets(ty, self.bindings)?.1))
                .collect::<Result<_>>()?,
        });
        Ok(self.plan.kernels.len() - 1)
    }

    /// Counts a launch that copies a parameter to the workspace.
    fn count_copy(&mut self, copy: &PlannedKernel, from: Place) {
        let role = match from.region {
            Region::Weight(index) => Some((Role::Weight, index)),
            Region::State(index) => Some((Role::State, index)),
            Region::Arena | Region::Host | Region::Input(_) | Region::Output(_) => None,
        };
        let name = role.and_then(|(role, index)| self.graph.args(role).nth(index as usize));
        let dtype = self.graph.function(copy.func).nodes[copy.node].outputs[0].dtype;
        let bytes = copy.outputs[0].iter().product::<usize>() * dtype.size_bytes();
        self.plan.copies.extend(name.map(|arg| (arg.name.to_string(), bytes)));
    }

    fn expand(
        &mut self,
        func: FuncId,
        args: &[Place],
        outputs: &[Place],
        frames_at: [Place; 2],
        path: &mut Vec<std::sync::Arc<str>>,
    ) {
        let graph = self.graph;
        let function = graph.function(func);
        for (index, node) in function.nodes.iter().enumerate() {
            if is_view(node) {
                continue;
            }
            let frame = &self.frames[func.index()];
            let place = |var: Var| match frame.spots[var.index()][var.out as usize] {
                Spot::Arg(arg, offset) => args[arg].plus(offset),
                Spot::Output(output, offset) => outputs[output].plus(offset),
                Spot::Frame(memory, offset) => frames_at[memory].plus(offset),
            };
            let ins: Vec<Place> = node.inputs.iter().map(|v| place(*v)).collect();
            let outs: Vec<Place> = (0..node.outputs.len()).map(|o| place(function.var(index, o))).collect();
            if let Op::Call(callee) = node.op {
                let inner = [0, 1].map(|memory| frames_at[memory].plus(frame.callee_frames[index][memory]));
                let roles = graph.function(callee).outputs.iter().map(|o| o.role);
                let data: Vec<Place> =
                    outs.iter().zip(roles).filter(|(_, r)| *r == Role::Data).map(|(p, _)| *p).collect();
                path.push(node.scope.clone());
                self.expand(callee, &ins, &data, inner, path);
                path.pop();
            } else if let Some(kernel) = frame.kernels[index] {
                if is_copy(function, node) && outs[0].region == Region::Arena {
                    let copy = self.plan.kernels[kernel].clone();
                    self.count_copy(&copy, ins[0]);
                }
                self.plan.launches.push(PlannedLaunch {
                    kernel,
                    inputs: ins,
                    outputs: outs,
                    path: path.clone(),
                    communicates: false,
                    after: 0,
                });
            }
        }
    }
}

/// Is the value of `node` its input, in memory of its own?
fn is_copy(function: &Function, node: &Node) -> bool {
    matches!(node.op, Op::Prim(Prim::Cast(to)) if function.ty(node.inputs[0]).dtype == to)
}

/// The last node that reads the memory of each value, through whatever view.
fn last_uses(function: &Function) -> Vec<Vec<usize>> {
    let mut last: Vec<Vec<usize>> = function.nodes.iter().map(|n| vec![0; n.outputs.len()]).collect();
    for (index, node) in function.nodes.iter().enumerate() {
        for input in &node.inputs {
            let root = storage_root(function, *input);
            last[root.index()][root.out as usize] = index;
        }
    }
    // What is sent or moved stays until the call behind is over, so that the call may be computed meanwhile.
    let mut call = None;
    for (index, node) in function.nodes.iter().enumerate().rev() {
        match (&node.op, call) {
            (Op::Call(_), _) => call = Some(index),
            (op, Some(call)) if lanes::runs_beside(op) => {
                let root = storage_root(function, node.inputs[0]);
                let last = &mut last[root.index()][root.out as usize];
                *last = call.max(*last);
            }
            _ => {}
        }
    }
    last
}

/// First-fit allocation of offsets, merging neighbours that are free.
#[derive(Default)]
struct FreeList {
    /// `(offset, bytes)`, sorted, never touching one another or the high-water mark's end.
    free: Vec<(usize, usize)>,
    high_water: usize,
}

impl FreeList {
    fn take(&mut self, bytes: usize) -> usize {
        if bytes == 0 {
            return 0;
        }
        // The tightest hole that is large enough.
        let best = (0..self.free.len()).filter(|i| self.free[*i].1 >= bytes).min_by_key(|i| self.free[*i].1);
        if let Some(i) = best {
            let (offset, size) = self.free[i];
            if size == bytes {
                self.free.remove(i);
            } else {
                self.free[i] = (offset + bytes, size - bytes);
            }
            return offset;
        }
        // A hole at the end grows.
        if let Some((offset, size)) = self.free.last().copied()
            && offset + size == self.high_water
        {
            self.free.pop();
            self.high_water = offset + bytes;
            return offset;
        }
        self.high_water += bytes;
        self.high_water - bytes
    }

    fn give(&mut self, offset: usize, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let at = self.free.partition_point(|(o, _)| *o < offset);
        self.free.insert(at, (offset, bytes));
        if at + 1 < self.free.len() && offset + bytes == self.free[at + 1].0 {
            self.free[at].1 += self.free[at + 1].1;
            self.free.remove(at + 1);
        }
        if at > 0 && self.free[at - 1].0 + self.free[at - 1].1 == self.free[at].0 {
            self.free[at - 1].1 += self.free[at].1;
            self.free.remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_neighbours_merge_and_are_taken_again() {
        let mut list = FreeList::default();
        let (a, b, c) = (list.take(64), list.take(128), list.take(64));
        assert_eq!((a, b, c), (0, 64, 192));
        list.give(b, 128);
        list.give(a, 64);
        assert_eq!(list.take(192), 0);
        list.give(c, 64);
        assert_eq!(list.take(128), 192, "a hole at the end grows");
        assert_eq!(list.high_water, 320);
    }
}
