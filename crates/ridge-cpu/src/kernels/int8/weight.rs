//! Weights whose blocks are multiplied as codes.

use std::ops::Range;

use super::scale::GROUP;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::scale::SIDE;
#[cfg(target_arch = "x86_64")]
use super::unpack::Unpack;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::x::ActivationCodes;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::bytes::view;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::interleave::{Interleaving, Line};

/// Takes whole blocks apart: codes, and a scale and a minimum for each group.
pub(crate) type Read = fn(&[u8], &mut [i8], &mut [f32], &mut [f32]);

/// Products of some rows of a weight, in a format, with those of x.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) type Stream = fn(&CodeWeight<'_>, Range<usize>, &ActivationCodes<'_>, &mut [u8], &mut [f32]);

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
    pub(crate) unpack: Unpack,
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

    /// Elements of group `group` of K.
    pub(crate) fn elements(&self, group: usize) -> Range<usize> {
        group * GROUP..((group + 1) * GROUP).min(self.inner)
    }
}
