//! Places in values as CUDA C++: coordinates, or the row-major index of an element.

use std::collections::HashMap;

use ridge_graph::{Bindings, Dim, Shape};

/// A coordinate or an index, as an expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Coord {
    pub(super) text: String,
    /// In a part whose threads make vectors: is it `text + e` for element `e`, and is `text` a multiple of the vector?
    pub(super) lane: Option<bool>,
    /// Does `text` depend on `e`?
    pub(super) inner: bool,
}

impl Coord {
    pub(super) fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), lane: None, inner: false }
    }

    pub(super) fn is_zero(&self) -> bool {
        self.text == "0" && self.lane.is_none()
    }

    /// The coordinate of element `e` by itself.
    pub(super) fn resolved(&self) -> Self {
        match self.lane {
            None => self.clone(),
            Some(_) => Self { text: format!("({} + e)", self.text), lane: None, inner: true },
        }
    }
}

/// A place in a value: at least one of the two.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) index: Option<Coord>,
    pub(super) coords: Option<Vec<Coord>>,
}

impl Place {
    pub(super) fn at_index(index: Coord) -> Self {
        Self { index: Some(index), coords: None }
    }

    pub(super) fn at_coords(coords: Vec<Coord>) -> Self {
        Self { index: None, coords: Some(coords) }
    }

    /// What tells places of one value apart.
    pub(super) fn key(&self) -> String {
        let of = |c: &Coord| if c.lane.is_some() { format!("{}+e", c.text) } else { c.text.clone() };
        match (&self.index, &self.coords) {
            (Some(index), _) => of(index),
            (None, Some(coords)) => coords.iter().map(of).collect::<Vec<_>>().join(","),
            (None, None) => String::new(),
        }
    }
}

/// What places are computed with: extents as numbers of the launch, and their products.
pub(super) struct Extents<'a> {
    bindings: &'a Bindings,
    /// The type of coordinates: all fit it.
    pub(super) integer: &'static str,
    known: HashMap<Vec<Dim>, String>,
    dividers: HashMap<Dim, String>,
}

impl<'a> Extents<'a> {
    pub(super) fn new(bindings: &'a Bindings, small: bool) -> Self {
        let integer = if small { "u32" } else { "u64" };
        Self { bindings, integer, known: HashMap::new(), dividers: HashMap::new() }
    }

    /// The number that `dim` is.
    pub(super) fn value(&self, dim: &Dim) -> Result<usize, String> {
        dim.eval(self.bindings).map_err(|e| e.to_string())
    }

    /// The product of `dims`.
    pub(super) fn product_value(&self, dims: &[Dim]) -> Result<usize, String> {
        dims.iter().map(|dim| self.value(dim)).product()
    }

    /// The product of `dims` as a constant of the kernel; extents become numbers of the launch.
    pub(super) fn product(
        &mut self,
        dims: &[Dim],
        numbers: &mut Vec<i64>,
        header: &mut String,
    ) -> Result<String, String> {
        let dims: Vec<Dim> = dims.iter().filter(|dim| !dim.is_one()).cloned().collect();
        if dims.is_empty() {
            return Ok("1".to_owned());
        }
        if let Some(known) = self.known.get(&dims) {
            return Ok(known.clone());
        }
        let value = match dims.split_first() {
            Some((dim, [])) => {
                numbers.push(self.value(dim)? as i64);
                format!("({})n.v[{}]", self.integer, numbers.len() - 1)
            }
            Some((first, rest)) => {
                let first = self.product(std::slice::from_ref(first), numbers, header)?;
                format!("{first} * {}", self.product(rest, numbers, header)?)
            }
            None => "1".to_owned(),
        };
        let name = format!("d{}", self.known.len());
        *header += &format!("const {} {name} = {value};\n", self.integer);
        self.known.insert(dims, name.clone());
        Ok(name)
    }

    /// `x / dim`.
    pub(super) fn divided(
        &mut self,
        x: &str,
        dim: &Dim,
        numbers: &mut Vec<i64>,
        header: &mut String,
    ) -> Result<String, String> {
        let by = self.product(std::slice::from_ref(dim), numbers, header)?;
        if self.integer != "u32" {
            return Ok(format!("{x} / {by}"));
        }
        if let Some(known) = self.dividers.get(dim) {
            return Ok(format!("divided({x}, {known})"));
        }
        let name = format!("by{}", self.dividers.len());
        numbers.push(reciprocal(self.value(dim)?));
        *header += &format!("const u64 {name} = (u64)n.v[{}];\n", numbers.len() - 1);
        self.dividers.insert(dim.clone(), name.clone());
        Ok(format!("divided({x}, {name})"))
    }
}

/// The number by which `divided` of `ridge.cuh` divides by `by` (Granlund and Montgomery 1994, "Division by invariant integers
/// using multiplication", section 4): a factor, and above its 32 bits a shift.
fn reciprocal(by: usize) -> i64 {
    let by = by.max(1) as u64;
    let shift = u64::from(by.next_power_of_two().trailing_zeros());
    let factor = (((1u64 << shift) - by) << 32) / by + 1;
    (shift << 32 | factor & 0xffff_ffff) as i64
}

/// Ranges of axes of two shapes with the same elements that have the same number of them, from the first on: `(from, to)`.
pub(super) fn factors(from: &Shape, to: &Shape) -> Vec<(std::ops::Range<usize>, std::ops::Range<usize>)> {
    let mut found = Vec::new();
    let (mut a, mut b) = (0, 0);
    while a < from.rank() || b < to.rank() {
        let (first_a, first_b) = (a, b);
        loop {
            let left = Shape(from.0[first_a..a].to_vec()).elements();
            let right = Shape(to.0[first_b..b].to_vec()).elements();
            let both_moved = a > first_a && b > first_b;
            let at_end = a == from.rank() && b == to.rank();
            if at_end || (left == right && both_moved) {
                break;
            }
            // The side with fewer elements takes another axis; where that cannot be told, the first that has one.
            let fewer = match (left.as_const(), right.as_const()) {
                (Some(l), Some(r)) => l <= r,
                (Some(_), None) => true,
                (None, _) => false,
            };
            if (fewer && a < from.rank()) || b == to.rank() { a += 1 } else { b += 1 }
        }
        found.push((first_a..a, first_b..b));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reciprocal_divides_all_that_fit_31_bits() {
        for by in [1usize, 2, 3, 5, 7, 64, 80, 129, 576, 641, 65_535, 65_537, 1 << 30, (1 << 31) - 1] {
            let number = reciprocal(by) as u64;
            let (factor, shift) = (number & 0xffff_ffff, number >> 32);
            let divided = |x: u64| (((x * factor) >> 32) + x) >> shift;
            let near = |x: u64| [x.saturating_sub(1), x, x + 1];
            let multiples = [0, 1, 2, 3, 1000, ((1 << 31) - 1) / by as u64].map(|n| n * by as u64);
            for x in multiples.into_iter().flat_map(near).chain([(1 << 31) - 1]).filter(|x| *x < 1 << 31) {
                assert_eq!(divided(x), x / by as u64, "{x} / {by}");
            }
        }
    }

    #[test]
    fn factors_are_ranges_of_axes_with_equal_products() {
        let tokens = Dim::sym("tokens");
        let from = Shape(vec![tokens.clone(), 48.into()]);
        let to = Shape(vec![tokens.clone(), 6.into(), 8.into()]);
        assert_eq!(factors(&from, &to), [(0..1, 0..1), (1..2, 1..3)]);
        assert_eq!(factors(&to, &from), [(0..1, 0..1), (1..3, 1..2)]);
        let ones = Shape(vec![1.into(), tokens, 1.into(), 48.into()]);
        let all = factors(&from, &ones);
        assert_eq!(all.last().map(|(a, b)| (a.end, b.end)), Some((2, 4)), "{all:?}");
        assert_eq!(factors(&Shape::new([4, 6]), &Shape::new([3, 8])), [(0..2, 0..2)]);
    }
}
