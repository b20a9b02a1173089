//! Quantisation to codes with scales for each row or group of a row: alone, and of what a norm or the gate of an MLP gives,
//! so that several products read one value from memory.
//!
//! Floor: what is quantised read once, and its codes written once; each row stays in L1 meanwhile.

use std::ops::Range;

use ridge_graph::format::{CodeType, ScaleLayout, ScaledFormat};
use ridge_graph::ops::{Quantize, RmsNorm};
use ridge_graph::{DType, Function};

use super::int8;
use super::norm::{add_rows, normalise, same_rows};
use crate::bytes::cast;
use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use crate::scratch::Scratch;
use crate::simd;

pub(super) fn entries() -> [KernelEntry; 4] {
    [
        KernelEntry::new("quantize", "quantize(x)", by_rows, |s| make(s, Source::Plain)),
        KernelEntry::new("rms_norm_quantize", "quantize(rms_norm(x, w))", by_rows, |s| make(s, Source::Norm)),
        KernelEntry::new("add_rms_norm_quantize", "quantize(rms_norm(*add(x, r), w))", sums_by_rows, |s| {
            make(s, Source::Sum)
        }),
        KernelEntry::new("swiglu_quantize", "quantize(swiglu(gate, up))", by_rows, |s| make(s, Source::Swiglu)),
    ]
}

fn sums_by_rows(body: &Function) -> bool {
    by_rows(body) && same_rows(body)
}

/// Scales of rows, or of groups of them.
fn by_rows(body: &Function) -> bool {
    let format = body.ty(body.outputs[0].var).format.as_ref().and_then(|f| f.downcast::<ScaledFormat>().copied());
    format.is_some_and(|format| matches!(format.scales, ScaleLayout::Row | ScaleLayout::Group(_)))
}

/// What is quantised.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    /// The input.
    Plain,
    /// The norm of input 0 by input 1.
    Norm,
    /// The norm of the sum of inputs 0 and 1, which is output 1, by input 2.
    Sum,
    /// Input 0 as the gate of input 1.
    Swiglu,
}

struct Quantiser {
    source: Source,
    format: ScaledFormat,
    eps: f64,
    rows: usize,
    inner: usize,
    /// Elements that share a scale.
    group: usize,
    dtype: DType,
    /// Of the norm's weight.
    weight: DType,
    /// Where scales begin, in bytes.
    scales: usize,
}

fn make(spec: &KernelSpec<'_>, source: Source) -> Result<Box<dyn CpuKernel>, String> {
    let format = spec.composite::<Quantize>().ok_or("no quantize in the group")?.format;
    let (x, output) = (&spec.inputs[0], &spec.outputs[0]);
    let inner = output.last();
    Ok(Box::new(Quantiser {
        source,
        format,
        eps: spec.composite::<RmsNorm>().map_or(0.0, |norm| norm.eps),
        rows: output.rows(),
        inner,
        group: format.group(inner).ok_or("scales are not of rows")?,
        dtype: x.dtype,
        weight: spec.inputs[spec.inputs.len() - 1].dtype,
        scales: output.component_offsets()?.get(1).copied().ok_or("there are no scales")?,
    }))
}

impl Quantiser {
    /// The values of row `row` to `y`, as they are rounded; `a` and `b` are as long.
    fn values(&self, io: &KernelIo<'_>, row: usize, weight: &[f32], [y, a, b]: [&mut [f32]; 3]) {
        let (at, dtype) = (row * self.inner, self.dtype);
        match self.source {
            Source::Plain => return simd::load(io, 0, dtype, at, y),
            Source::Norm => normalise(simd::view(io, 0, dtype, at, a), weight, self.eps, y),
            Source::Sum => {
                add_rows(simd::view(io, 0, dtype, at, y), simd::view(io, 1, dtype, at, b), a);
                // SAFETY: this row of the output is ours alone.
                unsafe { simd::store(io, 1, dtype, at, a) };
                // The norm sees the sum as it was rounded for the others.
                simd::round(dtype, a);
                normalise(a, weight, self.eps, y);
            }
            Source::Swiglu => {
                simd::load(io, 0, dtype, at, y);
                simd::swiglu(y, simd::view(io, 1, dtype, at, a));
            }
        }
        simd::round(dtype, y);
    }

    /// The codes and scale of a group; `room` is as long.
    fn encode(&self, x: &[f32], codes: &mut [u8], room: &mut [f32]) -> f32 {
        let kind = self.format.codes;
        match kind {
            CodeType::Int8 if x.len() <= int8::GROUP && x.len().is_multiple_of(int8::SUMMED) => {
                let scale = int8::encode(x, cast(codes), &mut [0.0; int8::GROUP / int8::SUMMED]);
                if scale.is_nan() {
                    codes.fill(0);
                }
                scale
            }
            CodeType::Int8 => {
                let mut to = codes.iter_mut();
                kind.encode(x.iter().copied(), |code| to.next().into_iter().for_each(|to| *to = code))
            }
            CodeType::F8E4M3 => {
                let scale = largest(x) / kind.largest();
                let divisor = if scale == 0.0 { 1.0 } else { scale };
                divide(x, divisor, kind.largest(), room);
                simd::narrow::<simd::E4M3>(room, cast(codes));
                scale
            }
            CodeType::F8E5M2 => unreachable!("only tensors with one scale are stored so"),
        }
    }
}

impl CpuKernel for Quantiser {
    fn pieces(&self) -> usize {
        if self.inner == 0 { 0 } else { self.rows }
    }

    fn nanos_per_piece(&self) -> f64 {
        20.0 + self.inner as f64 * if self.source == Source::Swiglu { 1.0 } else { 0.6 }
    }

    fn run(&self, io: &KernelIo<'_>, rows: Range<usize>, scratch: &mut Scratch) {
        let (n, groups) = (self.inner, self.inner.div_ceil(self.group));
        let [weight, y, a, b] = scratch.slices::<f32, 4>([n; 4]);
        let weight: &[f32] = match self.source {
            Source::Plain | Source::Swiglu => &[],
            Source::Norm => simd::view(io, 1, self.weight, 0, weight),
            Source::Sum => simd::view(io, 2, self.weight, 0, weight),
        };
        for row in rows {
            self.values(io, row, weight, [&mut *y, &mut *a, &mut *b]);
            // SAFETY: the codes and scales of this row are ours alone.
            let codes = unsafe { io.output::<u8>(0).part(row * n..(row + 1) * n) };
            let scales = self.scales / size_of::<f32>() + row * groups;
            // SAFETY: as above.
            let scales = unsafe { io.output::<f32>(0).part(scales..scales + groups) };
            let parts = y.chunks(self.group).zip(codes.chunks_mut(self.group)).zip(scales);
            for ((x, codes), scale) in parts {
                *scale = self.encode(x, codes, &mut a[..x.len()]);
            }
        }
    }
}

simd::vectorised! {
    /// The largest magnitude; NaN if there is one.
    fn largest(x: &[f32]) -> f32 {
        let (mut most, mut odd) = ([0f32; simd::LANES], [0f32; simd::LANES]);
        let (chunks, rest) = x.as_chunks::<{ simd::LANES }>();
        for chunk in chunks {
            for i in 0..simd::LANES {
                let magnitude = chunk[i].abs();
                most[i] = if magnitude > most[i] { magnitude } else { most[i] };
                odd[i] += if chunk[i].is_nan() { 1.0 } else { 0.0 };
            }
        }
        for (i, x) in rest.iter().enumerate() {
            most[i] = if x.abs() > most[i] { x.abs() } else { most[i] };
            odd[i] += if x.is_nan() { 1.0 } else { 0.0 };
        }
        let (mut all, mut nans) = (0f32, 0f32);
        for i in 0..simd::LANES {
            all = if most[i] > all { most[i] } else { all };
            nans += odd[i];
        }
        if nans > 0.0 { f32::NAN } else { all }
    }
}

simd::vectorised! {
    /// `x / divisor`, no farther from 0 than `most`.
    fn divide(x: &[f32], divisor: f32, most: f32, out: &mut [f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = (x / divisor).clamp(-most, most);
        }
    }
}
