//! Linears with what follows them: `kernels/linear_rows.cu` for few rows, matrix products with a second pass for many.

use ridge_graph::ops::{Linear, LinearGroup, RmsNorm};
use ridge_graph::{DType, Function, Op};

use super::entry::CudaKernelEntry;
use super::norm;
use crate::gemm;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaOperand, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, SlotOffset,
    composite, each, grid, input, name, numbers, output,
};
use crate::prims::{MatrixProduct, product};

/// The weights are prefetched; see [`DeviceAction::Launch`].
pub(super) const ROWS: KernelText<'_> =
    KernelText::new(concat!(include_str!("../../kernels/norm.cuh"), include_str!("../../kernels/linear_rows.cu")))
        .with_tiles()
        .early_launch();
pub(super) const AFTER: KernelText<'_> = KernelText::new(include_str!("../../kernels/linear_after.cu")).early_launch();

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let entries = [
        CudaKernelEntry::new("linear", "linear(x, w)", supports, |s| make(s, LinearEpilogue::Nothing)),
        CudaKernelEntry::new("linear_bias", "linear(x, w, b)", supports, |s| make(s, LinearEpilogue::Nothing)),
        CudaKernelEntry::new("linear_group", "linear_group(x, ...)", supports, |s| make(s, LinearEpilogue::Nothing)),
        CudaKernelEntry::new("norm_linear_group", "linear_group(rms_norm(x, w), ...)", normed, |s| {
            make(s, LinearEpilogue::Nothing)
        }),
        CudaKernelEntry::new("linear_add", "add(r, linear(x, w))", adds, |s| make(s, LinearEpilogue::Add)),
        CudaKernelEntry::new("linear_bias_add", "add(r, linear(x, w, b))", adds, |s| make(s, LinearEpilogue::Add)),
        CudaKernelEntry::new("linear_swiglu", "swiglu(g@linear_group(x, ...).0, g.1)", gates, |s| {
            make(s, LinearEpilogue::Swiglu)
        }),
        CudaKernelEntry::new(
            "norm_linear_swiglu",
            "swiglu(g@linear_group(rms_norm(x, w), ...).0, g.1)",
            |body| gates(body) && normed(body),
            |s| make(s, LinearEpilogue::Swiglu),
        ),
    ];
    // Few rows are streamed, many go by tiles: their sums are in other orders.
    entries.map(CudaKernelEntry::numerics_by_extents).into()
}

/// The depth from which on 16 warps of a block have enough to do.
const DEEP: usize = 4096;
/// What begins in scratch memory begins at a multiple of this many bytes.
const ALIGN: usize = 256;

/// Bytes of a block's ring, as the text has it.
const RING: u32 = 64 << 10;

/// What is done to the product.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LinearEpilogue {
    Nothing,
    /// Input 0 is added.
    Add,
    /// The first weight's product is the gate of the second's.
    Swiglu,
}

/// Plain weights, and x as it is.
fn supports(body: &Function) -> bool {
    body.args.iter().all(|a| a.ty.format.is_none())
}

/// The norm's row is one that its kernel takes.
fn normed(body: &Function) -> bool {
    supports(body) && norm::wide(&body.args[0].ty)
}

/// Nothing is broadcast.
fn adds(body: &Function) -> bool {
    let sum = body.ty(body.outputs[0].var);
    let product = body.nodes.iter().find(|n| matches!(n.op, Op::Composite(_)));
    supports(body) && body.args[0].ty == *sum && product.is_some_and(|n| n.outputs[0] == *sum)
}

fn gates(body: &Function) -> bool {
    supports(body) && composite::<LinearGroup>(body).is_some_and(|g| g.count == 2 && !g.biases)
}

/// A linear or several of one input.
struct LinearCall<'a> {
    spec: &'a CudaKernelSpec<'a>,
    after: LinearEpilogue,
    /// The input that is x.
    x: usize,
    /// Is a norm taken of it, by the weight behind it?
    norm: Option<&'a RmsNorm>,
    /// The first weight; the others and then biases follow.
    first: usize,
    count: usize,
    biases: bool,
    rows: usize,
    depth: usize,
}

fn make(spec: &CudaKernelSpec<'_>, after: LinearEpilogue) -> Result<CudaKernel, String> {
    let (count, biases) = match (spec.composite::<Linear>(), spec.composite::<LinearGroup>()) {
        (Some(one), _) => (1, one.bias),
        (_, Some(group)) => (group.count, group.biases),
        _ => return Err("no linear in the group".into()),
    };
    let x = usize::from(after == LinearEpilogue::Add);
    let norm = spec.composite::<RmsNorm>();
    let shape = &spec.inputs[x].shape;
    let (depth, rows) = (shape.last().copied().unwrap_or(1), shape[..shape.len() - 1].iter().product());
    let first = x + 1 + usize::from(norm.is_some());
    let linears = LinearCall { spec, after, x, norm, first, count, biases, rows, depth };
    if linears.streams() { linears.streamed() } else { linears.multiplied() }
}

fn flag(on: bool) -> &'static str {
    if on { "1" } else { "0" }
}

impl LinearCall<'_> {
    fn x(&self) -> &CudaOperand {
        &self.spec.inputs[self.x]
    }

    fn weights(&self) -> &[CudaOperand] {
        &self.spec.inputs[self.first..][..self.count]
    }

    /// The input that is bias `i`, or the first where there is none.
    fn bias(&self, i: usize) -> usize {
        if self.biases { self.first + self.count + i } else { 0 }
    }

    /// Are there few rows, of a dtype that tensor cores take?
    fn streams(&self) -> bool {
        let dtype = self.x().dtype;
        matches!(dtype, DType::BF16 | DType::F16)
            && self.weights().iter().all(|w| w.dtype == dtype)
            && (1..=16).contains(&self.rows)
            && self.depth.is_multiple_of(8)
            && self.depth > 0
    }

    /// The norm of x into scratch memory, where there is one, and where x is from then on.
    fn normed(&self) -> Result<(CudaKernel, SlotOffset), String> {
        if self.norm.is_none() {
            return Ok((CudaKernel::default(), (OperandSlot::Input(self.x), 0)));
        }
        let to = LaunchArg::Pointer(OperandSlot::Scratch, 0);
        let mut kernel = norm::launch(self.spec, 1, [to.clone(), to])?;
        kernel.scratch = self.x().bytes.next_multiple_of(ALIGN);
        Ok((kernel, (OperandSlot::Scratch, 0)))
    }

    /// Every weight read once, by one launch.
    fn streamed(&self) -> Result<CudaKernel, String> {
        let gated = self.after == LinearEpilogue::Swiglu;
        let columns: Vec<usize> = self.weights().iter().map(|w| w.shape[0]).collect();
        let across = columns.iter().map(|n| n.div_ceil(16));
        let tiles = if gated { columns[0].div_ceil(16) } else { across.sum() };
        let warps = if self.depth >= DEEP && !gated { 16 } else { 8 };
        // One row's norm is made on the way; those of several would keep the weights waiting.
        let on_the_way = self.norm.is_some() && self.rows == 1;
        let threads = norm::threads_of(self.depth * self.x().dtype.size_bytes() / 16);
        let (mut kernel, x) =
            if on_the_way { (CudaKernel::default(), (OperandSlot::Input(self.x), 0)) } else { self.normed()? };
        let gain = &self.spec.inputs[self.x + usize::from(self.norm.is_some())];
        let defines = [
            ("D", name(self.x().dtype)),
            ("ROWS", if self.rows <= 8 { "8" } else { "16" }),
            ("WARPS", &*warps.to_string()),
            ("COUNT", &*self.count.to_string()),
            ("ADD", flag(self.after == LinearEpilogue::Add)),
            ("BIAS", flag(self.biases)),
            ("BIAS_TYPE", name(self.spec.inputs[self.bias(0)].dtype)),
            ("SWIGLU", flag(gated)),
            ("NORM", if on_the_way { &*threads.to_string() } else { "0" }),
            ("NORM_TYPE", name(gain.dtype)),
        ];
        let weights = (0..self.count).map(|i| OperandSlot::Input(self.first + i));
        // A gated group has one output.
        let outputs = (0..self.count).map(|i| OperandSlot::Output(if gated { 0 } else { i }));
        let biases = (0..self.count).map(|i| OperandSlot::Input(self.bias(i)));
        let args = vec![
            LaunchArg::Pointer(x.0, x.1),
            input(0),
            input(self.x + usize::from(self.norm.is_some())),
            LaunchArg::Float(self.norm.map_or(0.0, |norm| norm.eps as f32)),
            LaunchArg::Pointers(weights.chain(outputs).chain(biases).map(|slot| (slot, 0)).collect()),
            numbers(&[&[self.rows, self.depth][..], &columns].concat()),
        ];
        let mut launch = grid(CudaSource::new("linear_rows", &defines, &ROWS), [tiles, 1, 1], 32 * warps, args)?;
        for action in &mut launch.actions {
            if let DeviceAction::Launch { shared, prefetched, .. } = action {
                *shared = RING;
                prefetched.extend((0..self.count).map(|i| OperandSlot::Input(self.first + i)));
            }
        }
        kernel.actions.extend(launch.actions);
        Ok(kernel)
    }

    /// A matrix product for each weight, and a pass over what needs one.
    fn multiplied(&self) -> Result<CudaKernel, String> {
        let dtype = self.x().dtype;
        let (mut kernel, x) = self.normed()?;
        let beside = kernel.scratch;
        let gated = self.after == LinearEpilogue::Swiglu;
        let ahead = kernel.actions.len();
        let mut all = Vec::new();
        for (i, w) in self.weights().iter().enumerate() {
            let elements = self.rows * w.shape[0];
            // What is rounded once more, and what is combined with another, waits in scratch memory.
            let (y, result) = match (self.biases, gated && i == 1) {
                (true, _) => ((OperandSlot::Scratch, beside), DType::F32),
                (_, true) => ((OperandSlot::Scratch, beside), dtype),
                _ => ((OperandSlot::Output(i), 0), dtype),
            };
            if y.0 == OperandSlot::Scratch {
                kernel.scratch = kernel.scratch.max(beside + elements * result.size_bytes());
            }
            let of = MatrixProduct {
                batches: 1,
                rows: self.rows,
                columns: w.shape[0],
                depth: self.depth,
                a: (x, dtype),
                b: ((OperandSlot::Input(self.first + i), 0), w.dtype),
                out: (y, result),
                transposed: (false, true),
                added: false,
            };
            let made = product(&of);
            kernel.actions.extend(made.actions);
            all.push(of);
            if self.biases || self.after == LinearEpilogue::Add || (gated && i == 1) {
                let (y, other) = if gated { ((OperandSlot::Output(0), 0), y) } else { (y, (OperandSlot::Input(0), 0)) };
                let args = vec![
                    LaunchArg::Pointer(y.0, y.1),
                    LaunchArg::Pointer(other.0, other.1),
                    input(self.bias(i)),
                    output(if gated { 0 } else { i }),
                    numbers(&[elements, w.shape[0]]),
                ];
                self.follow(&mut kernel, result, elements, args);
            }
        }
        let after = match self.after {
            LinearEpilogue::Nothing if !self.biases => Some(gemm::Epilogue::Nothing),
            LinearEpilogue::Add if !self.biases => Some(gemm::Epilogue::Add((OperandSlot::Input(0), 0))),
            LinearEpilogue::Swiglu => {
                all.truncate(1);
                Some(gemm::Epilogue::Swiglu((OperandSlot::Input(self.first + 1), 0)))
            }
            _ => None,
        };
        if let Some(after) = after {
            let actions = kernel.actions.split_off(ahead);
            let fastest = MatrixProduct::fastest(&all, after, CudaKernel { actions, scratch: kernel.scratch });
            kernel.actions.extend(fastest.actions);
        }
        Ok(kernel)
    }

    /// The pass behind the last product, unless cuBLASLt does it.
    fn follow(&self, kernel: &mut CudaKernel, result: DType, elements: usize, args: Vec<LaunchArg>) {
        let defines = [
            ("Y", name(result)),
            ("D", name(self.x().dtype)),
            ("ADD", flag(self.after == LinearEpilogue::Add)),
            ("BIAS", flag(self.biases)),
            ("BIAS_TYPE", name(self.spec.inputs[self.bias(0)].dtype)),
            ("SWIGLU", flag(self.after == LinearEpilogue::Swiglu)),
        ];
        let pass = each(CudaSource::new("linear_after", &defines, &AFTER), elements, args).actions;
        match kernel.actions.last_mut() {
            Some(DeviceAction::Product { shape, r, otherwise, .. })
                if self.after == LinearEpilogue::Add && !self.biases =>
            {
                shape.added = true;
                *r = Some((OperandSlot::Input(0), 0));
                otherwise.extend(pass);
            }
            _ => kernel.actions.extend(pass),
        }
    }
}
