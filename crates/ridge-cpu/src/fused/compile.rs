//! From a group's nodes to a program over registers.

use std::collections::HashMap;

use ridge_graph::{DType, Literal, Prim};

use super::load::is_int;
use super::program::{Op, TileOp, TileProgram};
use super::view::View;
use crate::kernel::OperandType;

/// A primitive with one output.
pub(crate) struct ChainNode<'a> {
    pub(crate) prim: &'a Prim,
    pub(crate) inputs: Vec<ChainSource>,
    /// Of its output.
    pub(crate) dtype: DType,
    /// Of its output.
    pub(crate) shape: Vec<usize>,
}

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ChainSource {
    /// An input of the group.
    Input(usize),
    /// A node of the group.
    ChainNode(usize),
}

/// Elements of a tile: few enough that a handful of registers stay in the first cache.
const TILE: usize = 1024;

/// A program of `nodes`, in order, whose values `outputs` are written out.
pub(super) fn compile(
    nodes: &[ChainNode<'_>],
    inputs: &[OperandType],
    outputs: &[ChainSource],
) -> Result<TileProgram, String> {
    let mut compiler = Compiler::new(nodes, inputs)?;
    for (index, node) in nodes.iter().enumerate() {
        let value = compiler.node(node)?;
        compiler.values.push(value);
        for (output, source) in outputs.iter().enumerate() {
            if *source == ChainSource::ChainNode(index) {
                let inputs = vec![value.register];
                compiler.push(Op::Store { output, dtype: node.dtype }, inputs, value.wide, DType::F32);
            }
        }
    }
    Ok(compiler.finish())
}

/// A value of the body.
#[derive(Clone, Copy)]
struct Value {
    register: usize,
    /// Has it the group's whole shape, not the extent 1 of a row value?
    wide: bool,
    dtype: DType,
}

struct Compiler<'a> {
    nodes: &'a [ChainNode<'a>],
    inputs: &'a [OperandType],
    /// The iteration space, and the shape of its row values.
    space: Vec<usize>,
    row: Vec<usize>,
    /// Is the space taken row by row, since there are row values?
    by_rows: bool,
    values: Vec<Value>,
    loaded: HashMap<(usize, bool), usize>,
    /// What fills registers that stay the same throughout.
    constants: Vec<TileOp>,
    steps: Vec<TileOp>,
    /// By virtual register: does it hold integers?
    registers: Vec<bool>,
}

impl<'a> Compiler<'a> {
    fn new(nodes: &'a [ChainNode<'a>], inputs: &'a [OperandType]) -> Result<Self, String> {
        let shape_of = |source: &ChainSource| match source {
            ChainSource::Input(i) => inputs[*i].shape.clone(),
            ChainSource::ChainNode(i) => nodes[*i].shape.clone(),
        };
        let reduces = nodes.iter().any(|n| matches!(n.prim, Prim::Reduce { .. }));
        let spaces: Vec<Vec<usize>> = nodes
            .iter()
            .filter(|n| !matches!(n.prim, Prim::Const(_)))
            .map(|n| if matches!(n.prim, Prim::Reduce { .. }) { shape_of(&n.inputs[0]) } else { n.shape.clone() })
            .collect();
        let widest = spaces.iter().find(|s| s.last().is_some_and(|last| *last != 1)).or_else(|| spaces.first());
        let space = widest.cloned().unwrap_or_default();
        let mut row = space.clone();
        if let Some(last) = row.last_mut() {
            *last = 1;
        }
        if let Some(other) = spaces.iter().find(|s| **s != space && **s != row) {
            return Err(format!("values of shapes {space:?} and {other:?} in one fused group"));
        }
        let by_rows = reduces || spaces.iter().any(|s| *s != space);
        Ok(Self {
            nodes,
            inputs,
            space,
            row,
            by_rows,
            values: Vec::new(),
            loaded: HashMap::new(),
            constants: Vec::new(),
            steps: Vec::new(),
            registers: Vec::new(),
        })
    }

    fn register(&mut self, ints: bool) -> usize {
        self.registers.push(ints);
        self.registers.len() - 1
    }

    /// Adds a step and gives its result's register.
    fn push(&mut self, op: Op, inputs: Vec<usize>, wide: bool, round: DType) -> usize {
        let output = self.register(op.gives_ints());
        self.steps.push(TileOp { op, inputs, output, wide, round });
        output
    }

    fn constant(&mut self, op: Op, round: DType) -> usize {
        let output = self.register(op.gives_ints());
        self.constants.push(TileOp { op, inputs: Vec::new(), output, wide: true, round });
        output
    }

    /// The register of `source`, of the whole shape or of a row value's.
    fn read(&mut self, source: ChainSource, wide: bool) -> usize {
        let index = match source {
            ChainSource::ChainNode(node) => return self.values[node].register,
            ChainSource::Input(index) => index,
        };
        if let Some(known) = self.loaded.get(&(index, wide)) {
            return *known;
        }
        let operand = &self.inputs[index];
        let view = View::broadcast(&operand.shape, if wide { &self.space } else { &self.row });
        let uniform = view.is_uniform();
        let op = Op::Load { input: index, dtype: operand.dtype, view };
        let register = if uniform && !self.space.contains(&0) {
            self.constant(op, DType::F32)
        } else {
            self.push(op, Vec::new(), wide, DType::F32)
        };
        self.loaded.insert((index, wide), register);
        register
    }

    fn dtype(&self, source: ChainSource) -> DType {
        match source {
            ChainSource::Input(index) => self.inputs[index].dtype,
            ChainSource::ChainNode(node) => self.values[node].dtype,
        }
    }

    fn is_wide(&self, source: ChainSource) -> bool {
        match source {
            ChainSource::Input(index) => self.inputs[index].shape == self.space,
            ChainSource::ChainNode(node) => self.values[node].wide,
        }
    }

    fn node(&mut self, node: &ChainNode<'_>) -> Result<Value, String> {
        let wide = node.shape == self.space;
        let dtype = node.dtype;
        let value = |register| Ok(Value { register, wide, dtype });
        if let Prim::Const(literal) = node.prim {
            return value(self.literal(literal));
        }
        if let Prim::Broadcast(_) = node.prim {
            return value(self.broadcast(node, wide));
        }
        if let Prim::Reduce { op, .. } = node.prim {
            let of = self.read(node.inputs[0], true);
            let op = if is_int(dtype) { Op::ReduceInts(*op, dtype) } else { Op::Reduce(*op, dtype) };
            return value(self.push(op, vec![of], false, rounding(dtype)));
        }
        let inputs: Vec<usize> = node.inputs.iter().map(|s| self.read(*s, wide)).collect();
        let from = node.inputs.first().map(|s| self.dtype(*s));
        let ints = from.is_some_and(is_int);
        let op = match node.prim {
            Prim::Iota { axis, .. } => {
                let shape = if wide { &self.space } else { &self.row };
                let mut steps = vec![0; shape.len()];
                steps[*axis] = 1;
                Op::Iota { dtype, view: View::new(shape, &steps, 0) }
            }
            Prim::Unary(op) if ints => Op::UnaryInts(*op, dtype),
            Prim::Unary(op) => Op::Unary(*op),
            Prim::Binary(op) if ints => Op::BinaryInts(*op, dtype),
            Prim::Binary(op) => Op::Binary(*op),
            Prim::Compare(op) if ints => Op::CompareInts(*op),
            Prim::Compare(op) => Op::Compare(*op),
            Prim::Select if is_int(dtype) => Op::SelectInts,
            Prim::Select => Op::Select,
            Prim::Random { stream } => Op::Random(*stream),
            Prim::Cast(to) => match cast(from.unwrap_or(*to), *to) {
                Some(op) => op,
                None => return value(inputs[0]),
            },
            other => return Err(format!("{} in a fused group", other.name())),
        };
        value(self.push(op, inputs, wide, rounding(dtype)))
    }

    fn broadcast(&mut self, node: &ChainNode<'_>, wide: bool) -> usize {
        let source = node.inputs[0];
        let constant = matches!(source, ChainSource::ChainNode(i) if matches!(self.nodes[i].prim, Prim::Const(_)));
        if constant || matches!(source, ChainSource::Input(_)) || self.is_wide(source) == wide {
            return self.read(source, wide);
        }
        let of = self.read(source, false);
        let op = if is_int(node.dtype) { Op::SpreadInts } else { Op::Spread };
        self.push(op, vec![of], wide, DType::F32)
    }

    fn literal(&mut self, literal: &Literal) -> usize {
        let value = literal.dtype.round(literal.values[0]);
        let op = if is_int(literal.dtype) { Op::FillInts(value as i64) } else { Op::Fill(value as f32) };
        self.constant(op, DType::F32)
    }

    /// Gives virtual registers real ones, each as soon as its last reader has run.
    fn finish(self) -> TileProgram {
        let mut last: Vec<usize> = vec![0; self.registers.len()];
        for (i, step) in self.steps.iter().enumerate() {
            last[step.output] = last[step.output].max(i);
            step.inputs.iter().for_each(|r| last[*r] = i);
        }
        let mut real = vec![usize::MAX; self.registers.len()];
        let mut free: [Vec<usize>; 2] = Default::default();
        let mut counts = [0usize; 2];
        let take = |free: &mut [Vec<usize>; 2], counts: &mut [usize; 2], bank: usize| {
            free[bank].pop().unwrap_or_else(|| {
                counts[bank] += 1;
                counts[bank] - 1
            })
        };
        let bank = |register: usize| usize::from(self.registers[register]);
        let mut constants = self.constants;
        for step in &mut constants {
            real[step.output] = take(&mut free, &mut counts, bank(step.output));
            // Never given back.
            last[step.output] = usize::MAX;
            step.output = real[step.output];
        }
        let mut steps = self.steps;
        for (i, step) in steps.iter_mut().enumerate() {
            // The result never shares a register with an operand.
            let mut done: Vec<usize> = step.inputs.iter().copied().filter(|r| last[*r] == i).collect();
            done.sort_unstable();
            done.dedup();
            step.inputs.iter_mut().for_each(|r| *r = real[*r]);
            if !matches!(step.op, Op::Store { .. }) {
                let virtual_ = step.output;
                step.output = take(&mut free, &mut counts, bank(virtual_));
                real[virtual_] = step.output;
                if last[virtual_] == i {
                    free[bank(virtual_)].push(step.output);
                }
            }
            for register in done {
                free[bank(register)].push(real[register]);
            }
        }
        let row = if self.by_rows { self.space.last().copied().unwrap_or(1) } else { 1 };
        let rows: usize = if self.by_rows { &self.row } else { &self.space }.iter().product();
        // No more than there are, for constants fill a tile.
        let rows_per_tile = (TILE / row.max(1)).clamp(1, rows.clamp(1, TILE));
        TileProgram { constants, steps, registers: counts, rows, row, rows_per_tile }
    }
}

/// The dtype that a result in f32 is still to be rounded to.
fn rounding(dtype: DType) -> DType {
    if dtype.is_float() { dtype } else { DType::F32 }
}

/// What a cast does; nothing where every value stays as it is.
fn cast(from: DType, to: DType) -> Option<Op> {
    let small = matches!(from, DType::Bool | DType::F8E4M3 | DType::F8E5M2);
    match (is_int(from), is_int(to)) {
        _ if from == to => None,
        (false, false) if to == DType::Bool => Some(Op::ToBool),
        (false, false) if to == DType::F32 || from == DType::Bool => None,
        (false, false) if small && matches!(to, DType::BF16 | DType::F16) => None,
        (false, false) => Some(Op::Copy),
        (false, true) => Some(Op::ToInts(to)),
        (true, false) if to == DType::Bool => Some(Op::IntsToBool),
        (true, false) => Some(Op::ToFloats),
        (true, true) => Some(Op::Wrap(to)),
    }
}
