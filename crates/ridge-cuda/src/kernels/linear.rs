//! Linears with what follows them: `kernels/linear_rows.cu` for few rows, matrix products with a second pass for many.

use ridge_graph::ops::{Linear, LinearGroup};
use ridge_graph::{DType, Function, Op};

use super::Entry;
use crate::kernel::{Action, Arg, Kernel, Operand, Slot, Source, Spec, composite, each, grid, name, numbers};
use crate::prims::{Product, product};

const ROWS: &str = include_str!("../../kernels/linear_rows.cu");
const AFTER: &str = include_str!("../../kernels/linear_after.cu");

pub(super) const ENTRIES: &[Entry] = &[
    Entry { name: "linear", pattern: "linear(x, w)", supports, make: |s| make(s, After::Nothing) },
    Entry { name: "linear_bias", pattern: "linear(x, w, b)", supports, make: |s| make(s, After::Nothing) },
    Entry { name: "linear_group", pattern: "linear_group(x, ...)", supports, make: |s| make(s, After::Nothing) },
    Entry { name: "linear_add", pattern: "add(r, linear(x, w))", supports: adds, make: |s| make(s, After::Add) },
    Entry {
        name: "linear_bias_add",
        pattern: "add(r, linear(x, w, b))",
        supports: adds,
        make: |s| make(s, After::Add),
    },
    Entry {
        name: "linear_swiglu",
        pattern: "swiglu(g@linear_group(x, ...).0, g.1)",
        supports: gates,
        make: |s| make(s, After::Swiglu),
    },
];

/// Blocks from which on 8 warps each fill a GPU, and the depth from which on 16 have enough to do.
const MANY_TILES: usize = 600;
const DEEP: usize = 4096;

/// Bytes of a block's ring, as the text has it.
const RING: u32 = 64 << 10;

/// What is done to the product.
#[derive(Clone, Copy, PartialEq, Eq)]
enum After {
    Nothing,
    /// Input 0 is added.
    Add,
    /// The first weight's product is the gate of the second's.
    Swiglu,
}

/// Plain weights; with biases in 16 bits what is kept for a second pass would be rounded too early.
fn supports(body: &Function) -> bool {
    let biases =
        composite::<Linear>(body).is_some_and(|l| l.bias) || composite::<LinearGroup>(body).is_some_and(|g| g.biases);
    let wide = body.args.iter().all(|a| a.ty.dtype == DType::F32);
    body.args.iter().all(|a| a.ty.format.is_none()) && (!biases || wide)
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
struct Linears<'a> {
    after: After,
    /// The input that is x; weights follow, then biases.
    first: usize,
    count: usize,
    biases: bool,
    x: &'a Operand,
    weights: &'a [Operand],
    rows: usize,
    depth: usize,
}

fn make(spec: &Spec<'_>, after: After) -> Result<Kernel, String> {
    let (count, biases) = match (spec.composite::<Linear>(), spec.composite::<LinearGroup>()) {
        (Some(one), _) => (1, one.bias),
        (_, Some(group)) => (group.count, group.biases),
        _ => return Err("no linear in the group".into()),
    };
    let first = usize::from(after == After::Add);
    let x = &spec.inputs[first];
    let depth = x.shape.last().copied().unwrap_or(1);
    let weights = &spec.inputs[first + 1..][..count];
    let rows = x.shape[..x.shape.len() - 1].iter().product();
    let linears = Linears { after, first, count, biases, x, weights, rows, depth };
    if linears.streams() { linears.streamed() } else { linears.multiplied() }
}

impl Linears<'_> {
    /// Are there few rows, of a dtype that tensor cores take?
    fn streams(&self) -> bool {
        let dtype = self.x.dtype;
        matches!(dtype, DType::BF16 | DType::F16)
            && self.weights.iter().all(|w| w.dtype == dtype)
            && (1..=16).contains(&self.rows)
            && self.depth.is_multiple_of(8)
            && self.depth > 0
            && !self.biases
    }

    /// Every weight read once, by one launch.
    fn streamed(&self) -> Result<Kernel, String> {
        let flag = |on: bool| if on { "1" } else { "0" };
        let gated = self.after == After::Swiglu;
        let count = self.count.to_string();
        let columns: Vec<usize> = self.weights.iter().map(|w| w.shape[0]).collect();
        let across = columns.iter().map(|n| n.div_ceil(16));
        let tiles = if gated { columns[0].div_ceil(16) } else { across.sum() };
        // Few blocks need more warps each to keep memory busy.
        let warps = if tiles < MANY_TILES && self.depth >= DEEP { 16 } else { 8 };
        let defines = [
            ("D", name(self.x.dtype)),
            ("ROWS", if self.rows <= 8 { "8" } else { "16" }),
            ("WARPS", &*warps.to_string()),
            ("COUNT", &*count),
            ("ADD", flag(self.after == After::Add)),
            ("SWIGLU", flag(gated)),
        ];
        let weights = (0..self.count).map(|i| Slot::Input(self.first + 1 + i));
        // A gated group has one output.
        let outputs = (0..self.count).map(|i| Slot::Output(if gated { 0 } else { i }));
        let pointers = Arg::Pointers(weights.chain(outputs).collect());
        let n = numbers(&[&[self.rows, self.depth][..], &columns].concat());
        let args = vec![Arg::Pointer(Slot::Input(self.first), 0), Arg::Pointer(Slot::Input(0), 0), pointers, n];
        let mut kernel = grid(Source::tiled("linear_rows", &defines, ROWS), [tiles, 1, 1], 32 * warps, args)?;
        for action in &mut kernel.actions {
            if let Action::Launch { shared, .. } = action {
                *shared = RING;
            }
        }
        Ok(kernel)
    }

    /// A matrix product for each weight, and a pass over what needs one.
    fn multiplied(&self) -> Result<Kernel, String> {
        let mut kernel = Kernel::default();
        let size = self.x.dtype.size_bytes();
        let mut scratch = 0;
        let mut products = Vec::new();
        let plain = self.after == After::Nothing && !self.biases;
        for (i, w) in self.weights.iter().enumerate() {
            let columns = w.shape[0];
            // The last product can lie where the result will.
            let out = if self.after == After::Swiglu && i == 1 { (Slot::Scratch, 0) } else { (Slot::Output(i), 0) };
            if out.0 == Slot::Scratch {
                scratch += self.rows * columns * size;
            }
            products.push(out);
            kernel.actions.extend(
                product(&Product {
                    batches: 1,
                    rows: self.rows,
                    columns,
                    depth: self.depth,
                    a: (Slot::Input(self.first), self.x.dtype),
                    b: (Slot::Input(self.first + 1 + i), w.dtype),
                    out: (out.0, self.x.dtype),
                    transposed: (false, true),
                })
                .actions,
            );
        }
        kernel.scratch = scratch;
        if plain {
            return Ok(kernel);
        }
        let flag = |on: bool| if on { "1" } else { "0" };
        let last = if self.after == After::Swiglu { 1 } else { self.count };
        for i in 0..last {
            let columns = self.weights[i].shape[0];
            let bias = self.first + 1 + self.count + i;
            let defines = [
                ("D", name(self.x.dtype)),
                ("ADD", flag(self.after == After::Add)),
                ("BIAS", flag(self.biases)),
                ("BIAS_TYPE", "F32"),
                ("SWIGLU", flag(self.after == After::Swiglu)),
            ];
            let other = if self.after == After::Swiglu { products[1] } else { (Slot::Input(0), 0) };
            let y = Arg::Pointer(Slot::Output(i), 0);
            let args = vec![
                y.clone(),
                Arg::Pointer(other.0, other.1),
                Arg::Pointer(if self.biases { Slot::Input(bias) } else { Slot::Input(0) }, 0),
                y,
                numbers(&[self.rows * columns, columns]),
            ];
            let source = Source::new("linear_after", &defines, AFTER);
            let after = each(source, self.rows * columns, args).actions;
            match kernel.actions.last_mut() {
                // cuBLASLt adds by itself.
                Some(Action::Product { shape, r, otherwise, .. }) if self.after == After::Add && !self.biases => {
                    shape.added = true;
                    *r = Some(Slot::Input(0));
                    otherwise.extend(after);
                }
                _ => kernel.actions.extend(after),
            }
        }
        Ok(kernel)
    }
}
