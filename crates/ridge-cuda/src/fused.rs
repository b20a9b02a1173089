//! Fused groups as CUDA C++: chains of elementwise ops, and reductions over the last axis.
//!
//! A group works over one iteration space, and each of its values is a function of a place there. Without a reduction
//! or a value by rows, a thread makes an element at a time, or in large spaces whose last axis allows it a vector of them. Otherwise a block makes a row at a time: what is the same
//! for the whole row is computed once, each reduction is a walk over the row that computes what it reduces, and a last
//! walk writes the outputs. Every op's result is rounded to its dtype before the next op sees it, so a fused chain
//! means what its ops mean one by one.

use std::fmt::Write as _;

use ridge_graph::{Combine, DType, Function, Op, Prim, Var};

use crate::iteration_space::{IterationSpace, broadcast, number, strides};
use crate::kernel::{CudaKernel, CudaKernelSpec, CudaSource, KernelText, LaunchArg, blocks, each, input, name, output};

/// What reads a place of the space: an input, or an index along an axis.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Read {
    Input(usize),
    Index,
}

/// Elements from which a thread takes a vector of them.
const LARGE: usize = 1 << 18;

struct Writer<'a> {
    body: &'a Function,
    spec: &'a CudaKernelSpec<'a>,
    /// The iteration space.
    space: Vec<usize>,
    /// Whatever has a place: `reads[i]` is at `at{i}`, with these strides over the space.
    reads: Vec<(Read, Vec<usize>)>,
    /// By node, its index in `reads`, if it reads.
    read_of: Vec<Option<usize>>,
    /// By node: is its value the same along the last axis?
    uniform: Vec<bool>,
}

/// The kernel of a fused group.
///
/// # Errors
/// Names what it cannot run.
pub(crate) fn make(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let writer = Writer::new(spec)?;
    let by_rows = writer.body.nodes.iter().any(|n| matches!(n.op, Op::Prim(Prim::Reduce { .. })))
        || (0..spec.outputs.len()).any(|i| writer.is_row_output(i) && !writer.space_is_rows());
    if by_rows { writer.rows() } else { writer.elements() }
}

impl<'a> Writer<'a> {
    fn new(spec: &'a CudaKernelSpec<'a>) -> Result<Self, String> {
        let body = spec.body;
        let shape = |var: Var| body.ty(var).shape.eval(spec.bindings).map_err(|e| e.to_string());
        let space = space_of(body).ok_or("a group of constants")?;
        let space = shape(space)?;
        let mut writer = Self { body, spec, space, reads: Vec::new(), read_of: Vec::new(), uniform: Vec::new() };
        for (index, node) in body.nodes.iter().enumerate() {
            let inputs_uniform = node.inputs.iter().all(|v| writer.uniform[v.index()]);
            let ty = &node.outputs[0];
            let (read, uniform) = match &node.op {
                Op::Arg(arg) => {
                    let strides = broadcast(&spec.inputs[*arg].shape, &writer.space);
                    (Some((Read::Input(*arg), strides)), ty.shape.last().is_one())
                }
                Op::Prim(Prim::Iota { axis, .. }) => {
                    let own = shape(body.var(index, 0))?;
                    let mut strides = vec![0; writer.space.len()];
                    let axis = axis + writer.space.len() - own.len();
                    strides[axis] = 1;
                    (Some((Read::Index, strides)), axis + 1 != writer.space.len() || ty.shape.last().is_one())
                }
                Op::Prim(Prim::Reduce { .. } | Prim::Const(_)) => (None, true),
                Op::Prim(_) => (None, inputs_uniform),
                _ => return Err(format!("{} in a fused group", node.op_name())),
            };
            let read = read.map(|read| match writer.reads.iter().position(|r| *r == read) {
                Some(known) => known,
                None => {
                    writer.reads.push(read);
                    writer.reads.len() - 1
                }
            });
            writer.read_of.push(read);
            writer.uniform.push(uniform);
        }
        Ok(writer)
    }

    /// Is output `i` of one element a row?
    fn is_row_output(&self, i: usize) -> bool {
        self.body.ty(self.body.outputs[i].var).shape.last().is_one()
    }

    /// Is the last extent of the space the number 1, so that there is no difference between rows and elements?
    fn space_is_rows(&self) -> bool {
        space_of(self.body).is_some_and(|v| self.body.ty(v).shape.last().is_one())
    }

    /// Elements of a vector of 16 bytes of the widest operand, if every operand can be read or written by such vectors along
    /// the last axis, or is one value there; 1 where that is not so, or where there are too few to fill a GPU.
    fn vector(&self, space: &IterationSpace, total: usize) -> usize {
        let reads = || self.reads.iter().zip(&space.strides);
        let along = |strides: &[usize]| strides.last().copied().unwrap_or(0);
        let dtype = |read: &Read| match read {
            Read::Input(i) => Some(self.spec.inputs[*i].dtype),
            Read::Index => None,
        };
        let read = reads().filter(|(_, strides)| along(strides) == 1).filter_map(|((read, _), _)| dtype(read));
        let written = self.spec.outputs.iter().map(|o| o.dtype);
        let widest = read.chain(written).map(DType::size_bytes).max().unwrap_or(1);
        let wide = (16 / widest).min(8);
        let aligned = |((read, _), strides): (&(Read, Vec<usize>), &Vec<usize>)| match along(strides) {
            0 => true,
            1 => *read == Read::Index || strides[..strides.len() - 1].iter().all(|s| s.is_multiple_of(wide)),
            _ => false,
        };
        let fits = space.dims.last().is_some_and(|last| last.is_multiple_of(wide)) && reads().all(aligned);
        if fits && total >= LARGE { wide } else { 1 }
    }

    /// A thread a vector of `wide` elements.
    fn vectors(&self, space: &IterationSpace, total: usize, wide: usize) -> Result<CudaKernel, String> {
        let integer = if space.is_small() { "u32" } else { "i64" };
        let mut numbers = vec![total as i64];
        let mut text = space.places("i", integer, &mut numbers);
        let along = |read: usize| space.strides[read].last().copied().unwrap_or(0) == 1;
        for (at, (read, _)) in self.reads.iter().enumerate().filter(|(at, _)| along(*at)) {
            if let Read::Input(i) = read {
                let of = format!("Pack<{}, {wide}>", name(self.spec.inputs[*i].dtype));
                let raw = name(self.spec.inputs[*i].dtype);
                let _ = writeln!(text, "const {of} p{at} = *(const {of}*)((const {raw}::Raw*)in{i} + at{at});");
            }
        }
        for (i, output) in self.spec.outputs.iter().enumerate() {
            let _ = writeln!(text, "Pack<{}, {wide}> q{i};", name(output.dtype));
        }
        let _ = writeln!(text, "#pragma unroll\nfor (int e = 0; e < {wide}; ++e) {{");
        for (index, node) in self.body.nodes.iter().enumerate() {
            let dtype = name(node.outputs[0].dtype);
            text += &match self.read_of[index] {
                Some(read) if along(read) => match self.reads[read].0 {
                    Read::Input(_) => format!("const {dtype}::Value v{index} = {dtype}::load(p{read}.x[e]);\n"),
                    Read::Index => self.node_at(index, &format!("(at{read} + e)"))?,
                },
                _ => self.node(index)?,
            };
        }
        for (i, output) in self.body.outputs.iter().enumerate() {
            let dtype = name(self.spec.outputs[i].dtype);
            let _ = writeln!(text, "q{i}.x[e] = {dtype}::store(v{});", output.var.index());
        }
        text += "}\n";
        for (i, output) in self.spec.outputs.iter().enumerate() {
            let dtype = name(output.dtype);
            let _ = writeln!(text, "*(Pack<{dtype}, {wide}>*)(({dtype}::Raw*)out{i} + i) = q{i};");
        }
        let text = format!(
            "template <class D, int N> struct __align__(N * sizeof(typename D::Raw)) Pack {{ typename D::Raw x[N]; }};\n\
             {}for ({integer} i = (blockIdx.x * ({integer})blockDim.x + threadIdx.x) * {wide}; i < ({integer})n.v[0]; \
             i += gridDim.x * ({integer})blockDim.x * {wide}) {{\n{text}}}\n}}\n",
            self.signature(numbers.len()),
        );
        let source = CudaSource::new("fused", &[], &KernelText::new(&text).early_launch());
        Ok(each(source, total / wide, self.args(numbers)))
    }

    /// A thread an element.
    fn elements(&self) -> Result<CudaKernel, String> {
        let mut all: Vec<Vec<usize>> = self.reads.iter().map(|(_, s)| s.clone()).collect();
        all.push(strides(&self.space));
        let space = IterationSpace::merged(&self.space, &all);
        let integer = if space.is_small() { "u32" } else { "i64" };
        let total: usize = self.space.iter().product();
        let wide = self.vector(&space, total);
        if wide > 1 {
            return self.vectors(&space, total, wide);
        }
        let mut numbers = vec![total as i64];
        let mut text = space.places("i", integer, &mut numbers);
        for node in 0..self.body.nodes.len() {
            text += &self.node(node)?;
        }
        for (i, output) in self.body.outputs.iter().enumerate() {
            let dtype = name(self.spec.outputs[i].dtype);
            let _ = writeln!(text, "put<{dtype}>(out{i}, i, v{});", output.var.index());
        }
        let text = format!(
            "{}for ({integer} i = blockIdx.x * ({integer})blockDim.x + threadIdx.x; i < ({integer})n.v[0]; \
             i += gridDim.x * ({integer})blockDim.x) {{\n{text}}}\n}}\n",
            self.signature(numbers.len()),
        );
        Ok(each(CudaSource::new("fused", &[], &KernelText::new(&text).early_launch()), total, self.args(numbers)))
    }

    /// A block a row.
    fn rows(&self) -> Result<CudaKernel, String> {
        let (row, leading) = self.space.split_last().map_or((1, &[][..]), |(row, leading)| (*row, leading));
        let mut all: Vec<Vec<usize>> = self.reads.iter().map(|(_, s)| s[..leading.len()].to_vec()).collect();
        all.push(strides(leading));
        let space = IterationSpace::merged(leading, &all);
        let rows: usize = leading.iter().product();
        let mut numbers = vec![rows as i64, row as i64];
        let mut text = space.places("r", "i64", &mut numbers);
        // From here on `at` of a read is its place in the row's first column; along the row it has one stride.
        let along: Vec<String> = self
            .reads
            .iter()
            .map(|(_, s)| match s.last().copied().unwrap_or(0) {
                0 => String::new(),
                1 => " + j".to_owned(),
                stride => format!(" + j * {}", number(&mut numbers, stride)),
            })
            .collect();
        let walk = |wanted: &[usize]| -> Result<String, String> {
            let mut text = "for (i64 j = threadIdx.x; j < n.v[1]; j += blockDim.x) {\n".to_owned();
            for node in self.needed(wanted) {
                if let Some(read) = self.read_of[node] {
                    let _ = writeln!(text, "const i64 at{node}_ = at{read}{};", along[read]);
                }
                text += &self.node_at(node, &format!("at{node}_"))?;
            }
            Ok(text)
        };
        for (index, node) in self.body.nodes.iter().enumerate() {
            if let Op::Prim(Prim::Reduce { op, .. }) = &node.op {
                let (of, dtype) = (node.inputs[0].index(), name(node.outputs[0].dtype));
                let op = combine(*op);
                let _ = writeln!(text, "{dtype}::Sum s{index} = start<{op}, {dtype}>();");
                text += &walk(&[of])?;
                let _ = writeln!(text, "s{index} = {op}::of(s{index}, ({dtype}::Sum)v{of});\n}}");
                let shared = if node.outputs[0].dtype.is_float() { "shared.f" } else { "shared.i" };
                let _ = writeln!(text, "s{index} = block_reduce<{op}>(s{index}, {shared});");
                let _ = writeln!(text, "const {dtype}::Value v{index} = {dtype}::wrap(s{index});");
            } else if self.uniform[index] {
                if let Some(read) = self.read_of[index] {
                    text += &self.node_at(index, &format!("at{read}"))?;
                } else {
                    text += &self.node(index)?;
                }
            }
        }
        let outputs = || self.body.outputs.iter().enumerate();
        let whole: Vec<usize> =
            outputs().filter(|(i, _)| !self.is_row_output(*i)).map(|(_, o)| o.var.index()).collect();
        if !whole.is_empty() {
            text += &walk(&whole)?;
            for (i, output) in outputs().filter(|(i, _)| !self.is_row_output(*i)) {
                let dtype = name(self.spec.outputs[i].dtype);
                let _ = writeln!(text, "put<{dtype}>(out{i}, r * n.v[1] + j, v{});", output.var.index());
            }
            text += "}\n";
        }
        for (i, output) in outputs().filter(|(i, _)| self.is_row_output(*i)) {
            let dtype = name(self.spec.outputs[i].dtype);
            let _ = writeln!(text, "if (threadIdx.x == 0) put<{dtype}>(out{i}, r, v{});", output.var.index());
        }
        let text = format!(
            "{}__shared__ union {{ float f[32]; i64 i[32]; }} shared;\n\
             for (i64 r = blockIdx.x; r < n.v[0]; r += gridDim.x) {{\n{text}}}\n}}\n",
            self.signature(numbers.len()),
        );
        let threads = row.next_power_of_two().clamp(32, 512) as u32;
        Ok(blocks(
            CudaSource::new("fused", &[], &KernelText::new(&text).early_launch()),
            rows,
            threads,
            self.args(numbers),
        ))
    }

    /// The nodes that vary along a row and that `wanted` need, in order.
    fn needed(&self, wanted: &[usize]) -> Vec<usize> {
        let mut needed = vec![false; self.body.nodes.len()];
        wanted.iter().for_each(|n| needed[*n] = !self.uniform[*n]);
        for node in (0..needed.len()).rev().filter(|n| !self.uniform[*n]) {
            if needed[node] {
                self.body.nodes[node].inputs.iter().for_each(|v| needed[v.index()] |= !self.uniform[v.index()]);
            }
        }
        (0..needed.len()).filter(|n| needed[*n]).collect()
    }

    /// The declaration of `v{node}`.
    fn node(&self, index: usize) -> Result<String, String> {
        let place = self.read_of[index].map_or(String::new(), |read| format!("at{read}"));
        self.node_at(index, &place)
    }

    /// The declaration of `v{node}`, which reads, if it does, at `place`.
    fn node_at(&self, index: usize, place: &str) -> Result<String, String> {
        let node = &self.body.nodes[index];
        let dtype = name(node.outputs[0].dtype);
        let v = |i: usize| format!("v{}", node.inputs[i].index());
        // Integers of any size are computed with in 64 bits.
        let wide = |i: usize| {
            let float = self.body.ty(node.inputs[i]).dtype.is_float();
            if float { v(i) } else { format!("(i64){}", v(i)) }
        };
        let value = match &node.op {
            Op::Arg(arg) => format!("at<{dtype}>(in{arg}, {place})"),
            Op::Prim(Prim::Iota { .. }) => format!("cast<{dtype}, I64>((i64){place})"),
            Op::Prim(Prim::Const(literal)) => constant(literal.dtype, literal.values[0]),
            Op::Prim(Prim::Broadcast(_)) => v(0),
            Op::Prim(Prim::Cast(to)) => {
                format!("cast<{}, {}>({})", name(*to), name(self.body.ty(node.inputs[0]).dtype), v(0))
            }
            Op::Prim(Prim::Unary(ridge_graph::Unary::Not)) => format!("!{}", v(0)),
            Op::Prim(Prim::Binary(ridge_graph::Binary::And)) => format!("{} && {}", v(0), v(1)),
            Op::Prim(Prim::Binary(ridge_graph::Binary::Or)) => format!("{} || {}", v(0), v(1)),
            Op::Prim(prim @ Prim::Unary(_)) => format!("{dtype}::wrap(op_{}({}))", prim.name(), wide(0)),
            Op::Prim(prim @ Prim::Binary(_)) => {
                format!("{dtype}::wrap(op_{}({}, {}))", prim.name(), wide(0), wide(1))
            }
            Op::Prim(Prim::Compare(op)) => {
                use ridge_graph::Compare;
                let sign = match op {
                    Compare::Eq => "==",
                    Compare::Ne => "!=",
                    Compare::Lt => "<",
                    Compare::Le => "<=",
                    Compare::Gt => ">",
                    Compare::Ge => ">=",
                };
                format!("{} {sign} {}", v(0), v(1))
            }
            Op::Prim(Prim::Select) => format!("{} ? {} : {}", v(0), v(1), v(2)),
            Op::Prim(Prim::Random { stream }) => {
                format!("philox_uniform({}, {stream}u, {}, {}, {})", v(0), v(1), v(2), v(3))
            }
            _ => return Err(format!("{} in a fused group", node.op_name())),
        };
        Ok(format!("const {dtype}::Value v{index} = {value};\n"))
    }

    fn signature(&self, numbers: usize) -> String {
        let mut text = "extern \"C\" __global__ void fused(\n".to_owned();
        for i in 0..self.spec.inputs.len() {
            let _ = writeln!(text, "const void* __restrict__ in{i},");
        }
        for i in 0..self.spec.outputs.len() {
            let _ = writeln!(text, "void* __restrict__ out{i},");
        }
        let _ = writeln!(text, "Numbers<{numbers}> n) {{\nothers_may_begin();\nafter_others();");
        text
    }

    fn args(&self, numbers: Vec<i64>) -> Vec<LaunchArg> {
        let inputs = (0..self.spec.inputs.len()).map(input);
        inputs.chain((0..self.spec.outputs.len()).map(output)).chain([LaunchArg::Numbers(numbers)]).collect()
    }
}

/// The value whose shape is the iteration space: what a reduction reduces, or the first that is no row.
fn space_of(body: &Function) -> Option<Var> {
    let nodes = || body.nodes.iter().enumerate();
    let reduced = nodes().find(|(_, n)| matches!(n.op, Op::Prim(Prim::Reduce { .. })));
    if let Some((_, node)) = reduced {
        return Some(node.inputs[0]);
    }
    let values = || nodes().filter(|(_, n)| !matches!(n.op, Op::Arg(_) | Op::Prim(Prim::Const(_))));
    let var = |(index, _)| body.var(index, 0);
    values().find(|(_, n)| !n.outputs[0].shape.last().is_one()).or_else(|| values().next()).map(var)
}

pub(crate) fn combine(op: Combine) -> &'static str {
    match op {
        Combine::Sum => "Sum",
        Combine::Max => "Max",
        Combine::Min => "Min",
    }
}

/// A number as it is computed with.
fn constant(dtype: DType, value: f64) -> String {
    if dtype.is_float() {
        return format!("__uint_as_float({:#010x}u)", (dtype.round(value) as f32).to_bits());
    }
    let whole = if dtype == DType::I64 { value as i64 } else { dtype.round(value) as i64 };
    match dtype {
        DType::Bool => (whole != 0).to_string(),
        // The lowest has no literal of its own.
        _ => format!("({}::Value)(i64){:#x}ull", name(dtype), whole as u64),
    }
}
