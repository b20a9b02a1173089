//! Products of many rows on Hopper's tensor cores by `kernels/gemm_sm90.cu`, and the choice between its tilings and
//! cuBLASLt: the fastest on this machine, measured once for each shape (of rows up to the next multiple of 64) and kept
//! in the choice file.

use ridge_graph::DType;

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

/// Large tiles for many rows, small ones for few, and those that are split where tiles are fewer than multiprocessors.
const TILINGS: [Tiling; 6] = [
    Tiling { consumers: 2, columns: 128, stages: 6, alternate: true, split: 1, pair: false },
    Tiling { consumers: 2, columns: 256, stages: 4, alternate: false, split: 1, pair: false },
    Tiling { consumers: 1, columns: 128, stages: 8, alternate: false, split: 1, pair: false },
    Tiling { consumers: 1, columns: 64, stages: 8, alternate: false, split: 1, pair: false },
    Tiling { consumers: 1, columns: 128, stages: 7, alternate: false, split: 2, pair: false },
    Tiling { consumers: 1, columns: 64, stages: 12, alternate: false, split: 2, pair: false },
];

/// The same for codes, whose sums of a slice take registers beside the sums of all.
const CODE_TILINGS: [Tiling; 6] = [
    Tiling { consumers: 2, columns: 128, stages: 6, alternate: false, split: 1, pair: false },
    Tiling { consumers: 2, columns: 192, stages: 5, alternate: false, split: 1, pair: true },
    Tiling { consumers: 1, columns: 128, stages: 8, alternate: false, split: 1, pair: false },
    Tiling { consumers: 1, columns: 64, stages: 8, alternate: false, split: 1, pair: false },
    Tiling { consumers: 1, columns: 128, stages: 7, alternate: false, split: 2, pair: false },
    Tiling { consumers: 1, columns: 64, stages: 12, alternate: false, split: 2, pair: false },
];

/// Multiprocessors of a full GPU: tiles are not split beyond them by much.
pub(crate) const PROCESSORS: usize = 132;

impl Tiling {
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

    /// Bytes of the ring and of the sums of other blocks, with room to align them.
    fn shared(self) -> usize {
        let parts = (self.split - 1) * self.rows() * (self.columns / self.split) * 4;
        self.stages * (self.rows() + self.columns) * LINE + parts + 1024
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
    /// Where operands are codes.
    pub(crate) scales: Option<GemmRowScales>,
}

/// Scales of the rows of both operands, in f32.
#[derive(Clone, Debug)]
pub(crate) struct GemmRowScales {
    pub(crate) x: SlotOffset,
    /// Of each side, and of the matrix whose gate it is.
    pub(crate) sides: Vec<SlotOffset>,
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
        let codes = operands == DType::F8E4M3 && scales.is_some() && sixteen(result) && depth.is_multiple_of(16);
        let floats = sixteen(operands)
            && scales.is_none()
            && (result == operands || (result == DType::F32 && after == Epilogue::Nothing));
        (codes || floats)
            && (1..=if after == Epilogue::Nothing { 3 } else { 1 }).contains(&sides.len())
            && sides.iter().all(|side| side.columns.is_multiple_of(8))
            && depth.is_multiple_of(8)
            && [rows, columns, depth].into_iter().all(|extent| extent < 1 << 31)
            && all.is_some_and(|all| all >= LEAST)
    }

    /// The tilings that its operands have.
    fn tilings(&self) -> impl Iterator<Item = Tiling> {
        if self.scales.is_some() { CODE_TILINGS.iter() } else { TILINGS.iter() }.copied()
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

    /// Can the product be made so? Every block of a split needs a slice, and a gate both sides' sums. Without a gate, a pair's
    /// columns have more scales than registers are left for.
    fn takes(&self, tiling: Tiling) -> bool {
        let gated = matches!(self.after, Epilogue::Swiglu(_));
        let splits = !gated && self.depth.div_ceil(self.slice()) >= tiling.split;
        (tiling.split == 1 || splits) && (gated || !tiling.pair)
    }

    fn tiles(&self, tiling: Tiling) -> usize {
        let width = if matches!(self.after, Epilogue::Swiglu(_)) { tiling.columns / 2 } else { tiling.columns };
        let bands = self.rows.div_ceil(tiling.rows()).next_multiple_of(if tiling.pair { 2 } else { 1 });
        bands * self.sides.iter().map(|side| side.columns.div_ceil(width)).sum::<usize>()
    }

    /// One launch in this tiling.
    fn launch(&self, tiling: Tiling) -> DeviceAction {
        let Self { rows, depth, operands, result, x, ref sides, after, ref scales } = *self;
        let flag = |on: bool| if on { "1" } else { "0" };
        let gated = matches!(after, Epilogue::Swiglu(_));
        let extents = [tiling.consumers, tiling.columns, tiling.stages, tiling.split, sides.len()];
        let [consumers, across, stages, split, count] = extents.map(|n| n.to_string());
        let defines = [
            ("D", name(if scales.is_some() { result } else { operands })),
            ("SCALED", flag(scales.is_some())),
            ("OUT_WIDE", flag(result == DType::F32)),
            ("CONSUMERS", &*consumers),
            ("COLUMNS", &*across),
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
        let mut args = vec![map(x, rows, tiling.rows())];
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
        if let Some(GemmRowScales { x, sides }) = scales {
            args.push(LaunchArg::Pointers([&[*x][..], sides].concat()));
        }
        let cluster = if tiling.pair { 2 } else { tiling.split as u32 };
        DeviceAction::Launch {
            source: CudaSource::new(ENTRY, &defines, &TEXT.persistent(cluster)),
            grid: [(self.tiles(tiling) * tiling.split).min(i32::MAX as usize) as u32, 1, 1],
            threads: 128 * (tiling.consumers as u32 + 1),
            shared: tiling.shared() as u32,
            args,
            prefetched,
        }
    }

    /// What a choice is kept under.
    fn key(&self) -> String {
        let Self { rows, depth, operands, result, sides, after, scales, .. } = self;
        let scaled = if scales.is_some() { ", scaled by rows" } else { "" };
        let columns = sides.iter().map(|side| side.columns.to_string()).collect::<Vec<_>>().join(" and ");
        let after = match after {
            Epilogue::Nothing => "",
            Epilogue::Add(_) => ", added",
            Epilogue::Swiglu(_) => ", gated",
        };
        let last = rows.next_multiple_of(64);
        let first = last.saturating_sub(63).max(1);
        format!(
            "product of {first} to {last} rows, {columns} columns, depth {depth}, {operands} in {result}{after}{scaled}"
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
        if let Some(GemmRowScales { x, sides }) = &self.scales {
            all.push((*x, DType::F32, rows));
            // The matrix whose gate a side is has as many columns.
            let columns = self.sides.iter().map(|side| side.columns).chain([columns]);
            all.extend(sides.iter().zip(columns).map(|(side, columns)| (*side, DType::F32, columns)));
        }
        all
    }
}

/// The fastest of `kernel`, which makes the product by cuBLASLt or simpler means, and of this file's.
pub(crate) fn fastest(kernel: CudaKernel, of: &GemmProblem) -> CudaKernel {
    if kernel.actions.is_empty() || !of.fits() {
        return kernel;
    }
    let scratch = kernel.scratch;
    let mut candidates = vec![KernelCandidate { name: "cuBLASLt".into(), actions: kernel.actions, arch: None }];
    candidates.extend(of.tilings().filter(|tiling| of.suits(*tiling)).map(|tiling| KernelCandidate {
        name: tiling.name(),
        actions: vec![of.launch(tiling)],
        arch: Some(ARCH),
    }));
    CudaKernel {
        actions: vec![DeviceAction::Autotuned { key: of.key(), operands: of.operands(scratch), candidates }],
        scratch,
    }
}

#[cfg(test)]
mod tests {
    use ridge_graph::sample::Rng;
    use ridge_graph::{DType, Tensor};

    use super::*;
    use crate::device::{CudaDevice, DeviceMemory};

    /// Right side `i` of so many columns.
    fn side(columns: usize, i: usize) -> GemmSide {
        GemmSide { columns, w: (OperandSlot::Input(1 + i), 0), y: (OperandSlot::Output(i), 0) }
    }

    #[test]
    fn only_what_the_kernel_takes_is_chosen_among() {
        let of = GemmProblem {
            rows: 64,
            depth: 512,
            operands: DType::BF16,
            result: DType::BF16,
            x: (OperandSlot::Input(0), 0),
            sides: vec![side(512, 0)],
            after: Epilogue::Nothing,
            scales: None,
        };
        let with = |change: &dyn Fn(&mut GemmProblem)| {
            let mut other = of.clone();
            change(&mut other);
            other.fits()
        };
        assert!(of.fits() && with(&|p| p.result = DType::F32));
        assert!(with(&|p| p.sides = vec![side(512, 0), side(256, 1), side(8, 2)]));
        assert!(!with(&|p| p.sides = vec![side(512, 0); 4]), "too many right sides");
        assert!(!with(&|p| p.rows = 8), "too little");
        assert!(!with(&|p| p.sides[0].columns = 516) && !with(&|p| p.depth = 516), "unaligned");
        assert!(!with(&|p| (p.operands, p.result) = (DType::F32, DType::F32)));
        let add = Epilogue::Add((OperandSlot::Input(2), 0));
        assert!(!with(&|p| (p.result, p.after) = (DType::F32, add)));
        assert!(
            TILINGS.iter().chain(&CODE_TILINGS).all(|t| t.shared() <= 227 << 10),
            "a ring is larger than shared memory"
        );
    }

    /// A Hopper GPU, or why there is none.
    fn hopper() -> Result<CudaDevice, String> {
        let device = CudaDevice::open(&crate::CudaOptions::default()).map_err(|why| format!("no GPU: {why}"))?;
        if device.arch() == ARCH { Ok(device) } else { Err(format!("the GPU is {}, not {ARCH}", device.arch())) }
    }

    fn rounded(dtype: DType, value: f64) -> f64 {
        Tensor::from_bytes(dtype, &[1], &Tensor::float(dtype, &[1], vec![value]).to_bytes()).floats()[0]
    }

    /// Every tiling with everything that can follow, more tiles than processors among them, against sums in f64.
    #[test]
    fn every_tiling_makes_the_product_and_what_follows() {
        let device = match hopper() {
            Ok(device) => device,
            Err(why) => ridge_testing::skip!("{why}"),
        };
        let after = [
            Epilogue::Nothing,
            Epilogue::Add((OperandSlot::Input(2), 0)),
            Epilogue::Swiglu((OperandSlot::Input(2), 0)),
        ];
        for (rows, columns, depth) in [(300, 1000, 776), (17, 8, 8200), (129, 4096, 136), (1500, 1288, 264)] {
            for (operands, result) in [(DType::BF16, DType::BF16), (DType::F16, DType::F16), (DType::BF16, DType::F32)]
            {
                for after in after.into_iter().filter(|a| result != DType::F32 || *a == Epilogue::Nothing) {
                    let (x, sides) = ((OperandSlot::Input(0), 0), vec![side(columns, 0)]);
                    holds(&device, &GemmProblem { rows, depth, operands, result, x, sides, after, scales: None });
                }
            }
        }
    }

    /// Right sides of any number of columns have their own results.
    #[test]
    fn every_tiling_makes_several_products_of_one_left_side() {
        let device = match hopper() {
            Ok(device) => device,
            Err(why) => ridge_testing::skip!("{why}"),
        };
        for rows in [17, 40, 130] {
            for sides in [vec![side(1000, 0), side(136, 1)], vec![side(264, 0), side(8, 1), side(520, 2)]] {
                let (operands, result) = (DType::BF16, DType::BF16);
                let (x, after) = ((OperandSlot::Input(0), 0), Epilogue::Nothing);
                holds(&device, &GemmProblem { rows, depth: 776, operands, result, x, sides, after, scales: None });
            }
        }
    }

    /// Codes are multiplied with the scales of their rows, by every tiling that codes have.
    #[test]
    fn every_tiling_of_codes_makes_the_product_and_what_follows() {
        let device = match hopper() {
            Ok(device) => device,
            Err(why) => ridge_testing::skip!("{why}"),
        };
        let one = |columns| vec![side(columns, 0)];
        let up = (OperandSlot::Input(2), 0);
        // The last has more pairs of tiles than clusters run at once.
        for (rows, depth) in [(40, 1040), (300, 784), (129, 8208), (3000, 784)] {
            for (sides, after) in [
                (one(1000), Epilogue::Nothing),
                (one(264), Epilogue::Add(up)),
                (one(1288), Epilogue::Swiglu(up)),
                (vec![side(264, 0), side(8, 1), side(520, 2)], Epilogue::Nothing),
            ] {
                // Scales lie behind the operands.
                let first = 1 + sides.len() + usize::from(after != Epilogue::Nothing);
                let scaled = sides.len() + usize::from(matches!(after, Epilogue::Swiglu(_)));
                let of_sides = (1..=scaled).map(|i| (OperandSlot::Input(first + i), 0)).collect();
                let scales = Some(GemmRowScales { x: (OperandSlot::Input(first), 0), sides: of_sides });
                let (operands, result, x) = (DType::F8E4M3, DType::BF16, (OperandSlot::Input(0), 0));
                holds(&device, &GemmProblem { rows, depth, operands, result, x, sides, after, scales });
            }
        }
    }

    fn holds(device: &CudaDevice, of: &GemmProblem) {
        let GemmProblem { rows, depth, operands, result, after, .. } = *of;
        // Sums of about 1, so that a gate is neither open nor shut.
        let draw = |salt, shape: [usize; 2], scale: f64| {
            let drawn = Rng::new(salt).normal(operands, &shape);
            Tensor::float(operands, &shape, drawn.floats().iter().map(|v| rounded(operands, v * scale)).collect())
        };
        let scale = 1.0 / (depth as f64).sqrt();
        let mut inputs = vec![draw(1, [rows, depth], 1.0)];
        inputs.extend(of.sides.iter().zip(2..).map(|(side, salt)| draw(salt, [side.columns, depth], scale)));
        match after {
            Epilogue::Nothing => {}
            Epilogue::Add(_) => {
                let drawn = Rng::new(9).normal(result, &[rows, of.sides[0].columns]);
                let small = drawn.floats().iter().map(|v| rounded(result, v * scale)).collect();
                inputs.push(Tensor::float(result, &[rows, of.sides[0].columns], small));
            }
            Epilogue::Swiglu(_) => inputs.push(draw(9, [of.sides[0].columns, depth], scale)),
        }
        // Scales of rows are from 1/2 to 3/2; without, they are 1.
        let first = inputs.len();
        let factor = |of: usize, row: usize| 0.5 + ((row * 7 + of * 3) % 16) as f64 / 16.0;
        let lines: Vec<usize> = match (&of.scales, after) {
            (None, _) => Vec::new(),
            (_, Epilogue::Swiglu(_)) => vec![rows, of.sides[0].columns, of.sides[0].columns],
            _ => [rows].into_iter().chain(of.sides.iter().map(|side| side.columns)).collect(),
        };
        for (i, lines) in lines.iter().enumerate() {
            inputs.push(Tensor::float(DType::F32, &[*lines], (0..*lines).map(|row| factor(i, row)).collect()));
        }
        assert!(of.scales.as_ref().is_none_or(|scales| scales.x == (OperandSlot::Input(first), 0)), "{of:?}");
        let factor = |i: usize, row: usize| if of.scales.is_some() { factor(i, row) } else { 1.0 };
        let room = |bytes| device.allocate(bytes, ridge_runtime::MemoryOwner::States).expect("fits");
        let upload = |tensor: &Tensor| {
            let bytes = tensor.to_bytes();
            let memory = room(bytes.len());
            device.upload(&memory, 0, &bytes).expect("copies");
            memory
        };
        let held: Vec<DeviceMemory> = inputs.iter().map(upload).collect();
        let outputs: Vec<DeviceMemory> =
            of.sides.iter().map(|side| room(rows * side.columns * result.size_bytes())).collect();
        let address = |slot| match slot {
            OperandSlot::Input(i) => held[i].address(),
            OperandSlot::Output(i) => outputs[i].address(),
            OperandSlot::Scratch | OperandSlot::Zeros => 0,
        };
        let sum = |u: &[f64], v: &[f64]| u.iter().zip(v).map(|(u, v)| u * v).sum::<f64>();
        let line = |of: usize, nth: usize| &inputs[of].floats()[nth * depth..][..depth];
        for tiling in of.tilings().filter(|tiling| of.takes(*tiling)) {
            for y in &outputs {
                device.queue().expect("enters").fill(y, 0xff, y.bytes()).expect("fills");
            }
            device.run(&[of.launch(tiling)], &address).expect("runs");
            for (i, (side, y)) in of.sides.iter().zip(&outputs).enumerate() {
                let columns = side.columns;
                let got = Tensor::from_bytes(result, &[rows, columns], &device.download(y).expect("copies"));
                let got = got.floats();
                assert!(got.iter().all(|v| v.is_finite()), "{of:?}, {tiling:?}: not all is written");
                for at in (0..rows * columns).step_by(rows * columns / 997 + 1).chain([rows * columns - 1]) {
                    let (row, column) = (at / columns, at % columns);
                    let product = sum(line(0, row), line(1 + i, column)) * factor(0, row) * factor(1 + i, column);
                    let wanted = match after {
                        Epilogue::Nothing => product,
                        Epilogue::Add(_) => inputs[2].floats()[at] + rounded(result, product),
                        Epilogue::Swiglu(_) => {
                            let up = sum(line(0, row), line(2, column)) * factor(0, row) * factor(2, column);
                            let up = rounded(result, up);
                            let gate = rounded(result, product);
                            gate / (1.0 + (-gate).exp()) * up
                        }
                    };
                    // Rounded once, and before that perhaps to the neighbour of what f64 gives.
                    let unit = if result == DType::BF16 { 2f64.powi(-7) } else { 2f64.powi(-10) };
                    // Products are summed in f32, those of one instruction with their low bits cut off.
                    let summed = 2f64.powi(-20) * (depth as f64).sqrt();
                    let allowed = if result == DType::F32 { summed } else { unit * (1.0 + wanted.abs()) };
                    let error = (got[at] - wanted).abs();
                    assert!(error <= allowed, "{of:?}, {tiling:?} at [{row}, {column}]: {} is not {wanted}", got[at]);
                }
            }
        }
    }
}
