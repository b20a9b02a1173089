//! A memory snapshot of a step, from its plan: the values in the workspace, and in memory of the host that they are moved to, with
//! their offsets and lifetimes.

use ridge_graph::{Bindings, Graph, Role};

use crate::error::Result;
use crate::launches::{Place, Plan, Region, component_offsets};

/// A value in the workspace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveValue {
    /// Where in the model the launch is that computes it, such as `model.layers.3.self_attn`; empty in main without scope.
    pub place: String,
    /// The op that computes it.
    pub op: String,
    /// Bytes from the begin of the workspace.
    pub offset: usize,
    /// Its size in bytes, without what aligns the next value.
    pub bytes: usize,
    /// The launch that computes it.
    pub first: usize,
    /// The last launch that uses it.
    pub last: usize,
}

/// Something of the main function that is no value of the workspace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedBytes {
    /// Its name.
    pub name: String,
    /// Its size in bytes.
    pub bytes: usize,
}

/// What a step of one bucket has in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemorySnapshot {
    /// Bytes of workspace that the plan takes, holes between values included.
    pub arena_bytes: usize,
    /// The values in it, in the order in which they are computed.
    pub values: Vec<LiveValue>,
    /// Bytes of memory of the host that the plan moves values to, holes included.
    pub host_bytes: usize,
    /// The values in it, in the order in which they are moved there.
    pub host_values: Vec<LiveValue>,
    /// The most bytes of them at a time.
    pub host_peak_bytes: usize,
    /// Number of launches.
    pub launches: usize,
    /// The launch during which the most bytes are live; 0 where there is none.
    pub peak: usize,
    /// Bytes that are live then.
    pub peak_bytes: usize,
    /// The op of that launch, with its place: `attention at model.layers.0.self_attn`.
    pub peak_op: String,
    /// The weights that the step reads.
    pub weights: Vec<NamedBytes>,
    /// The states that it reads or updates.
    pub states: Vec<NamedBytes>,
    /// Its inputs.
    pub inputs: Vec<NamedBytes>,
    /// Its outputs.
    pub outputs: Vec<NamedBytes>,
}

/// The snapshot of a step that runs `plan`, made of `graph` under `bindings`.
///
/// # Errors
/// When a symbol is unbound.
pub fn memory_snapshot(graph: &Graph, plan: &Plan, bindings: &Bindings) -> Result<MemorySnapshot> {
    let mut blocks = [Region::Arena, Region::Host].map(BlockValues::of);
    let mut names = Vec::with_capacity(plan.launches.len());
    for (at, launch) in plan.launches.iter().enumerate() {
        let kernel = &plan.kernels[launch.kernel];
        let node = &graph.function(kernel.func).nodes[kernel.node];
        let scopes = launch.path.iter().chain([&node.scope]).map(|scope| &**scope).filter(|scope| !scope.is_empty());
        let place = scopes.collect::<Vec<_>>().join(".");
        blocks.iter_mut().for_each(|block| launch.inputs.iter().for_each(|input| block.read(*input, at)));
        for (output, ty) in launch.outputs.iter().zip(&node.outputs) {
            let bytes = component_offsets(ty, bindings)?.1;
            let (place, op) = (place.clone(), node.op_name().to_owned());
            let value = LiveValue { place, op, offset: output.offset, bytes, first: at, last: at };
            blocks
                .iter_mut()
                .filter(|block| block.region == output.region)
                .for_each(|block| block.write(value.clone()));
        }
        names.push(if place.is_empty() { node.op_name().to_owned() } else { format!("{} at {place}", node.op_name()) });
    }
    let [values, host_values] = blocks.map(|block| block.values);
    let (peak, peak_bytes) = peak_of(&values, plan.launches.len());
    let (_, host_peak_bytes) = peak_of(&host_values, plan.launches.len());
    let main = graph.main();
    let args = |role: Role, bytes: &[usize]| -> Vec<NamedBytes> {
        let args = main.args.iter().filter(|arg| arg.role == role);
        args.zip(bytes).map(|(arg, bytes)| NamedBytes { name: arg.name.to_string(), bytes: *bytes }).collect()
    };
    let outputs = main.outputs.iter().filter(|o| o.role == Role::Data).zip(&plan.output_bytes);
    Ok(MemorySnapshot {
        arena_bytes: plan.arena_bytes,
        host_bytes: plan.host_bytes,
        host_values,
        host_peak_bytes,
        launches: plan.launches.len(),
        peak,
        peak_bytes,
        peak_op: names.get(peak).cloned().unwrap_or_default(),
        weights: args(Role::Weight, &plan.weight_bytes),
        states: args(Role::State, &plan.state_bytes),
        inputs: args(Role::StepInput, &plan.input_bytes),
        outputs: outputs.map(|(o, bytes)| NamedBytes { name: o.name.to_string(), bytes: *bytes }).collect(),
        values,
    })
}

/// The values of one block of memory so far.
struct BlockValues {
    region: Region,
    values: Vec<LiveValue>,
    /// Indices of values that nobody has written over yet.
    present: Vec<usize>,
}

impl BlockValues {
    fn of(region: Region) -> Self {
        Self { region, values: Vec::new(), present: Vec::new() }
    }

    /// A launch reads at `place`.
    fn read(&mut self, place: Place, launch: usize) {
        let holds = |value: &LiveValue| {
            place.offset == value.offset || (value.offset..value.offset + value.bytes).contains(&place.offset)
        };
        if place.region == self.region
            && let Some(value) = self.present.iter().rev().find(|i| holds(&self.values[**i]))
        {
            self.values[*value].last = launch;
        }
    }

    /// A launch writes a value.
    fn write(&mut self, value: LiveValue) {
        if value.bytes == 0 {
            return;
        }
        let (start, end) = (value.offset, value.offset + value.bytes);
        self.present.retain(|i| {
            let known = &self.values[*i];
            known.offset + known.bytes <= start || end <= known.offset
        });
        self.present.push(self.values.len());
        self.values.push(value);
    }
}

/// The first launch at which the most bytes are live, and how many.
fn peak_of(values: &[LiveValue], launches: usize) -> (usize, usize) {
    let mut begins = vec![0usize; launches];
    let mut ends = vec![0usize; launches];
    for value in values {
        begins[value.first] += value.bytes;
        ends[value.last] += value.bytes;
    }
    let (mut live, mut peak) = (0, (0, 0));
    for at in 0..launches {
        live += begins[at];
        if live > peak.1 {
            peak = (at, live);
        }
        live -= ends[at];
    }
    peak
}
