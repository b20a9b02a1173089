//! Weights whose blocks are multiplied as codes.

use std::ops::Range;

use super::scale::GROUP;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::scale::SIDE;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::x::ActivationCodes;
#[cfg(target_arch = "x86_64")]
use crate::amx;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::bytes::view;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::interleave::{Interleaving, Line};

/// Takes whole blocks apart: codes, and a scale and a minimum for each group.
pub(crate) type Read = fn(&[u8], &mut [i8], &mut [f32], &mut [f32]);

/// Products of some rows of a weight, in a format, with those of x.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) type Stream = fn(&CodeWeight<'_>, Range<usize>, &ActivationCodes<'_>, &mut [u8], &mut [f32]);

/// Some rows of a weight and steps of K, in a format, as tiles of bf16.
#[cfg(target_arch = "x86_64")]
pub(crate) type ToPanel = fn(&CodeWeight<'_>, Range<usize>, Range<usize>, &mut [amx::Words]);

/// How the blocks of a format are codes.
#[derive(Clone, Copy)]
pub(crate) struct WeightCodes {
    /// Elements and bytes of a block.
    pub(crate) block: [usize; 2],
    /// Elements that share a scale.
    pub(crate) group: usize,
    pub(crate) minima: bool,
    /// What products are multiplied by at last: see [`LARGE`].
    pub(crate) unit: f32,
    pub(crate) read: Read,
    #[cfg(target_arch = "x86_64")]
    pub(crate) to_panel: ToPanel,
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub(crate) stream: Stream,
}

impl WeightCodes {
    /// Bytes of `elements` values.
    pub(crate) fn bytes(&self, elements: usize) -> usize {
        elements / self.block[0] * self.block[1]
    }
}

/// A weight `[N, K]`.
#[derive(Clone, Copy)]
pub(crate) struct CodeWeight<'a> {
    pub(crate) data: &'a [u8],
    pub(crate) codes: WeightCodes,
    pub(crate) inner: usize,
    /// How its rows are interleaved, if they are not one after another.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub(crate) interleaved: Option<Interleaving>,
}

impl<'a> CodeWeight<'a> {
    /// Bytes of a row.
    pub(crate) fn stride(&self) -> usize {
        self.codes.bytes(self.inner)
    }

    /// If its rows are interleaved, the lines of the 16 rows that row `row` is among, and how many of them a group of K has.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub(super) fn lines(&self, row: usize) -> Option<(&'a [Line], usize)> {
        self.interleaved.map(|interleaving| {
            let lines = interleaving.group_lines();
            (&view::<u32>(self.data).as_chunks().0[row / SIDE * lines..][..lines], interleaving.unit_lines())
        })
    }

    /// The words that elements `elements` of at most 32 rows are in, from a group of K and of 16 rows on: none of a part of rows that
    /// are not interleaved.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn memory(&self, rows: &Range<usize>, elements: &Range<usize>) -> [&'a [u32]; 2] {
        let whole = elements.len() == self.inner;
        let Some(interleaving) = self.interleaved else {
            let rows = if whole { rows.start * self.stride()..rows.end * self.stride() } else { 0..0 };
            // SAFETY: any bytes are words.
            return [unsafe { self.data[rows].align_to().1 }, &[]];
        };
        let line =
            |element: usize| (element.div_ceil(GROUP) * interleaving.unit_lines()).min(interleaving.group_lines());
        let lines = line(elements.start)..line(elements.end);
        let of_rows = |first: usize| match self.lines(first.min(rows.end - 1)) {
            Some((of_rows, _)) if first < rows.end => of_rows[lines.clone()].as_flattened(),
            _ => &[],
        };
        [of_rows(rows.start), of_rows(rows.start + SIDE)]
    }

    /// Elements of group `group` of K.
    pub(crate) fn elements(&self, group: usize) -> Range<usize> {
        group * GROUP..((group + 1) * GROUP).min(self.inner)
    }
}
