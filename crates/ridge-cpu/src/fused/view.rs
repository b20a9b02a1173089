//! Where an operand's elements lie, as a function of the index into a row-major iteration space.

use std::ops::Range;

/// Strides over an iteration space, with axes merged where they are walked as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct View {
    offset: usize,
    /// `(extent, stride)`, innermost last; none for a single element.
    axes: Vec<(usize, usize)>,
}

/// Elements that are one stride apart from their neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Its first element's place in the range that was asked for.
    pub(crate) at: usize,
    /// Its first element's place in the operand.
    pub(crate) from: usize,
    pub(crate) len: usize,
    pub(crate) stride: usize,
}

impl View {
    /// The view of `extents` with these strides, from element `offset` on.
    pub(crate) fn new(extents: &[usize], strides: &[usize], offset: usize) -> Self {
        let mut axes: Vec<(usize, usize)> = Vec::new();
        for (&extent, &stride) in extents.iter().zip(strides).rev() {
            match axes.last_mut() {
                _ if extent == 1 => {}
                Some((inner, step)) if stride == *step * *inner => *inner *= extent,
                _ => axes.push((extent, stride)),
            }
        }
        axes.reverse();
        Self { offset, axes }
    }

    /// `from`, with extents of 1 and missing leading axes repeated, over the space `to`.
    pub(crate) fn broadcast(from: &[usize], to: &[usize]) -> Self {
        let mut steps = vec![0; to.len() - from.len()];
        steps.extend(strides(from).iter().zip(from).map(|(&s, &extent)| if extent == 1 { 0 } else { s }));
        Self::new(to, &steps, 0)
    }

    /// Is it one element, repeated?
    pub(crate) fn is_uniform(&self) -> bool {
        self.axes.iter().all(|(_, stride)| *stride == 0)
    }

    /// As a stack of transposed matrices, if it is one and they are of some size: `(rows, columns, stride)`, where
    /// neighbours in a column are neighbours in the operand and those in a row are `stride` apart.
    pub(crate) fn transposed(&self) -> Option<(usize, usize, usize)> {
        match self.axes[..] {
            [.., (rows, 1), (columns, stride)] if rows >= 8 && columns >= 8 && stride > 1 => {
                Some((rows, columns, stride))
            }
            _ => None,
        }
    }

    /// The place of the element with this index.
    pub(crate) fn place(&self, index: usize) -> usize {
        let (columns, stride) = self.axes.last().copied().unwrap_or((1, 0));
        let outer = &self.axes[..self.axes.len().saturating_sub(1)];
        self.offset + row_start(outer, index / columns) + index % columns * stride
    }

    /// Calls `each` for the runs that make up indices `range` of the space, in order.
    pub(crate) fn runs(&self, range: Range<usize>, mut each: impl FnMut(Run)) {
        if range.is_empty() {
            return;
        }
        let Some((&(inner, stride), outer)) = self.axes.split_last() else {
            return each(Run { at: 0, from: self.offset, len: range.len(), stride: 0 });
        };
        let mut index = range.start;
        while index < range.end {
            let (row, within) = (index / inner, index % inner);
            let len = (inner - within).min(range.end - index);
            let from = self.offset + row_start(outer, row) + within * stride;
            each(Run { at: index - range.start, from, len, stride });
            index += len;
        }
    }
}

/// Where the row of this number starts, over the axes that count rows.
fn row_start(axes: &[(usize, usize)], mut row: usize) -> usize {
    let Some((&(_, stride), inner)) = axes.split_first() else { return 0 };
    let mut at = 0;
    for &(extent, stride) in inner.iter().rev() {
        at += row % extent * stride;
        row /= extent;
    }
    at + row * stride
}

/// Elements between neighbours along each axis of a row-major tensor.
pub(crate) fn strides(shape: &[usize]) -> Vec<usize> {
    let mut out = vec![1; shape.len()];
    for axis in (0..shape.len().saturating_sub(1)).rev() {
        out[axis] = out[axis + 1] * shape[axis + 1];
    }
    out
}

/// Elements before, along and after `axis`.
pub(crate) fn around(shape: &[usize], axis: usize) -> (usize, usize, usize) {
    (shape[..axis].iter().product(), shape[axis], shape[axis + 1..].iter().product())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(view: &View, range: Range<usize>) -> Vec<usize> {
        let mut out = vec![usize::MAX; range.len()];
        view.runs(range, |run| (0..run.len).for_each(|i| out[run.at + i] = run.from + i * run.stride));
        out
    }

    #[test]
    fn axes_that_are_walked_as_one_are_merged() {
        assert_eq!(View::broadcast(&[2, 3, 4], &[2, 3, 4]).axes, [(24, 1)]);
        assert_eq!(View::broadcast(&[3, 1], &[2, 3, 4]).axes, [(2, 0), (3, 1), (4, 0)]);
        assert_eq!(View::broadcast(&[4], &[2, 3, 4]).axes, [(6, 0), (4, 1)]);
        assert!(View::broadcast(&[1, 1], &[7, 5]).is_uniform());
        assert!(View::broadcast(&[], &[]).is_uniform());
    }

    #[test]
    fn runs_cover_any_range_in_order() {
        let shape = [2, 3, 4];
        let view = View::new(&[4, 2, 3], &[1, 12, 4], 0);
        let all: Vec<usize> = (0..24).map(|i| i / 6 + i / 3 % 2 * 12 + i % 3 * 4).collect();
        for start in 0..24 {
            for end in start..=24 {
                assert_eq!(places(&view, start..end), all[start..end]);
            }
        }
        let whole = View::broadcast(&shape, &shape);
        assert_eq!(places(&whole, 5..17), (5..17).collect::<Vec<_>>());
    }

    #[test]
    fn stacks_of_transposed_matrices_are_known() {
        let view = View::new(&[3, 10, 9], &[90, 1, 10], 5);
        assert_eq!(view.transposed(), Some((10, 9, 10)));
        let all = places(&view, 0..270);
        assert!((0..270).all(|i| view.place(i) == all[i]));
        assert_eq!(View::new(&[10, 3], &[1, 10], 0).transposed(), None);
        assert_eq!(View::broadcast(&[10, 10], &[10, 10]).transposed(), None);
    }

    #[test]
    fn an_empty_space_has_no_runs() {
        assert_eq!(places(&View::broadcast(&[0, 1], &[0, 4]), 0..0), [0; 0]);
    }
}
