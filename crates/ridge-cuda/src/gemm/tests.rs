//! Every tiling against sums in f64.

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
        deterministic: false,
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
    assert!(with(&|p| (p.rows, p.deterministic) = (1, true)), "the number of rows chooses no other sums");
    assert!(!with(&|p| p.sides[0].columns = 516) && !with(&|p| p.depth = 516), "unaligned");
    assert!(!with(&|p| (p.operands, p.result) = (DType::F32, DType::F32)));
    let add = Epilogue::Add((OperandSlot::Input(2), 0));
    assert!(!with(&|p| (p.result, p.after) = (DType::F32, add)));
    assert!(
        TILINGS
            .iter()
            .chain(&CODE_TILINGS)
            .chain(&BLOCK_TILINGS)
            .chain(&NARROW_TILINGS)
            .all(|t| t.shared(t.rows()) <= 227 << 10),
        "a ring is larger than shared memory"
    );
    for (columns, held) in FEW_COLUMNS.into_iter().flat_map(|columns| [8, 16, 32].map(|held| (columns, held))) {
        assert!(Tiling::of_few(columns, held).shared(held) <= 112 << 10, "two blocks do not fit a multiprocessor");
    }
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
    let after =
        [Epilogue::Nothing, Epilogue::Add((OperandSlot::Input(2), 0)), Epilogue::Swiglu((OperandSlot::Input(2), 0))];
    for (rows, columns, depth) in
        [(300, 1000, 776), (17, 8, 8200), (129, 4096, 136), (1500, 1288, 264), (1, 4104, 776), (12, 1000, 1032)]
    {
        for (operands, result) in [(DType::BF16, DType::BF16), (DType::F16, DType::F16), (DType::BF16, DType::F32)] {
            for after in after.into_iter().filter(|a| result != DType::F32 || *a == Epilogue::Nothing) {
                let (x, sides) = ((OperandSlot::Input(0), 0), vec![side(columns, 0)]);
                let of =
                    GemmProblem { rows, depth, operands, result, x, sides, after, scales: None, deterministic: false };
                holds(&device, &of);
                holds(&device, &GemmProblem { deterministic: true, ..of });
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
    for rows in [1, 9, 17, 40, 130] {
        for sides in [vec![side(1000, 0), side(136, 1)], vec![side(264, 0), side(8, 1), side(520, 2)]] {
            let (operands, result) = (DType::BF16, DType::BF16);
            let (x, after) = ((OperandSlot::Input(0), 0), Epilogue::Nothing);
            let of =
                GemmProblem { rows, depth: 776, operands, result, x, sides, after, scales: None, deterministic: false };
            holds(&device, &of);
            holds(&device, &GemmProblem { deterministic: true, ..of });
        }
    }
}

/// Codes are multiplied with the scales of their rows or blocks, by every tiling that codes have.
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
            for (operands, in_blocks) in [(DType::F8E4M3, false), (DType::F8E4M3, true), (DType::I8, false)] {
                for biased in [false, true] {
                    if biased && after != Epilogue::Nothing {
                        continue;
                    }
                    // Scales lie behind the operands, and biases behind them.
                    let first = 1 + sides.len() + usize::from(after != Epilogue::Nothing);
                    let scaled = sides.len() + usize::from(matches!(after, Epilogue::Swiglu(_)));
                    let at = |i: usize| (OperandSlot::Input(first + i), 0);
                    let biases = biased.then(|| ((0..sides.len()).map(|i| at(1 + scaled + i)).collect(), DType::BF16));
                    let of_sides = (1..=scaled).map(at).collect();
                    let scales = Some(GemmCodeScales { in_blocks, x: at(0), sides: of_sides, biases });
                    let (result, x) = (DType::BF16, (OperandSlot::Input(0), 0));
                    let sides = sides.clone();
                    let deterministic = false;
                    holds(
                        &device,
                        &GemmProblem { rows, depth, operands, result, x, sides, after, scales, deterministic },
                    );
                }
            }
        }
    }
}

/// The scale of element `k` of a row of operand `of`, from 1/2 to 3/2: the same for all of a row, or for a block of it.
fn factor(in_blocks: bool, of: usize, row: usize, k: usize) -> f64 {
    let (row, k) = match (in_blocks, of) {
        (false, _) => (row, 0),
        (true, 0) => (row, k / BLOCK),
        (true, _) => (row / BLOCK, k / BLOCK),
    };
    0.5 + ((row * 7 + of * 3 + k * 5) % 16) as f64 / 16.0
}

fn holds(device: &CudaDevice, of: &GemmProblem) {
    let GemmProblem { rows, depth, operands, result, after, .. } = *of;
    // Sums of about 1, so that a gate is neither open nor shut.
    let draw = |salt, shape: [usize; 2], scale: f64| {
        if operands == DType::I8 {
            return Rng::new(salt).integers(operands, &shape, -127, 128);
        }
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
    // Without scales they are 1. Those of integers bring sums to about 1.
    let first = inputs.len();
    let in_blocks = of.scales.as_ref().is_some_and(|scales| scales.in_blocks);
    let whole = if operands == DType::I8 { 2f64.powf(-(5329.0 / scale).log2().round()) } else { 1.0 };
    let factor = |of_operand: usize, row: usize, k: usize| match (&of.scales, of_operand) {
        (None, _) => 1.0,
        (_, 0) => factor(in_blocks, 0, row, k),
        _ => whole * factor(in_blocks, of_operand, row, k),
    };
    let lines: Vec<usize> = match (&of.scales, after) {
        (None, _) => Vec::new(),
        (_, Epilogue::Swiglu(_)) => vec![rows, of.sides[0].columns, of.sides[0].columns],
        _ => [rows].into_iter().chain(of.sides.iter().map(|side| side.columns)).collect(),
    };
    for (i, lines) in lines.iter().enumerate() {
        let (high, wide) = if in_blocks { (if i == 0 { 1 } else { BLOCK }, BLOCK) } else { (1, depth) };
        let places = (0..*lines).step_by(high).flat_map(|row| (0..depth).step_by(wide).map(move |k| (row, k)));
        let scales: Vec<f64> = places.map(|(row, k)| factor(i, row, k)).collect();
        inputs.push(Tensor::float(DType::F32, &[scales.len()], scales));
    }
    assert!(of.scales.as_ref().is_none_or(|scales| scales.x == (OperandSlot::Input(first), 0)), "{of:?}");
    let biases = inputs.len();
    let biased = of.scales.as_ref().is_some_and(|scales| scales.biases.is_some());
    for (i, side) in of.sides.iter().enumerate().filter(|_| biased) {
        let drawn = Rng::new(20 + i as u64).normal(DType::BF16, &[side.columns]);
        inputs.push(Tensor::from_bytes(DType::BF16, &[side.columns], &drawn.to_bytes()));
    }
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
    let element = |of: usize, at: usize| match operands {
        DType::I8 => inputs[of].ints()[at] as f64,
        _ => inputs[of].floats()[at],
    };
    // The product of a row of x by one of operand `of`.
    let sum = |of: usize, row: usize, column: usize| -> f64 {
        let term = |k: usize| {
            let (x, w) = (element(0, row * depth + k), element(of, column * depth + k));
            x * w * factor(0, row, k) * factor(of, column, k)
        };
        (0..depth).map(term).sum()
    };
    let mut bits: Option<Vec<Vec<u8>>> = None;
    for tiling in of.tilings().filter(|tiling| of.takes(*tiling)) {
        for y in &outputs {
            device.queue().expect("enters").fill(y, 0xff, y.bytes()).expect("fills");
        }
        device.run(&[of.launch(tiling)], &address).expect("runs");
        if of.deterministic {
            let these = outputs.iter().map(|y| device.download(y).expect("copies")).collect();
            assert!(bits.as_ref().is_none_or(|bits| *bits == these), "{of:?}, {tiling:?}: other bits");
            bits = Some(these);
        }
        for (i, (side, y)) in of.sides.iter().zip(&outputs).enumerate() {
            let columns = side.columns;
            let got = Tensor::from_bytes(result, &[rows, columns], &device.download(y).expect("copies"));
            let got = got.floats();
            assert!(got.iter().all(|v| v.is_finite()), "{of:?}, {tiling:?}: not all is written");
            for at in (0..rows * columns).step_by(rows * columns / 997 + 1).chain([rows * columns - 1]) {
                let (row, column) = (at / columns, at % columns);
                let bias = if biased { inputs[biases + i].floats()[column] } else { 0.0 };
                let product = sum(1 + i, row, column) + bias;
                let wanted = match after {
                    Epilogue::Nothing => product,
                    Epilogue::Add(_) => inputs[2].floats()[at] + rounded(result, product),
                    Epilogue::Swiglu(_) => {
                        let up = rounded(result, sum(2, row, column));
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
