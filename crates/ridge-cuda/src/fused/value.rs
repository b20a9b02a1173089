//! Values of a group at places, as CUDA C++.

use std::collections::HashMap;
use std::fmt::Write as _;

use ridge_graph::{DType, Dim, Function, Op, Prim, Shape, Type};

use super::place::{Coord, Extents, Place, factors};
use crate::kernel::{CudaKernelSpec, name};

/// What has been declared in the text so far.
#[derive(Clone)]
enum Declared {
    Value(String),
    Coords(Vec<Coord>),
    Index(Coord),
}

/// The row that a part by rows is at.
#[derive(Clone)]
pub(super) struct RowPlace {
    /// The shape of its row values, and their place.
    pub(super) shape: Shape,
    pub(super) place: Place,
    /// The place of the element that is walked over, while one is.
    pub(super) walk: Option<Place>,
}

pub(super) struct Writer<'a> {
    pub(super) body: &'a Function,
    pub(super) spec: &'a CudaKernelSpec<'a>,
    pub(super) extents: Extents<'a>,
    /// Numbers of the launch.
    pub(super) numbers: Vec<i64>,
    /// Constants of the whole kernel.
    pub(super) header: String,
    /// The text that is being written.
    pub(super) text: String,
    /// In a part of vectors, what is the same for all elements of one.
    pub(super) outer: String,
    /// Elements of a vector, 1 where there are none.
    pub(super) wide: usize,
    pub(super) row: Option<RowPlace>,
    declared: HashMap<String, Declared>,
    /// Keys of `declared` in their order, to forget those of a block of code that ends.
    order: Vec<String>,
    names: usize,
}

impl<'a> Writer<'a> {
    pub(super) fn new(spec: &'a CudaKernelSpec<'a>) -> Result<Self, String> {
        let mut writer = Self {
            body: spec.body,
            spec,
            extents: Extents::new(spec.bindings, true),
            numbers: Vec::new(),
            header: String::new(),
            text: String::new(),
            outer: String::new(),
            wide: 1,
            row: None,
            declared: HashMap::new(),
            order: Vec::new(),
            names: 0,
        };
        let mut small = true;
        for ty in spec.body.nodes.iter().flat_map(|n| &n.outputs) {
            small &= writer.extents.product_value(&ty.shape.0)? < 1 << 31;
        }
        writer.extents = Extents::new(spec.bindings, small);
        Ok(writer)
    }

    pub(super) fn ty(&self, node: usize) -> &'a Type {
        &self.body.nodes[node].outputs[0]
    }

    /// A new name.
    pub(super) fn fresh(&mut self, prefix: &str) -> String {
        self.names += 1;
        format!("{prefix}{}", self.names)
    }

    /// `value` as a number of the launch.
    pub(super) fn number(&mut self, value: i64) -> String {
        self.numbers.push(value);
        format!("n.v[{}]", self.numbers.len() - 1)
    }

    /// The product of `dims` as a constant of the kernel.
    pub(super) fn product(&mut self, dims: &[Dim]) -> Result<String, String> {
        self.extents.product(dims, &mut self.numbers, &mut self.header)
    }

    /// Where a block of code begins, for [`Self::forget`].
    pub(super) fn mark(&self) -> usize {
        self.order.len()
    }

    /// Forgets what was declared since, as its block of code ends.
    pub(super) fn forget(&mut self, mark: usize) {
        for key in self.order.drain(mark..) {
            self.declared.remove(&key);
        }
    }

    fn declare(&mut self, key: String, what: Declared) {
        self.declared.insert(key.clone(), what);
        self.order.push(key);
    }

    /// Says that the value of `node` at `place` is the variable `value`.
    pub(super) fn declare_value(&mut self, node: usize, place: &Place, value: &str) {
        self.declare(format!("v{node}@{}", place.key()), Declared::Value(value.to_owned()));
    }

    /// Declares a coordinate.
    fn coord(&mut self, value: &str, inner: bool) -> Coord {
        let name = self.fresh("c");
        let integer = self.extents.integer;
        let outside = self.wide > 1 && !inner;
        let text = if outside { &mut self.outer } else { &mut self.text };
        let _ = writeln!(text, "const {integer} {name} = {value};");
        Coord { text: name, lane: None, inner }
    }

    /// The coordinates of `place` in a value of `shape`.
    pub(super) fn coords(&mut self, place: &Place, shape: &[Dim]) -> Result<Vec<Coord>, String> {
        let index = match (&place.coords, &place.index) {
            (Some(coords), _) => return Ok(coords.clone()),
            (None, Some(index)) => index.clone(),
            (None, None) => return Err("a place without coordinates".into()),
        };
        let key = format!("c{shape:?}@{}", place.key());
        if let Some(Declared::Coords(known)) = self.declared.get(&key) {
            return Ok(known.clone());
        }
        let mut coords = vec![Coord::new("0"); shape.len()];
        let axes: Vec<usize> = (0..shape.len()).filter(|axis| !shape[*axis].is_one()).collect();
        let mut rest = index;
        for (nth, axis) in axes.iter().enumerate().rev() {
            if nth == 0 {
                coords[*axis] = rest.clone();
                break;
            }
            // A vector lies in one row if its rows are whole vectors.
            let whole = rest.lane == Some(true) && self.extents.value(&shape[*axis])?.is_multiple_of(self.wide);
            let lane = if whole { Some(true) } else { None };
            if rest.lane.is_some() && !whole {
                rest = rest.resolved();
            }
            let by = self.product(std::slice::from_ref(&shape[*axis]))?;
            let quotient = self.extents.divided(&rest.text, &shape[*axis], &mut self.numbers, &mut self.header)?;
            let quotient = self.coord(&quotient, rest.inner);
            let left = self.coord(&format!("{} - {} * {by}", rest.text, quotient.text), rest.inner);
            coords[*axis] = Coord { lane, ..left };
            rest = quotient;
        }
        self.declare(key, Declared::Coords(coords.clone()));
        Ok(coords)
    }

    /// The row-major index of `place` in a value of `shape`.
    pub(super) fn index(&mut self, place: &Place, shape: &[Dim]) -> Result<Coord, String> {
        if let Some(index) = &place.index {
            return Ok(index.clone());
        }
        let key = format!("i{shape:?}@{}", place.key());
        if let Some(Declared::Index(known)) = self.declared.get(&key) {
            return Ok(known.clone());
        }
        let coords = self.coords(place, shape)?;
        let last = (0..shape.len()).rev().find(|axis| !shape[*axis].is_one());
        let (mut terms, mut inner, mut lane) = (Vec::new(), false, None);
        for (axis, coord) in coords.iter().enumerate().filter(|(axis, c)| !c.is_zero() && !shape[*axis].is_one()) {
            let along = Some(axis) == last;
            let coord = if along { coord.clone() } else { coord.resolved() };
            lane = lane.or(coord.lane);
            inner |= coord.inner;
            let stride = self.product(&shape[axis + 1..])?;
            terms.push(if stride == "1" { coord.text } else { format!("{} * {stride}", coord.text) });
        }
        // All other terms are multiples of the last extent.
        let rows_aligned = match last {
            Some(axis) if terms.len() > 1 => self.extents.value(&shape[axis])?.is_multiple_of(self.wide),
            _ => true,
        };
        let index = match &terms[..] {
            [] => Coord::new("0"),
            [one] if !one.contains(' ') => Coord::new(one.clone()),
            _ => self.coord(&terms.join(" + "), inner),
        };
        let index = Coord { lane: lane.map(|aligned| aligned && rows_aligned), inner, ..index };
        self.declare(key, Declared::Index(index.clone()));
        Ok(index)
    }

    /// The place of an element of an input of `from`, of which a reshape gives `to` at `place`.
    fn reshaped(&mut self, place: &Place, from: &Shape, to: &Shape) -> Result<Place, String> {
        if let Some(index) = &place.index {
            return Ok(Place::at_index(index.clone()));
        }
        let coords = self.coords(place, &to.0)?;
        let mut all = Vec::with_capacity(from.rank());
        for (inner, outer) in factors(from, to) {
            let (dims, own) = (&from.0[inner.clone()], &to.0[outer.clone()]);
            if dims == own {
                all.extend_from_slice(&coords[outer]);
                continue;
            }
            let index = self.index(&Place::at_coords(coords[outer].to_vec()), own)?;
            all.extend(self.coords(&Place::at_index(index), dims)?);
        }
        Ok(Place::at_coords(all))
    }

    /// The variable with the value of `node` at `place`, declared if it is not.
    pub(super) fn value(&mut self, node: usize, place: &Place) -> Result<String, String> {
        let key = format!("v{node}@{}", place.key());
        if let Some(Declared::Value(known)) = self.declared.get(&key) {
            return Ok(known.clone());
        }
        let value = self.compute(node, place)?;
        self.declare(key, Declared::Value(value.clone()));
        Ok(value)
    }

    /// The variable of `node`, declared as `value`.
    fn variable(&mut self, node: usize, value: &str) -> String {
        let variable = self.fresh("v");
        let _ = writeln!(self.text, "const {}::Value {variable} = {value};", name(self.ty(node).dtype));
        variable
    }

    fn compute(&mut self, index: usize, place: &Place) -> Result<String, String> {
        let body = self.body;
        let node = &body.nodes[index];
        let inputs: Vec<usize> = node.inputs.iter().map(|v| v.index()).collect();
        let shape = &node.outputs[0].shape;
        let of_input = |i: usize| &body.ty(node.inputs[i]).shape;
        let at = |coords: Vec<Coord>| Place::at_coords(coords);
        let prim = match &node.op {
            Op::Arg(arg) => return self.load(index, *arg, place),
            Op::Prim(prim) => prim,
            _ => return Err(format!("{} in a fused group", node.op_name())),
        };
        match prim {
            Prim::Const(literal) => Ok(self.variable(index, &constant(literal.dtype, literal.values[0]))),
            Prim::Iota { axis, .. } => {
                let coord = self.coords(place, &shape.0)?[*axis].resolved();
                let value = format!("cast<{}, I64>((i64){})", name(node.outputs[0].dtype), coord.text);
                Ok(self.variable(index, &value))
            }
            Prim::Broadcast(_) => {
                let place = self.broadcast(place, of_input(0), shape)?;
                self.value(inputs[0], &place)
            }
            Prim::Reshape(_) => {
                let place = self.reshaped(place, of_input(0), shape)?;
                self.value(inputs[0], &place)
            }
            Prim::Transpose(perm) => {
                let coords = self.coords(place, &shape.0)?;
                let mut of_input = vec![Coord::new("0"); perm.len()];
                perm.iter().zip(coords).for_each(|(axis, coord)| of_input[*axis] = coord);
                self.value(inputs[0], &at(of_input))
            }
            Prim::Slice { axis, start, .. } => {
                let mut coords = self.coords(place, &shape.0)?;
                let begin = self.extents.value(start)?;
                if begin + self.extents.value(&shape.0[*axis])? > self.extents.value(&of_input(0).0[*axis])? {
                    return Err(format!("a slice from {begin} on exceeds {}", of_input(0)));
                }
                if start.as_const() != Some(0) {
                    let first = self.product(std::slice::from_ref(start))?;
                    let old = coords[*axis].clone();
                    let moved = match old.is_zero() {
                        true => Coord::new(first),
                        false => self.coord(&format!("{} + {first}", old.text), old.inner),
                    };
                    let aligned = begin.is_multiple_of(self.wide);
                    coords[*axis] = Coord { lane: old.lane.map(|was| was && aligned), ..moved };
                }
                self.value(inputs[0], &at(coords))
            }
            Prim::Pad { axis, before, value, .. } => {
                let mut coords = self.coords(place, &shape.0)?;
                let first = self.product(std::slice::from_ref(before))?;
                let first = if before.as_const() == Some(0) { "0".to_owned() } else { first };
                let own = coords[*axis].resolved();
                coords[*axis] = self.coord(&format!("{} - {first}", own.text), own.inner);
                // Unsigned: what lies before the first wraps.
                let extent = self.extent(&of_input(0).0[*axis])?;
                let inside = format!("{} < {extent}", coords[*axis].text);
                let variable = self.assigned(index, &constant(node.outputs[0].dtype, *value));
                self.branch(&format!("if ({inside})"), &variable, inputs[0], &at(coords))?;
                Ok(variable)
            }
            Prim::Concat { axis } => self.concat(index, *axis, place),
            Prim::Gather { axis } => self.gather(index, *axis, place),
            Prim::Reduce { .. } => Err(format!("{} at another place than its rows'", node.op_name())),
            _ => {
                let values = inputs.iter().map(|input| self.value(*input, place)).collect::<Result<Vec<_>, _>>()?;
                let value = self.elementwise(index, prim, &values)?;
                Ok(self.variable(index, &value))
            }
        }
    }

    /// An extent as a number: 1 too, which has no number of its own.
    fn extent(&mut self, dim: &Dim) -> Result<String, String> {
        self.product(std::slice::from_ref(dim))
    }

    /// A variable of the type of `node` that may be assigned.
    fn assigned(&mut self, node: usize, first: &str) -> String {
        let variable = self.fresh("v");
        let _ = writeln!(self.text, "{}::Value {variable} = {first};", name(self.ty(node).dtype));
        variable
    }

    /// Assigns the value of `node` at `place` to `variable` in a block of code.
    fn branch(&mut self, when: &str, variable: &str, node: usize, place: &Place) -> Result<(), String> {
        let _ = writeln!(self.text, "{when} {{");
        let mark = self.mark();
        let value = self.value(node, place)?;
        self.forget(mark);
        let _ = writeln!(self.text, "{variable} = {value};\n}}");
        Ok(())
    }

    fn broadcast(&mut self, place: &Place, from: &Shape, to: &Shape) -> Result<Place, String> {
        if let Some(row) = &self.row
            && *from == row.shape
            && from != to
            && row.walk.as_ref().is_some_and(|walk| walk.key() == place.key())
        {
            return Ok(row.place.clone());
        }
        let added = to.rank() - from.rank();
        let same = from.0.iter().zip(&to.0[added..]).all(|(f, t)| f == t) && to.0[..added].iter().all(Dim::is_one);
        if let (true, Some(index)) = (same, &place.index) {
            return Ok(Place::at_index(index.clone()));
        }
        let mut coords: Vec<Coord> =
            if from.0.iter().all(Dim::is_one) { vec![Coord::new("0"); to.rank()] } else { self.coords(place, &to.0)? };
        let mut coords = coords.split_off(added);
        for (coord, dim) in coords.iter_mut().zip(&from.0) {
            if dim.is_one() {
                *coord = Coord::new("0");
            }
        }
        Ok(Place::at_coords(coords))
    }

    fn concat(&mut self, index: usize, axis: usize, place: &Place) -> Result<String, String> {
        let node = &self.body.nodes[index];
        let coords = self.coords(place, &node.outputs[0].shape.0)?;
        let own = coords[axis].resolved();
        // By part, where it ends along the axis, and the place in it.
        let (mut parts, mut start): (Vec<(String, Place)>, Option<String>) = (Vec::new(), None);
        for var in &node.inputs {
            let extent = self.extent(&self.body.ty(*var).shape.0[axis])?;
            let mut of_part = coords.clone();
            of_part[axis] = match &start {
                None => own.clone(),
                Some(start) => self.coord(&format!("{} - ({start})", own.text), own.inner),
            };
            let end = start.map_or(extent.clone(), |start| format!("{start} + {extent}"));
            parts.push((end.clone(), Place::at_coords(of_part)));
            start = Some(end);
        }
        let variable = self.assigned(index, &constant(node.outputs[0].dtype, 0.0));
        for (position, (var, (end, place))) in node.inputs.iter().zip(&parts).enumerate() {
            let otherwise = if position == 0 { "" } else { "else " };
            self.branch(&format!("{otherwise}if ({} < {end})", own.text), &variable, var.index(), place)?;
        }
        Ok(variable)
    }

    fn gather(&mut self, index: usize, axis: usize, place: &Place) -> Result<String, String> {
        let node = &self.body.nodes[index];
        let [data, indices] = [0, 1].map(|i| node.inputs[i].index());
        let coords = self.coords(place, &node.outputs[0].shape.0)?;
        let rank = self.ty(indices).shape.rank();
        let at = Place::at_coords(coords[axis..axis + rank].to_vec());
        let row = self.value(indices, &at)?;
        let extent = self.extent(&self.ty(data).shape.0[axis])?;
        let variable = self.assigned(index, &constant(node.outputs[0].dtype, 0.0));
        let integer = self.extents.integer;
        let own = Coord { inner: true, ..Coord::new(format!("({integer}){row}")) };
        let of_data = coords[..axis].iter().cloned().chain([own]).chain(coords[axis + rank..].iter().cloned());
        let when = format!("if ((i64){row} >= 0 && (i64){row} < (i64){extent})");
        self.branch(&when, &variable, data, &Place::at_coords(of_data.collect()))?;
        Ok(variable)
    }

    /// The element of an argument at `place`.
    fn load(&mut self, index: usize, arg: usize, place: &Place) -> Result<String, String> {
        let dtype = name(self.ty(index).dtype);
        let at = self.index(place, &self.ty(index).shape.0)?;
        if at.lane != Some(true) || self.wide == 1 {
            let at = at.resolved();
            return Ok(self.variable(index, &format!("at<{dtype}>(in{arg}, {})", at.text)));
        }
        let pack = self.fresh("p");
        let of = format!("Pack<{dtype}, {}>", self.wide);
        let _ = writeln!(self.outer, "const {of} {pack} = *(const {of}*)((const {dtype}::Raw*)in{arg} + {});", at.text);
        Ok(self.variable(index, &format!("{dtype}::load({pack}.x[e])")))
    }

    /// The expression of an elementwise op of these values.
    fn elementwise(&self, index: usize, prim: &Prim, values: &[String]) -> Result<String, String> {
        use ridge_graph::{Binary, Compare, Unary};
        let node = &self.body.nodes[index];
        let dtype = name(node.outputs[0].dtype);
        let v = |i: usize| &values[i];
        // Integers of any size are computed with in 64 bits.
        let wide = |i: usize| {
            let float = self.body.ty(node.inputs[i]).dtype.is_float();
            if float { v(i).clone() } else { format!("(i64){}", v(i)) }
        };
        Ok(match prim {
            Prim::Cast(to) => format!("cast<{}, {}>({})", name(*to), name(self.body.ty(node.inputs[0]).dtype), v(0)),
            Prim::Unary(Unary::Not) => format!("!{}", v(0)),
            Prim::Binary(Binary::And) => format!("{} && {}", v(0), v(1)),
            Prim::Binary(Binary::Or) => format!("{} || {}", v(0), v(1)),
            Prim::Unary(_) => format!("{dtype}::wrap(op_{}({}))", prim.name(), wide(0)),
            Prim::Binary(_) => format!("{dtype}::wrap(op_{}({}, {}))", prim.name(), wide(0), wide(1)),
            Prim::Compare(op) => {
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
            Prim::Select => format!("{} ? {} : {}", v(0), v(1), v(2)),
            Prim::Random { stream } => {
                format!("philox_uniform({}, {stream}u, {}, {}, {})", v(0), v(1), v(2), v(3))
            }
            _ => return Err(format!("{} in a fused group", node.op_name())),
        })
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
