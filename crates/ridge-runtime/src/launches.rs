//! The contents of a plan: launches with the memory offsets of their operands.

use ridge_graph::{Bindings, FuncId, Type};

use crate::error::{Result, RuntimeError};

/// Alignment of every value and component, in bytes: a cache line, and a full vector register.
const ALIGN: usize = 64;

/// A block of memory that places refer to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Region {
    /// The workspace, shared by all programs of a device.
    Arena,
    /// Memory of the host for values that are moved there, shared likewise.
    Host,
    /// Weight `i` of the main function.
    Weight(u32),
    /// State `i` of the main function.
    State(u32),
    /// Step input `i` of the main function.
    Input(u32),
    /// Data output `i` of the main function.
    Output(u32),
}

/// Where a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The block.
    pub region: Region,
    /// Bytes from its start.
    pub offset: usize,
}

impl Place {
    pub(crate) fn plus(self, bytes: usize) -> Self {
        Self { offset: self.offset + bytes, ..self }
    }
}

/// A node to be run, with its concrete types; one for each function, not for each call.
#[derive(Clone, Debug)]
pub struct PlannedKernel {
    /// Its function.
    pub func: FuncId,
    /// Its index there.
    pub node: usize,
    /// Shapes of its inputs.
    pub inputs: Vec<Vec<usize>>,
    /// Shapes of its outputs.
    pub outputs: Vec<Vec<usize>>,
    /// Bytes of each of its outputs.
    pub output_bytes: Vec<usize>,
}

/// One run of a kernel.
#[derive(Clone, Debug)]
pub struct PlannedLaunch {
    /// Index into [`Plan::kernels`].
    pub kernel: usize,
    /// Where its inputs are.
    pub inputs: Vec<Place>,
    /// Where its outputs go. A state output has the place of the state.
    pub outputs: Vec<Place>,
    /// The calls that lead to it: scopes of the call nodes, such as `model.layers.3`, outermost first.
    pub path: Vec<std::sync::Arc<str>>,
    /// Does it run in the lane of communication and copies, beside the launches behind it that do not wait for it?
    pub communicates: bool,
    /// How many launches of that lane must be complete before this one begins. They run in order. All are complete at the
    /// end of the step.
    pub after: usize,
}

/// What a step of one bucket does, and the memory it needs.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Distinct kernels.
    pub kernels: Vec<PlannedKernel>,
    /// What runs, in order.
    pub launches: Vec<PlannedLaunch>,
    /// Number of launches before the first that reads a late input, all where none does: they run when the step is
    /// submitted, the rest when its late inputs are there.
    pub cut: usize,
    /// Bytes of workspace.
    pub arena_bytes: usize,
    /// Bytes of memory of the host that values are moved to.
    pub host_bytes: usize,
    /// Bytes of each weight, state, step input and data output of the main function, in order.
    pub weight_bytes: Vec<usize>,
    /// See `weight_bytes`.
    pub state_bytes: Vec<usize>,
    /// See `weight_bytes`.
    pub input_bytes: Vec<usize>,
    /// See `weight_bytes`.
    pub output_bytes: Vec<usize>,
    /// Copies of weights and states to the workspace, because they are used after they are updated: the name in the main
    /// function and the bytes of each.
    pub copies: Vec<(String, usize)>,
}

impl Plan {
    /// Bytes of all step inputs and data outputs.
    pub fn staging_bytes(&self) -> usize {
        self.input_bytes.iter().chain(&self.output_bytes).sum()
    }
}

/// Offsets of a value's components, one after another, and the bytes of all. A plain value has one component.
///
/// # Errors
/// When a symbol is unbound.
pub fn component_offsets(ty: &Type, bindings: &Bindings) -> Result<(Vec<usize>, usize)> {
    let sizes: Vec<usize> = match &ty.format {
        None => vec![plain_bytes(ty, bindings)?],
        Some(format) => {
            format.components(&ty.shape).iter().map(|c| plain_bytes(&c.ty(), bindings)).collect::<Result<_>>()?
        }
    };
    let mut end = 0usize;
    let mut offsets = Vec::with_capacity(sizes.len());
    for size in sizes {
        let start = round_up(end);
        end = start.checked_add(size).filter(|e| *e <= MAX_BYTES).ok_or_else(|| too_large(ty))?;
        offsets.push(start);
    }
    Ok((offsets, end))
}

/// The most bytes of one value: far beyond any machine, and far from where sums of offsets wrap.
const MAX_BYTES: usize = usize::MAX >> 16;

fn too_large(ty: &Type) -> RuntimeError {
    RuntimeError::OutOfMemory { what: ty.to_string(), needed: MAX_BYTES, remedy: "check the extents of the step" }
}

fn plain_bytes(ty: &Type, bindings: &Bindings) -> Result<usize> {
    let extents = ty.shape.eval(bindings)?;
    // Nothing times anything is nothing, however large.
    if extents.contains(&0) {
        return Ok(0);
    }
    let bytes = extents.iter().try_fold(ty.dtype.size_bytes(), |bytes, extent| bytes.checked_mul(*extent));
    bytes.filter(|b| *b <= MAX_BYTES).ok_or_else(|| too_large(ty))
}

pub(crate) fn round_up(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN)
}
