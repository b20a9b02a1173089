//! Iteration spaces: axes that every operand walks alike are merged, and operands' places become CUDA C++ expressions.

/// Elements between neighbours along each axis of a row-major tensor.
pub(crate) fn strides(shape: &[usize]) -> Vec<usize> {
    let mut out = vec![1; shape.len()];
    for axis in (0..shape.len().saturating_sub(1)).rev() {
        out[axis] = out[axis + 1] * shape[axis + 1];
    }
    out
}

/// Strides of a row-major tensor of `shape` read over `space`: extents of 1 and missing leading axes repeat.
pub(crate) fn broadcast(shape: &[usize], space: &[usize]) -> Vec<usize> {
    let mut out = vec![0; space.len() - shape.len()];
    out.extend(strides(shape).iter().zip(shape).map(|(s, extent)| if *extent == 1 { 0 } else { *s }));
    out
}

/// Elements before, along and after `axis`.
pub(crate) fn around(shape: &[usize], axis: usize) -> (usize, usize, usize) {
    (shape[..axis].iter().product(), shape[axis], shape[axis + 1..].iter().product())
}

/// A space with axes merged, and the strides of its operands.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct IterationSpace {
    pub(crate) dims: Vec<usize>,
    /// By operand, then axis.
    pub(crate) strides: Vec<Vec<usize>>,
}

impl IterationSpace {
    /// Merges neighbouring axes that all operands walk as one, and drops those of extent 1.
    pub(crate) fn merged(dims: &[usize], strides: &[Vec<usize>]) -> Self {
        let mut space = Self { dims: Vec::new(), strides: vec![Vec::new(); strides.len()] };
        for axis in (0..dims.len()).filter(|a| dims[*a] != 1) {
            let fits =
                |(own, of): (&Vec<usize>, &Vec<usize>)| own.last().is_some_and(|last| *last == of[axis] * dims[axis]);
            if !space.dims.is_empty() && space.strides.iter().zip(strides).all(fits) {
                *space.dims.last_mut().expect("not empty") *= dims[axis];
                space.strides.iter_mut().zip(strides).for_each(|(own, of)| {
                    own.pop();
                    own.push(of[axis]);
                });
            } else {
                space.dims.push(dims[axis]);
                space.strides.iter_mut().zip(strides).for_each(|(own, of)| own.push(of[axis]));
            }
        }
        space
    }

    /// Declares the coordinates `c0..` of element `index`, and `at0..`, the place of each operand. Extents and strides
    /// are appended to `numbers`, which the kernel knows as `n.v`; strides of 0 and 1 are in the text.
    pub(crate) fn places(&self, index: &str, integer: &str, numbers: &mut Vec<i64>) -> String {
        let mut text = String::new();
        let rank = self.dims.len();
        let mut rest = index.to_owned();
        for axis in (0..rank).rev() {
            if axis == 0 {
                text += &format!("const {integer} c0 = {rest};\n");
            } else {
                let extent = number(numbers, self.dims[axis]);
                text += &format!("const {integer} r{axis} = {rest} / ({integer}){extent};\n");
                text += &format!("const {integer} c{axis} = {rest} - r{axis} * ({integer}){extent};\n");
                rest = format!("r{axis}");
            }
        }
        for (operand, strides) in self.strides.iter().enumerate() {
            let mut terms = Vec::new();
            for (axis, stride) in strides.iter().enumerate() {
                match stride {
                    0 => {}
                    1 => terms.push(format!("c{axis}")),
                    _ => terms.push(format!("c{axis} * ({integer}){}", number(numbers, *stride))),
                }
            }
            let place = if terms.is_empty() { "0".to_owned() } else { terms.join(" + ") };
            text += &format!("const {integer} at{operand} = {place};\n");
        }
        text
    }

    /// Do all places fit 32 bits?
    pub(crate) fn is_small(&self) -> bool {
        let elements: usize = self.dims.iter().product();
        let last = |strides: &Vec<usize>| -> usize { strides.iter().zip(&self.dims).map(|(s, d)| s * d).sum() };
        elements < 1 << 31 && self.strides.iter().all(|s| last(s) < 1 << 31)
    }
}

/// `value` as a number of the launch.
pub(crate) fn number(numbers: &mut Vec<i64>, value: usize) -> String {
    numbers.push(value as i64);
    format!("n.v[{}]", numbers.len() - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_that_all_operands_walk_alike_are_merged() {
        let whole = strides(&[2, 3, 4]);
        assert_eq!(IterationSpace::merged(&[2, 3, 4], std::slice::from_ref(&whole)).dims, [24]);
        let space = IterationSpace::merged(&[2, 3, 4], &[whole, broadcast(&[3, 1], &[2, 3, 4])]);
        assert_eq!(space, IterationSpace { dims: vec![2, 3, 4], strides: vec![vec![12, 4, 1], vec![0, 1, 0]] });
        let space = IterationSpace::merged(&[2, 3, 4], &[vec![12, 4, 1], broadcast(&[4], &[2, 3, 4])]);
        assert_eq!(space, IterationSpace { dims: vec![6, 4], strides: vec![vec![4, 1], vec![0, 1]] });
        assert_eq!(IterationSpace::merged(&[1, 1], &[vec![0, 0]]).dims, [0usize; 0]);
    }

    #[test]
    fn places_are_sums_of_coordinates_and_strides() {
        let space = IterationSpace { dims: vec![6, 4], strides: vec![vec![4, 1], vec![0, 9]] };
        let mut numbers = Vec::new();
        let text = space.places("i", "u32", &mut numbers);
        assert!(text.contains("at0 = c0 * (u32)n.v[1] + c1;"), "{text}");
        assert!(text.contains("at1 = c1 * (u32)n.v[2];"), "{text}");
        assert_eq!(numbers, [4, 4, 9]);
    }
}
