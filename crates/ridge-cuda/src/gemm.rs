//! Products of many rows on Hopper's tensor cores by `kernels/gemm_sm90.cu`, and the choice between its tilings and
//! cuBLASLt: the fastest on this machine, measured once for each shape (of rows up to the next multiple of 64) and kept
//! in the choice file.

use ridge_graph::DType;
use ridge_graph::format::BLOCK;

use crate::kernel::{
    CudaKernel, CudaSource, DeviceAction, KernelCandidate, KernelText, LaunchArg, OperandSlot, SlotOffset, name,
    numbers,
};

pub(crate) const TEXT: KernelText<'_> = KernelText::new(SOURCE).with_hopper().early_launch();
/// The text of the kernel alone.
pub(crate) const SOURCE: &str = include_str!("../kernels/gemm_sm90.cu");
const ENTRY: &str = "gemm_sm90";
/// The architecture that it is made for.
pub(crate) const ARCH: &str = "sm_90a";

/// Bytes of a row of a slice of both operands, as the swizzle has it.
const LINE: usize = 128;

/// How a block works: so many warpgroups on tiles of so many columns, over a ring of so many slices.
#[derive(Clone, Copy, Debug)]
struct Tiling {
    consumers: usize,
    columns: usize,
    stages: usize,
    /// Does each warpgroup make tiles of its own, one multiplying while the other stores?
    alternate: bool,
    /// Blocks that share a tile, each with a part of the depth.
    split: usize,
    /// Do two blocks make tiles of the same columns, each copying half of the right side for both?
    pair: bool,
}

/// The most rows that tiles of few rows have.
const FEW: usize = 32;

/// Large tiles for many rows, small ones for few, and those that are split where tiles are fewer than multiprocessors.
const TILINGS: [Tiling; 6] = [
    Tiling { consumers: 2, columns: 128, stages: 6, alternate: true, split: 1, pair: false },
    Tiling { consumers: 2, columns: 256, stages: 4, alternate: false, split: 1, pair: false },
    Tiling { consumers: 1, columns: 128, stages: 8, alternate: false, split: 1, pair: false },
    Tiling { consumers: 1, columns: 64, stages: 8, alternate: false, split: 1, pair: false },
    Tiling { consumers: 1, columns: 128, stages: 7, alternate: false, split: 2, pair: false },
    Tiling { consumers: 1, columns: 64, stages: 12, alternate: false, split: 2, pair: false },
];

/// Further ones where a product may neither be split nor go to a kernel for few rows: narrow tiles, so that few rows keep all
/// multiprocessors busy. All that are not split make the same sums, instruction by instruction, so any may be chosen.
const NARROW_TILINGS: [Tiling; 2] = [
    Tiling { consumers: 1, columns: 64, stages: 12, alternate: false, split: 1, pair: false },
    Tiling { consumers: 1, columns: 32, stages: 17, alternate: false, split: 1, pair: false },
];

/// Columns of the tiles for up to [`FEW`] rows, and bytes of their rings, which leave room for a block of the next launch.
const FEW_COLUMNS: [usize; 3] = [32, 64, 128];
const FEW_RING: usize = 98 << 10;

/// The same for codes with a scale for each row. Those of fp8 have sums of some slices in registers, beside the sums of all.
const CODE_TILINGS: [Tiling; 6] = [
    Tiling { consumers: 2, columns: 128, stages: 6, alternate: false, split: 1, pair: false },
    Tiling { consumers: 2, columns: 192, stages: 5, alternate: false, split: 1, pair: true },
    Tiling { consumers: 1, columns: 128, stages: 8, alternate: false, split: 1, pair: false },
    Tiling { consumers: 1, columns: 64, stages: 8, alternate: false, split: 1, pair: false },
    Tiling { consumers: 1, columns: 128, stages: 7, alternate: false, split: 2, pair: false },
    Tiling { consumers: 1, columns: 64, stages: 12, alternate: false, split: 2, pair: false },
];

/// The same for codes with scales of blocks: without scales of columns to keep in the end, tiles are as wide without a gate.
const BLOCK_TILINGS: [Tiling; 7] = [
    Tiling { consumers: 2, columns: 128, stages: 6, alternate: false, split: 1, pair: false },
    Tiling { consumers: 2, columns: 192, stages: 5, alternate: false, split: 1, pair: false },
    Tiling { consumers: 2, columns: 192, stages: 5, alternate: false, split: 1, pair: true },
    Tiling { consumers: 1, columns: 128, stages: 8, alternate: false, split: 1, pair: false },
    Tiling { consumers: 1, columns: 64, stages: 8, alternate: false, split: 1, pair: false },
    Tiling { consumers: 1, columns: 128, stages: 7, alternate: false, split: 2, pair: false },
    Tiling { consumers: 1, columns: 64, stages: 12, alternate: false, split: 2, pair: false },
];

/// Multiprocessors of a full GPU: tiles are not split beyond them by much.
pub(crate) const PROCESSORS: usize = 132;

impl Tiling {
    /// Of so many columns, where `held` rows of x are copied.
    fn of_few(columns: usize, held: usize) -> Self {
        let stages = FEW_RING / ((held + columns) * LINE);
        Self { consumers: 1, columns, stages, alternate: false, split: 1, pair: false }
    }

    fn rows(self) -> usize {
        if self.alternate { 128 } else { 64 * self.consumers }
    }

    /// Its name in the choice file.
    fn name(self) -> String {
        let Self { consumers, columns, stages, alternate, split, pair } = self;
        let how = if alternate { "alternating" } else { "together" };
        let split = if split > 1 { format!(", split by {split}") } else { String::new() };
        let pair = if pair { ", in pairs" } else { "" };
        format!("{ENTRY}, {consumers} consumers {how}, {columns} columns, {stages} stages{split}{pair}")
    }

    /// Bytes of the ring, of whose tiles `held` rows are copied, and of the sums of other blocks, with room to align them. What stands for
    /// rows that are not copied may lie behind the ring.
    fn shared(self, held: usize) -> usize {
        let parts = (self.split - 1) * self.rows() * (self.columns / self.split) * 4;
        let behind = if held < self.rows() { self.rows() * LINE } else { 0 };
        self.stages * (held + self.columns) * LINE + parts + behind + 1024
    }
}

/// What is done to the product, which was rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Epilogue {
    Nothing,
    /// This is added.
    Add(SlotOffset),
    /// It is the gate of a product with this matrix.
    Swiglu(SlotOffset),
}

/// A right side of a product, and its result.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemmSide {
    pub(crate) columns: usize,
    pub(crate) w: SlotOffset,
    pub(crate) y: SlotOffset,
}

/// `y[rows, columns] = x[rows, depth] w[columns, depth]^T` for each of `sides`, one to three, with what follows, which only a
/// single one has.
#[derive(Clone, Debug)]
pub(crate) struct GemmProblem {
    pub(crate) rows: usize,
    pub(crate) depth: usize,
    /// Of x and w.
    pub(crate) operands: DType,
    pub(crate) result: DType,
    pub(crate) x: SlotOffset,
    pub(crate) sides: Vec<GemmSide>,
    pub(crate) after: Epilogue,
    /// Where operands are codes: E4M3, or by rows int8.
    pub(crate) scales: Option<GemmCodeScales>,
    /// Have the sums one order at all numbers of rows?
    pub(crate) deterministic: bool,
}

/// Scales of codes, in f32.
#[derive(Clone, Debug)]
pub(crate) struct GemmCodeScales {
    /// Is there one for each block of 128 x 128 of the right sides and for each 128 elements of a row of x, or one for each row of both?
    pub(crate) in_blocks: bool,
    pub(crate) x: SlotOffset,
    /// Of each side, and of the matrix whose gate it is.
    pub(crate) sides: Vec<SlotOffset>,
    /// What is added to each side's result, and its dtype.
    pub(crate) biases: Option<(Vec<SlotOffset>, DType)>,
}

impl GemmProblem {
    /// Does the kernel take it, and is it worth a choice?
    fn fits(&self) -> bool {
        // Below this a launch takes longer than the sums.
        const LEAST: usize = 1 << 22;
        let Self { rows, depth, operands, result, ref sides, after, ref scales, .. } = *self;
        let columns = sides.iter().map(|side| side.columns).sum();
        let all = [rows, columns, depth].into_iter().try_fold(1usize, usize::checked_mul);
        let sixteen = |dtype| matches!(dtype, DType::BF16 | DType::F16);
        let codes = sixteen(result)
            && depth.is_multiple_of(16)
            && scales.as_ref().is_some_and(|scales| match operands {
                DType::F8E4M3 => true,
                DType::I8 => !scales.in_blocks,
                _ => false,
            });
        let floats = sixteen(operands)
            && scales.is_none()
            && (result == operands || (result == DType::F32 && after == Epilogue::Nothing));
        (codes || floats)
            && all.is_some_and(|all| all >= if self.deterministic { 1 } else { LEAST })
            && (1..=if after == Epilogue::Nothing { 3 } else { 1 }).contains(&sides.len())
            && sides.iter().all(|side| side.columns.is_multiple_of(8))
            && depth.is_multiple_of(8)
            && [rows, columns, depth].into_iter().all(|extent| extent < 1 << 31)
    }

    /// The tilings that its operands have.
    fn tilings(&self) -> impl Iterator<Item = Tiling> {
        match &self.scales {
            Some(scales) if scales.in_blocks => BLOCK_TILINGS.iter(),
            Some(_) => CODE_TILINGS.iter(),
            None => TILINGS.iter(),
        }
        .filter(|tiling| !self.deterministic || (tiling.split == 1 && !self.is_few()))
        .chain(NARROW_TILINGS.iter().filter(|_| self.deterministic && !self.is_few()))
        .copied()
        .chain(
            FEW_COLUMNS.into_iter().filter(|_| self.is_few()).map(|columns| Tiling::of_few(columns, self.few_rows())),
        )
    }

    /// Are few rows to be made by tiles?
    fn is_few(&self) -> bool {
        self.deterministic && self.rows <= FEW
    }

    /// Rows of x that are copied for a tile.
    fn held(&self, tiling: Tiling) -> usize {
        if self.is_few() { self.few_rows() } else { tiling.rows() }
    }

    /// The same where there are few.
    fn few_rows(&self) -> usize {
        self.rows.next_power_of_two().clamp(8, FEW)
    }

    fn in_blocks(&self) -> bool {
        self.scales.as_ref().is_some_and(|scales| scales.in_blocks)
    }

    /// Elements of a row of a slice.
    fn slice(&self) -> usize {
        LINE / self.operands.size_bytes()
    }

    /// Is the tiling worth a trial? Splitting is where tiles are few, pairs where there are two.
    fn suits(&self, tiling: Tiling) -> bool {
        if !self.takes(tiling) || (tiling.pair && self.rows <= tiling.rows()) {
            return false;
        }
        let few = self.rows <= tiling.rows() && self.tiles(tiling) * tiling.split <= PROCESSORS + PROCESSORS / 2;
        tiling.split == 1 || few
    }

    /// Can the product be made so? Every block of a split needs a slice, and a gate both sides' sums. Without a gate, wide
    /// tiles of codes have more scales of columns, and biases, than registers are left for.
    fn takes(&self, tiling: Tiling) -> bool {
        let gated = matches!(self.after, Epilogue::Swiglu(_));
        let splits = !gated && self.depth.div_ceil(self.slice()) >= tiling.split;
        let kept = |scales: &GemmCodeScales| !scales.in_blocks || scales.biases.is_some();
        let narrow = gated && tiling.columns < 64;
        let crowded = tiling.columns > 128 && !gated && self.scales.as_ref().is_some_and(kept);
        (tiling.split == 1 || splits) && !crowded && !narrow
    }

    fn tiles(&self, tiling: Tiling) -> usize {
        let width = if matches!(self.after, Epilogue::Swiglu(_)) { tiling.columns / 2 } else { tiling.columns };
        let bands = self.rows.div_ceil(tiling.rows()).next_multiple_of(if tiling.pair { 2 } else { 1 });
        bands * self.sides.iter().map(|side| side.columns.div_ceil(width)).sum::<usize>()
    }

    /// One launch in this tiling.
    fn launch(&self, tiling: Tiling) -> DeviceAction {
        let Self { rows, depth, operands, result, x, ref sides, after, ref scales, .. } = *self;
        let flag = |on: bool| if on { "1" } else { "0" };
        let gated = matches!(after, Epilogue::Swiglu(_));
        let biases = scales.as_ref().and_then(|scales| scales.biases.as_ref());
        let held = self.held(tiling);
        let extents = [tiling.consumers, tiling.columns, held, tiling.stages, tiling.split, sides.len()];
        let [consumers, across, held_text, stages, split, count] = extents.map(|n| n.to_string());
        let defines = [
            ("D", name(if scales.is_some() { result } else { operands })),
            ("SCALED", if self.in_blocks() { "2" } else { flag(scales.is_some()) }),
            ("CODE", name(operands)),
            ("BIAS", flag(biases.is_some())),
            ("BIAS_TYPE", name(biases.map_or(DType::F32, |(_, dtype)| *dtype))),
            ("OUT_WIDE", flag(result == DType::F32)),
            ("CONSUMERS", &*consumers),
            ("COLUMNS", &*across),
            ("HELD", &*held_text),
            ("STAGES", &*stages),
            ("ALTERNATE", flag(tiling.alternate)),
            ("SPLIT", &*split),
            ("PAIR", flag(tiling.pair)),
            ("COUNT", &*count),
            ("ADD", flag(matches!(after, Epilogue::Add(_)))),
            ("SWIGLU", flag(gated)),
        ];
        let width = if gated { tiling.columns / 2 } else { tiling.columns };
        let slice = self.slice();
        let map =
            |at, rows, tile| LaunchArg::Matrix { at, dtype: operands, extents: [rows, depth], tile: [tile, slice] };
        let mut args = vec![map(x, rows, held)];
        let box_rows = if tiling.pair { tiling.columns / 2 } else { width };
        args.extend(sides.iter().map(|side| map(side.w, side.columns, box_rows)));
        let mut prefetched: Vec<OperandSlot> = sides.iter().map(|side| side.w.0).collect();
        let mut r = sides[0].y;
        match after {
            Epilogue::Nothing => {}
            Epilogue::Add(at) => r = at,
            Epilogue::Swiglu(up) => {
                args.push(map(up, sides[0].columns, box_rows));
                prefetched.push(up.0);
            }
        }
        let columns: Vec<usize> = sides.iter().map(|side| side.columns).collect();
        args.extend([
            LaunchArg::Pointers(sides.iter().map(|side| side.y).collect()),
            LaunchArg::Pointer(r.0, r.1),
            numbers(&[&[rows, depth][..], &columns].concat()),
        ]);
        if let Some(GemmCodeScales { x, sides, .. }) = scales {
            let biases = biases.map_or(&[][..], |(at, _)| at);
            args.push(LaunchArg::Pointers([&[*x][..], sides, biases].concat()));
        }
        // Tiles of few rows are a block each, of which two share a multiprocessor; others are made in turn by blocks that stay.
        let blocks = if self.is_few() {
            0
        } else if tiling.pair {
            2
        } else {
            tiling.split as u32
        };
        DeviceAction::Launch {
            source: CudaSource::new(ENTRY, &defines, &TEXT.persistent(blocks)),
            grid: [(self.tiles(tiling) * tiling.split).min(i32::MAX as usize) as u32, 1, 1],
            threads: 128 * (tiling.consumers as u32 + 1),
            shared: tiling.shared(held) as u32,
            args,
            prefetched,
        }
    }

    fn candidates(&self) -> impl Iterator<Item = KernelCandidate> {
        self.tilings().filter(|tiling| self.suits(*tiling)).map(|tiling| KernelCandidate {
            name: tiling.name(),
            actions: vec![self.launch(tiling)],
            arch: Some(ARCH),
        })
    }

    /// What a choice is kept under.
    fn key(&self) -> String {
        let Self { rows, depth, operands, result, sides, after, scales, .. } = self;
        let scaled = match scales {
            Some(scales) if scales.in_blocks => ", scaled by blocks",
            Some(_) => ", scaled by rows",
            None => "",
        };
        let biased = if scales.as_ref().is_some_and(|scales| scales.biases.is_some()) { ", biased" } else { "" };
        let columns = sides.iter().map(|side| side.columns.to_string()).collect::<Vec<_>>().join(" and ");
        let after = match after {
            Epilogue::Nothing => "",
            Epilogue::Add(_) => ", added",
            Epilogue::Swiglu(_) => ", gated",
        };
        // Few rows have other tiles.
        let (last, first) = match self.few_rows() {
            last if self.is_few() => (last, if last == 8 { 1 } else { last / 2 + 1 }),
            _ => {
                let last = rows.next_multiple_of(64);
                (last, last.saturating_sub(63).max(if self.deterministic { FEW + 1 } else { 1 }))
            }
        };
        let one_order = if self.deterministic { ", in one order" } else { "" };
        format!(
            "product of {first} to {last} rows, {columns} columns, depth {depth}, {operands} in {result}{after}{scaled}{biased}{one_order}"
        )
    }

    /// The operands, to be timed on.
    fn operands(&self, scratch: usize) -> Vec<(SlotOffset, DType, usize)> {
        let Self { rows, depth, operands, result, .. } = *self;
        let mut all = vec![
            (self.x, operands, rows * depth),
            ((OperandSlot::Scratch, 0), operands, scratch / operands.size_bytes()),
        ];
        for side in &self.sides {
            all.extend([(side.w, operands, side.columns * depth), (side.y, result, rows * side.columns)]);
        }
        let columns = self.sides[0].columns;
        match self.after {
            Epilogue::Nothing => {}
            Epilogue::Add(r) => all.push((r, result, rows * columns)),
            Epilogue::Swiglu(up) => all.push((up, operands, columns * depth)),
        }
        if let Some(GemmCodeScales { in_blocks, x, sides, biases }) = &self.scales {
            let scales = |rows: usize, high: usize| match in_blocks {
                true => rows.div_ceil(high) * depth.div_ceil(BLOCK),
                false => rows,
            };
            all.push((*x, DType::F32, scales(rows, 1)));
            // The matrix whose gate a side is has as many columns.
            let columns = self.sides.iter().map(|side| side.columns).chain([columns]);
            all.extend(sides.iter().zip(columns).map(|(side, columns)| (*side, DType::F32, scales(columns, BLOCK))));
            let of_biases = biases.iter().flat_map(|(at, dtype)| at.iter().map(move |at| (*at, *dtype)));
            all.extend(of_biases.zip(&self.sides).map(|((at, dtype), side)| (at, dtype, side.columns)));
        }
        all
    }
}

/// The fastest of `kernel`, which makes the product by cuBLASLt or simpler means, and of this file's.
pub(crate) fn fastest(kernel: CudaKernel, of: &GemmProblem) -> CudaKernel {
    fastest_before(kernel, of, &[], "")
}

/// The same where this file's need the actions `behind` for what `kernel` makes, which is called `made`.
pub(crate) fn fastest_before(kernel: CudaKernel, of: &GemmProblem, behind: &[DeviceAction], made: &str) -> CudaKernel {
    if kernel.actions.is_empty() || !of.fits() {
        return kernel;
    }
    let scratch = kernel.scratch;
    let mut candidates = vec![KernelCandidate { name: "cuBLASLt".into(), actions: kernel.actions, arch: None }];
    candidates.extend(of.candidates().map(|mut candidate| {
        candidate.actions.extend_from_slice(behind);
        candidate
    }));
    let key = if made.is_empty() { of.key() } else { format!("{}, {made}", of.key()) };
    let all = DeviceAction::Autotuned { key, operands: of.operands(scratch), candidates };
    CudaKernel { actions: vec![all], scratch }
}

/// The fastest of this file's kernels on the GPUs that have them, and `kernel` on others.
pub(crate) fn fastest_on_hopper(kernel: CudaKernel, of: &GemmProblem) -> CudaKernel {
    if kernel.actions.is_empty() || !of.fits() {
        return kernel;
    }
    let CudaKernel { actions: otherwise, scratch } = kernel;
    let all = DeviceAction::Autotuned {
        key: of.key(),
        operands: of.operands(scratch),
        candidates: of.candidates().collect(),
    };
    CudaKernel { actions: vec![DeviceAction::ByArch { arch: ARCH, actions: vec![all], otherwise }], scratch }
}

#[cfg(test)]
mod tests;
