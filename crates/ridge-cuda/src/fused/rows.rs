//! Parts whose blocks make a row at a time: what is the same for the whole row is computed once, each reduction is a walk over the
//! row that computes what it reduces, and a last walk writes the outputs.

use std::fmt::Write as _;

use ridge_graph::{Op, Prim, Shape};

use super::part::{PartText, combine};
use super::place::{Coord, Place};
use super::value::{RowPlace, Writer};
use crate::kernel::name;

/// The most threads of a block.
const MAX_THREADS: usize = 512;

/// The part that makes `outputs`, rows of `space` and values by row, with all reductions of the group.
pub(super) fn write(writer: &mut Writer<'_>, outputs: &[usize], space: &Shape) -> Result<PartText, String> {
    let body = writer.body;
    let (leading, last) = space.0.split_at(space.rank() - 1);
    let row = writer.extents.value(&last[0])?;
    let rows = writer.extents.product_value(leading)?;
    let (count, integer) = (writer.number(rows as i64), writer.extents.integer);
    let width = writer.number(row as i64);
    let mut shape = space.clone();
    shape.0[leading.len()] = 1.into();
    let mark = writer.mark();
    let place = Place::at_index(Coord::new("r"));
    let leading = writer.coords(&place, leading)?;
    writer.row = Some(RowPlace { shape: shape.clone(), place: place.clone(), walk: None });
    let mut part = RowWriter { writer, space, leading, width: format!("({integer}){width}") };
    for (index, node) in body.nodes.iter().enumerate() {
        if let Op::Prim(Prim::Reduce { op, .. }) = &node.op {
            let (of, dtype) = (node.inputs[0].index(), name(node.outputs[0].dtype));
            let (op, is_float) = (combine(*op), node.outputs[0].dtype.is_float());
            let sum = part.writer.fresh("s");
            part.hoist(&[of])?;
            let _ = writeln!(part.writer.text, "{dtype}::Sum {sum} = start<{op}, {dtype}>();");
            part.walk(|writer, at| {
                let value = writer.value(of, at)?;
                let _ = writeln!(writer.text, "{sum} = {op}::of({sum}, ({dtype}::Sum){value});");
                Ok(())
            })?;
            let writer = &mut *part.writer;
            let shared = if is_float { "shared.f" } else { "shared.i" };
            let _ = writeln!(writer.text, "{sum} = block_reduce<{op}>({sum}, {shared});");
            let value = writer.fresh("v");
            let _ = writeln!(writer.text, "const {dtype}::Value {value} = {dtype}::wrap({sum});");
            writer.declare_value(index, &place, &value);
        }
    }
    let node = |output: &usize| body.outputs[*output].var.index();
    let is_row = |output: &&usize| body.ty(body.outputs[**output].var).shape == shape;
    let whole: Vec<usize> = outputs.iter().filter(|output| !is_row(output)).copied().collect();
    if !whole.is_empty() {
        part.hoist(&whole.iter().map(node).collect::<Vec<_>>())?;
        part.walk(|writer, at| {
            let index = at.index.as_ref().map_or("0", |index| &index.text);
            for output in &whole {
                let value = writer.value(node(output), at)?;
                let dtype = name(writer.spec.outputs[*output].dtype);
                let _ = writeln!(writer.text, "put<{dtype}>(out{output}, {index}, {value});");
            }
            Ok(())
        })?;
    }
    for output in outputs.iter().filter(is_row) {
        let value = part.writer.value(node(output), &place)?;
        let dtype = name(part.writer.spec.outputs[*output].dtype);
        let _ = writeln!(part.writer.text, "if (threadIdx.x == 0) put<{dtype}>(out{output}, r, {value});");
    }
    writer.row = None;
    writer.forget(mark);
    let text = format!(
        "__shared__ union {{ float f[32]; i64 i[32]; }} shared;\n\
         for ({integer} r = block; r < ({integer}){count}; r += block_count) {{\n{}}}\n",
        std::mem::take(&mut writer.text)
    );
    let threads = row.next_power_of_two().clamp(32, MAX_THREADS) as u32;
    let max_threads = if last[0].as_const().is_some() { threads } else { MAX_THREADS as u32 };
    Ok(PartText { text, blocks: rows, threads, max_threads })
}

struct RowWriter<'w, 'a> {
    writer: &'w mut Writer<'a>,
    space: &'w Shape,
    /// Coordinates of the row.
    leading: Vec<Coord>,
    /// Elements of a row.
    width: String,
}

impl<'a> RowWriter<'_, 'a> {
    /// A loop over the elements of the row, of which each thread takes some.
    fn walk(&mut self, at: impl FnOnce(&mut Writer<'a>, &Place) -> Result<(), String>) -> Result<(), String> {
        let (writer, width) = (&mut *self.writer, &self.width);
        let (integer, index) = (writer.extents.integer, writer.fresh("j"));
        let (j, mark) = (format!("{index}_"), writer.mark());
        let _ = writeln!(writer.text, "for ({integer} {j} = threadIdx.x; {j} < {width}; {j} += blockDim.x) {{");
        let _ = writeln!(writer.text, "const {integer} {index} = r * {width} + {j};");
        let mut coords = self.leading.clone();
        // Where a row is one element, elements and values by row are the same.
        let (index, last) = if self.space.last().is_one() { ("r".to_owned(), "0".to_owned()) } else { (index, j) };
        coords.push(Coord::new(last));
        let place = Place { index: Some(Coord::new(index)), coords: Some(coords) };
        if let Some(row) = &mut writer.row {
            row.walk = Some(place.clone());
        }
        at(writer, &place)?;
        writer.text += "}\n";
        writer.forget(mark);
        if let Some(row) = &mut writer.row {
            row.walk = None;
        }
        Ok(())
    }

    /// Computes, ahead of a walk that computes `nodes`, what of it is the same along the row.
    fn hoist(&mut self, nodes: &[usize]) -> Result<(), String> {
        let body = self.writer.body;
        let mut seen = vec![false; body.nodes.len()];
        let mut open = nodes.to_vec();
        while let Some(node) = open.pop() {
            if std::mem::replace(&mut seen[node], true) {
                continue;
            }
            let of = &body.nodes[node];
            match &of.op {
                Op::Prim(prim) if prim.is_elementwise() => open.extend(of.inputs.iter().map(|v| v.index())),
                Op::Prim(Prim::Broadcast(_)) if of.outputs[0].shape == *self.space => {
                    let row = self.writer.row.clone().ok_or("no row")?;
                    if body.ty(of.inputs[0]).shape == row.shape && row.shape != *self.space {
                        self.writer.value(of.inputs[0].index(), &row.place)?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }
}
