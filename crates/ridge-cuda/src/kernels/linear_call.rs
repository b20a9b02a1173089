//! What all linears' kernels have in common: operands, what follows the product, and products with a second pass.

use std::sync::Arc;

use ridge_graph::ops::{Linear, LinearForward, LinearGroup, RmsNorm};
use ridge_graph::{Arg, DType, Function, Op, Var};

use super::cache_epilogue;
use super::norm::{self, NormCall};
use crate::cublaslt::GemmShape;
use crate::gemm;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaOperand, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, SlotOffset,
    composite, each, flag, grid, input, name, numbers, output,
};
use crate::prims::{MatrixProduct, product};

/// The weights are prefetched; see [`DeviceAction::Launch`].
pub(super) const AFTER: KernelText<'_> = KernelText::new(include_str!("../../kernels/linear_after.cu")).early_launch();

/// Elements that a thread of it makes at a time, where rows divide by them.
const AT_ONCE: usize = 8;

/// What begins in scratch memory begins at a multiple of this many bytes.
pub(super) const ALIGN: usize = 256;

/// What is done to the product.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum LinearEpilogue {
    Nothing,
    /// Input 0 is added.
    Add,
    /// The first weight's product is the gate of the second's.
    Swiglu,
    /// The second weight's product and the third's are keys and values, which are written to the cache, input 0:
    /// [`cache_epilogue`].
    Cache,
}

/// The product and what it is added to have one type: nothing is broadcast.
pub(super) fn sums(body: &Function) -> bool {
    let sum = body.ty(body.outputs[0].var);
    let is_linear = |op: &Op| matches!(op, Op::Composite(op) if op.downcast::<Linear>().is_some());
    let product = body.nodes.iter().find(|n| is_linear(&n.op));
    body.args[0].ty == *sum && product.is_some_and(|n| n.outputs[0] == *sum)
}

/// Two linears without biases, of which the first is the gate of the other.
pub(super) fn gated_pair(body: &Function) -> bool {
    composite::<LinearGroup>(body).is_some_and(|g| g.count == 2 && !g.biases)
}

/// The values that the linear or the group of a body reads: x, weights, then biases.
fn operands(body: &Function) -> &[Var] {
    let multiplies = |op: &Op| match op {
        Op::Composite(op) => op.downcast::<Linear>().is_some() || op.downcast::<LinearGroup>().is_some(),
        _ => false,
    };
    body.nodes.iter().find(|n| multiplies(&n.op)).map_or(&[], |n| &n.inputs)
}

/// The weights of a linear or a group, which are arguments.
pub(super) fn weights(body: &Function) -> &[Arg] {
    let count = composite::<LinearGroup>(body).map_or(1, |group| group.count);
    match operands(body).get(1).map(|w| &body.nodes[w.index()].op) {
        Some(Op::Arg(first)) => &body.args[*first..first + count],
        _ => &[],
    }
}

/// The argument from which x of a linear or a group is made.
pub(super) fn x_of(body: &Function) -> usize {
    let mut at = operands(body).first().map_or(0, |x| x.index());
    loop {
        match &body.nodes[at].op {
            Op::Arg(of) => return *of,
            _ => at = body.nodes[at].inputs[0].index(),
        }
    }
}

/// A linear or several of one input.
pub(super) struct LinearCall<'a> {
    pub(super) spec: &'a CudaKernelSpec<'a>,
    pub(super) after: LinearEpilogue,
    /// The input that is x.
    pub(super) x: usize,
    /// Is a norm taken of it, by the weight behind it?
    pub(super) norm: Option<&'a RmsNorm>,
    /// The first weight; the others and then biases follow.
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) biases: bool,
    pub(super) rows: usize,
    pub(super) depth: usize,
    /// The dtype of what is multiplied and of results: a norm may round x to it.
    pub(super) dtype: DType,
}

impl<'a> LinearCall<'a> {
    /// The linears of a group, which ends with `after`.
    pub(super) fn new(spec: &'a CudaKernelSpec<'a>, after: LinearEpilogue) -> Result<Self, String> {
        let one = spec.composite::<Linear>().map(|one| one.bias);
        let one = one.or(spec.composite::<LinearForward>().map(|one| one.bias));
        let (count, biases) = match (one, spec.composite::<LinearGroup>()) {
            (Some(bias), _) => (1, bias),
            (_, Some(group)) => (group.count, group.biases),
            _ => return Err("no linear in the group".into()),
        };
        let x = usize::from(matches!(after, LinearEpilogue::Add | LinearEpilogue::Cache));
        let norm = spec.composite::<RmsNorm>();
        let shape = &spec.inputs[x].shape;
        let (depth, rows) = (shape.last().copied().unwrap_or(1), shape[..shape.len() - 1].iter().product());
        let first = x + 1 + usize::from(norm.is_some());
        // Behind products that go to a cache, the first result is that.
        let rounds = norm.is_some() && after != LinearEpilogue::Cache;
        let dtype = if rounds { spec.outputs[0].dtype } else { spec.inputs[x].dtype };
        Ok(Self { spec, after, x, norm, first, count, biases, rows, depth, dtype })
    }

    pub(super) fn x(&self) -> &CudaOperand {
        &self.spec.inputs[self.x]
    }

    pub(super) fn weights(&self) -> &[CudaOperand] {
        &self.spec.inputs[self.first..][..self.count]
    }

    /// The input that is bias `i`, or the first where there is none.
    pub(super) fn bias(&self, i: usize) -> usize {
        if self.biases { self.first + self.count + i } else { 0 }
    }

    /// The arguments of a launch that streams the weights of x at `x`: x, the summand, the norm's weight and epsilon, the
    /// addresses of weights, outputs and biases, rows, depth and columns, and what a cache has of slots.
    pub(super) fn streaming_args(&self, x: SlotOffset) -> Vec<LaunchArg> {
        let weights = (0..self.count).map(|i| OperandSlot::Input(self.first + i));
        let outputs = (0..self.count).map(|i| match self.after {
            LinearEpilogue::Nothing | LinearEpilogue::Add => OperandSlot::Output(i),
            // A gated group has one output.
            LinearEpilogue::Swiglu => OperandSlot::Output(0),
            LinearEpilogue::Cache => cache_epilogue::output_of(i),
        });
        let biases = (0..self.count).map(|i| OperandSlot::Input(self.bias(i)));
        let mut extents = vec![self.rows, self.depth];
        extents.extend(self.weights().iter().map(|w| w.shape[0]));
        extents.extend((self.after == LinearEpilogue::Cache).then(|| cache_epilogue::slots(self.spec)));
        vec![
            LaunchArg::Pointer(x.0, x.1),
            input(0),
            input(self.x + usize::from(self.norm.is_some())),
            LaunchArg::Float(self.norm.map_or(0.0, |norm| norm.eps as f32)),
            LaunchArg::Pointers(weights.chain(outputs).chain(biases).map(|slot| (slot, 0)).collect()),
            numbers(&extents),
        ]
    }

    /// The blocks of 16 columns that a launch makes.
    pub(super) fn column_blocks(&self) -> usize {
        self.tiles(16)
    }

    /// The tiles of so many columns that a launch makes.
    pub(super) fn tiles(&self, columns: usize) -> usize {
        let across = |w: &CudaOperand| w.shape[0].div_ceil(columns);
        match self.after {
            LinearEpilogue::Swiglu => across(&self.weights()[0]),
            _ => self.weights().iter().map(across).sum(),
        }
    }

    /// A launch of `source`, a block of which makes up to `block_rows` rows, with so much shared memory, which may ask for weights before the launch ahead has ended.
    pub(super) fn streaming_launch(
        &self,
        source: Arc<CudaSource>,
        block_rows: usize,
        threads: u32,
        shared_bytes: u32,
        args: Vec<LaunchArg>,
    ) -> Result<CudaKernel, String> {
        let mut launch = grid(source, [self.column_blocks(), self.rows.div_ceil(block_rows), 1], threads, args)?;
        self.prefetch_weights(&mut launch, shared_bytes);
        Ok(launch)
    }

    /// Gives launches so much shared memory, and leave to ask for weights before the launch ahead has ended.
    pub(super) fn prefetch_weights(&self, kernel: &mut CudaKernel, shared_bytes: u32) {
        for action in &mut kernel.actions {
            if let DeviceAction::Launch { shared, prefetched, .. } = action {
                *shared = shared_bytes;
                prefetched.extend((0..self.count).map(|i| OperandSlot::Input(self.first + i)));
            }
        }
    }

    /// The norm of x into scratch memory, where there is one, and where x is from then on.
    pub(super) fn normed(&self) -> Result<(CudaKernel, SlotOffset), String> {
        if self.norm.is_none() {
            return Ok((CudaKernel::default(), (OperandSlot::Input(self.x), 0)));
        }
        let to = LaunchArg::Pointer(OperandSlot::Scratch, 0);
        let norm = NormCall { x: self.x, added: false, gate: None, dtype: self.dtype };
        let mut kernel = norm::launch(self.spec, norm, [to.clone(), to])?;
        kernel.scratch = (self.x().len() * self.dtype.size_bytes()).next_multiple_of(ALIGN);
        Ok((kernel, (OperandSlot::Scratch, 0)))
    }

    /// After `kernel`, which prepares x at `x` and plain weights of `dtypes` at `weights`: a matrix product for each weight, and
    /// a pass over what needs one.
    pub(super) fn multiplied(
        &self,
        mut kernel: CudaKernel,
        x: SlotOffset,
        weights: &[SlotOffset],
        dtypes: &[DType],
    ) -> Result<CudaKernel, String> {
        let dtype = self.dtype;
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
                b: (weights[i], dtypes[i]),
                out: (y, result),
                transposed: (false, true),
                added: false,
                deterministic: self.spec.deterministic,
            };
            let mut made = product(&of);
            if self.biases && of.deterministic {
                // Alone, as its bias is added behind it.
                made = MatrixProduct::fastest(&[of], gemm::Epilogue::Nothing, made);
            }
            let alone = kernel.actions.len();
            kernel.actions.extend(made.actions);
            if self.biases || self.after == LinearEpilogue::Add || (gated && i == 1) {
                let (y, other) = if gated { ((OperandSlot::Output(0), 0), y) } else { (y, (OperandSlot::Input(0), 0)) };
                let args = vec![
                    LaunchArg::Pointer(y.0, y.1),
                    LaunchArg::Pointer(other.0, other.1),
                    input(self.bias(i)),
                    output(if gated { 0 } else { i }),
                    numbers(&[elements, w.shape[0]]),
                ];
                self.follow(&mut kernel, result, [elements, w.shape[0]], args);
            }
            if self.biases && !gated && self.spec.inputs[self.bias(i)].dtype == dtype {
                let direct = MatrixProduct { out: ((OperandSlot::Output(i), 0), dtype), ..of };
                let otherwise = kernel.actions.split_off(alone);
                kernel.actions.extend(self.biased(i, product(&direct), otherwise));
            }
            all.push(of);
        }
        let after = match self.after {
            LinearEpilogue::Nothing if !self.biases => Some(gemm::Epilogue::Nothing),
            LinearEpilogue::Add if !self.biases => Some(gemm::Epilogue::Add((OperandSlot::Input(0), 0))),
            LinearEpilogue::Swiglu => {
                all.truncate(1);
                Some(gemm::Epilogue::Swiglu(weights[1]))
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

    /// The product `direct` of weight `i` with bias and summand by cuBLASLt, or else by the actions of `apart`.
    fn biased(&self, i: usize, direct: CudaKernel, apart: Vec<DeviceAction>) -> Vec<DeviceAction> {
        let Ok([DeviceAction::Product { shape, x, w, y, scales, .. }]) = <[_; 1]>::try_from(direct.actions) else {
            return apart;
        };
        let added = self.after == LinearEpilogue::Add;
        let r = added.then_some((OperandSlot::Input(0), 0));
        let bias = Some((OperandSlot::Input(self.bias(i)), 0));
        vec![DeviceAction::Product {
            shape: GemmShape { added, biased: true, ..shape },
            x,
            w,
            r,
            bias,
            aux: None,
            y,
            scales,
            otherwise: apart,
        }]
    }

    /// The pass behind the last product, of rows of `columns`, unless cuBLASLt does it.
    pub(super) fn follow(
        &self,
        kernel: &mut CudaKernel,
        result: DType,
        [elements, columns]: [usize; 2],
        args: Vec<LaunchArg>,
    ) {
        let wide = if columns.is_multiple_of(AT_ONCE) { AT_ONCE } else { 1 };
        let defines = [
            ("Y", name(result)),
            ("D", name(self.dtype)),
            ("ADD", flag(self.after == LinearEpilogue::Add)),
            ("BIAS", flag(self.biases)),
            ("BIAS_TYPE", name(self.spec.inputs[self.bias(0)].dtype)),
            ("SWIGLU", flag(self.after == LinearEpilogue::Swiglu)),
            ("WIDE", &*wide.to_string()),
        ];
        let pass = each(CudaSource::new("linear_after", &defines, &AFTER), elements / wide, args).actions;
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
