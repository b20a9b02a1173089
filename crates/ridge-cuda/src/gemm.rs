//! Products of many rows on Hopper's tensor cores by `kernels/gemm_sm90.cu`, and the choice between its tilings and
//! cuBLASLt: the fastest on this machine, measured once for each shape (of rows up to the next multiple of 64) and kept
//! in the choice file.

use ridge_graph::DType;

use crate::kernel::{
    CudaKernel, CudaSource, DeviceAction, KernelCandidate, KernelText, LaunchArg, OperandSlot, SlotOffset, name,
    numbers,
};

pub(crate) const TEXT: KernelText<'_> = KernelText::new(SOURCE).with_hopper().early_launch().persistent();
/// The text of the kernel alone.
pub(crate) const SOURCE: &str = include_str!("../kernels/gemm_sm90.cu");
const ENTRY: &str = "gemm_sm90";
/// The architecture that it is made for.
pub(crate) const ARCH: &str = "sm_90a";

/// Elements of a slice of both operands: 128 bytes, as the swizzle has it.
const DEPTH: usize = 64;

/// How a block works: so many warpgroups on tiles of so many columns, over a ring of so many slices.
#[derive(Clone, Copy, Debug)]
struct Tiling {
    consumers: usize,
    columns: usize,
    stages: usize,
    /// Does each warpgroup make tiles of its own, one multiplying while the other stores?
    alternate: bool,
}

/// Large tiles for many rows, small ones for few.
const TILINGS: [Tiling; 4] = [
    Tiling { consumers: 2, columns: 128, stages: 6, alternate: true },
    Tiling { consumers: 2, columns: 256, stages: 4, alternate: false },
    Tiling { consumers: 1, columns: 128, stages: 8, alternate: false },
    Tiling { consumers: 1, columns: 64, stages: 8, alternate: false },
];

impl Tiling {
    fn rows(self) -> usize {
        if self.alternate { 128 } else { 64 * self.consumers }
    }

    /// Its name in the choice file.
    fn name(self) -> String {
        let Self { consumers, columns, stages, alternate } = self;
        let how = if alternate { "alternating" } else { "together" };
        format!("{ENTRY}, {consumers} consumers {how}, {columns} columns, {stages} stages")
    }

    /// Bytes of the ring, with room to align it.
    fn shared(self) -> usize {
        self.stages * (self.rows() + self.columns) * DEPTH * 2 + 1024
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

/// `y[rows, columns] = x[rows, depth] w[columns, depth]^T` with what follows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemmProblem {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) depth: usize,
    /// Of x and w.
    pub(crate) operands: DType,
    pub(crate) result: DType,
    pub(crate) x: SlotOffset,
    pub(crate) w: SlotOffset,
    pub(crate) y: SlotOffset,
    pub(crate) after: Epilogue,
}

impl GemmProblem {
    /// Does the kernel take it, and is it worth a choice?
    fn fits(&self) -> bool {
        // Below this a launch takes longer than the sums.
        const LEAST: usize = 1 << 22;
        let Self { rows, columns, depth, operands, result, after, .. } = *self;
        let all = [rows, columns, depth].into_iter().try_fold(1usize, usize::checked_mul);
        matches!(operands, DType::BF16 | DType::F16)
            && (result == operands || (result == DType::F32 && after == Epilogue::Nothing))
            && columns.is_multiple_of(8)
            && depth.is_multiple_of(8)
            && [rows, columns, depth].into_iter().all(|extent| extent < 1 << 31)
            && all.is_some_and(|all| all >= LEAST)
    }

    /// One launch in this tiling.
    fn launch(&self, tiling: Tiling) -> DeviceAction {
        let Self { rows, columns, depth, operands, x, w, y, after, .. } = *self;
        let flag = |on: bool| if on { "1" } else { "0" };
        let gated = matches!(after, Epilogue::Swiglu(_));
        let [consumers, across, stages] = [tiling.consumers, tiling.columns, tiling.stages].map(|n| n.to_string());
        let defines = [
            ("D", name(operands)),
            ("OUT_WIDE", flag(self.result == DType::F32)),
            ("CONSUMERS", &*consumers),
            ("COLUMNS", &*across),
            ("STAGES", &*stages),
            ("ALTERNATE", flag(tiling.alternate)),
            ("ADD", flag(matches!(after, Epilogue::Add(_)))),
            ("SWIGLU", flag(gated)),
        ];
        let width = if gated { tiling.columns / 2 } else { tiling.columns };
        let map =
            |at, rows, tile| LaunchArg::Matrix { at, dtype: operands, extents: [rows, depth], tile: [tile, DEPTH] };
        let mut args = vec![map(x, rows, tiling.rows()), map(w, columns, width)];
        let mut r = y;
        match after {
            Epilogue::Nothing => {}
            Epilogue::Add(at) => r = at,
            Epilogue::Swiglu(up) => args.push(map(up, columns, width)),
        }
        args.extend([LaunchArg::Pointer(y.0, y.1), LaunchArg::Pointer(r.0, r.1), numbers(&[rows, columns, depth])]);
        DeviceAction::Launch {
            source: CudaSource::new(ENTRY, &defines, &TEXT),
            grid: [(rows.div_ceil(tiling.rows()) * columns.div_ceil(width)).min(i32::MAX as usize) as u32, 1, 1],
            threads: 128 * (tiling.consumers as u32 + 1),
            shared: tiling.shared() as u32,
            args,
            prefetched: Vec::new(),
        }
    }

    /// What a choice is kept under.
    fn key(&self) -> String {
        let Self { rows, columns, depth, operands, result, after, .. } = self;
        let after = match after {
            Epilogue::Nothing => "",
            Epilogue::Add(_) => ", added",
            Epilogue::Swiglu(_) => ", gated",
        };
        let last = rows.next_multiple_of(64);
        let first = last.saturating_sub(63).max(1);
        format!("product of {first} to {last} rows, {columns} columns, depth {depth}, {operands} in {result}{after}")
    }

    /// The operands, to be timed on.
    fn operands(&self, scratch: usize) -> Vec<(SlotOffset, DType, usize)> {
        let Self { rows, columns, depth, operands, result, .. } = *self;
        let mut all = vec![
            (self.x, operands, rows * depth),
            (self.w, operands, columns * depth),
            (self.y, result, rows * columns),
            ((OperandSlot::Scratch, 0), operands, scratch / operands.size_bytes()),
        ];
        match self.after {
            Epilogue::Nothing => {}
            Epilogue::Add(r) => all.push((r, result, rows * columns)),
            Epilogue::Swiglu(up) => all.push((up, operands, columns * depth)),
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
    candidates.extend(TILINGS.map(|tiling| KernelCandidate {
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
    use std::collections::HashMap;

    use ridge_graph::sample::Rng;
    use ridge_graph::{DType, Tensor};

    use super::*;
    use crate::device::{CudaDevice, DeviceMemory};

    #[test]
    fn only_what_the_kernel_takes_is_chosen_among() {
        let of = GemmProblem {
            rows: 64,
            columns: 512,
            depth: 512,
            operands: DType::BF16,
            result: DType::BF16,
            x: (OperandSlot::Input(0), 0),
            w: (OperandSlot::Input(1), 0),
            y: (OperandSlot::Output(0), 0),
            after: Epilogue::Nothing,
        };
        assert!(of.fits() && GemmProblem { result: DType::F32, ..of }.fits());
        assert!(!GemmProblem { rows: 8, ..of }.fits(), "too little");
        assert!(!GemmProblem { columns: 516, ..of }.fits() && !GemmProblem { depth: 516, ..of }.fits(), "unaligned");
        assert!(!GemmProblem { operands: DType::F32, result: DType::F32, ..of }.fits());
        assert!(!GemmProblem { result: DType::F32, after: Epilogue::Add((OperandSlot::Input(2), 0)), ..of }.fits());
        assert!(TILINGS.iter().all(|t| t.shared() <= 227 << 10), "a ring is larger than shared memory");
    }

    /// A Hopper GPU, or why there is none.
    fn hopper() -> Result<CudaDevice, String> {
        let device = CudaDevice::open(0, &HashMap::new()).map_err(|why| format!("no GPU: {why}"))?;
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
                    let (x, w, y) =
                        ((OperandSlot::Input(0), 0), (OperandSlot::Input(1), 0), (OperandSlot::Output(0), 0));
                    holds(&device, &GemmProblem { rows, columns, depth, operands, result, x, w, y, after });
                }
            }
        }
    }

    fn holds(device: &CudaDevice, of: &GemmProblem) {
        let GemmProblem { rows, columns, depth, operands, result, after, .. } = *of;
        let third = if matches!(after, Epilogue::Add(_)) { [rows, columns] } else { [columns, depth] };
        // Sums of about 1, so that a gate is neither open nor shut.
        let draw = |salt, shape: [usize; 2], scale: f64| {
            let drawn = Rng::new(salt).normal(operands, &shape);
            Tensor::float(operands, &shape, drawn.floats().iter().map(|v| rounded(operands, v * scale)).collect())
        };
        let scale = 1.0 / (depth as f64).sqrt();
        let inputs = [draw(1, [rows, depth], 1.0), draw(2, [columns, depth], scale), draw(3, third, scale)];
        let upload = |tensor: &Tensor| {
            let bytes = tensor.to_bytes();
            let memory = device.allocate(bytes.len(), ridge_runtime::MemoryOwner::States).expect("fits");
            device.upload(&memory, 0, &bytes).expect("copies");
            memory
        };
        let held: Vec<DeviceMemory> = inputs.iter().map(upload).collect();
        let y =
            device.allocate(rows * columns * result.size_bytes(), ridge_runtime::MemoryOwner::States).expect("fits");
        let address = |slot| match slot {
            OperandSlot::Input(i) => held[i].address(),
            _ => y.address(),
        };
        let [a, b, c] = [0, 1, 2].map(|i| inputs[i].floats());
        let sum = |u: &[f64], v: &[f64]| u.iter().zip(v).map(|(u, v)| u * v).sum::<f64>();
        for tiling in TILINGS {
            device.queue().expect("enters").fill(&y, 0xff, y.bytes()).expect("fills");
            device.run(&[of.launch(tiling)], &address).expect("runs");
            let got = Tensor::from_bytes(result, &[rows, columns], &device.download(&y).expect("copies"));
            let got = got.floats();
            assert!(got.iter().all(|v| v.is_finite()), "{of:?}, {tiling:?}: not all is written");
            for at in (0..rows * columns).step_by(rows * columns / 997 + 1).chain([rows * columns - 1]) {
                let (row, column) = (at / columns, at % columns);
                let x = &a[row * depth..][..depth];
                let product = sum(x, &b[column * depth..][..depth]);
                let wanted = match after {
                    Epilogue::Nothing => product,
                    Epilogue::Add(_) => c[at] + rounded(result, product),
                    Epilogue::Swiglu(_) => {
                        let (gate, up) =
                            (rounded(result, product), rounded(result, sum(x, &c[column * depth..][..depth])));
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
