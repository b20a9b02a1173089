//! A device as a roof: work, its floor, and the time that may be expected.

use ridge_hw::roofline::Bound;
use ridge_hw::spec::{DeviceSpec, Precision};
use ridge_hw::units::{Bytes, Flops, FlopsPerByte, Seconds};
use serde::Serialize;

use crate::PlanError;
use crate::efficiency::Machine;
use crate::kernel::occupancy::f32_lanes;
use crate::reading::Class;

/// A device in the precision of its matrix products.
#[derive(Clone, Debug)]
pub struct Roof {
    /// Its sheet.
    pub device: &'static DeviceSpec,
    /// The precision.
    pub precision: Precision,
    /// What it reaches.
    pub machine: Machine,
}

/// What is computed and moved, by one op or many.
#[derive(Clone, Debug, PartialEq)]
pub struct RooflineWork {
    /// What or where it is.
    pub scope: String,
    /// The op, or empty for a sum.
    pub op: String,
    /// What limits its kind.
    pub class: Class,
    /// How often.
    pub calls: usize,
    /// FLOPs of matrix products, of all calls.
    pub matrix: f64,
    /// FLOPs of the others.
    pub vector: f64,
    /// Bytes read and written if each input is read once and each output written once.
    pub bytes: f64,
    /// The rate of its matrix products, FLOP/s.
    pub peak: f64,
    /// Seconds that may be expected.
    pub expected: f64,
}

/// RooflineWork under a roof.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RooflineRow {
    /// What or where it is.
    pub scope: String,
    /// The op, or empty for a sum.
    pub op: String,
    /// What limits its kind; none for a sum of several.
    pub class: Option<Class>,
    /// How often.
    pub calls: usize,
    /// FLOPs of all calls.
    pub flops: Flops,
    /// Bytes of all calls.
    pub bytes: Bytes,
    /// FLOPs over bytes.
    pub intensity: FlopsPerByte,
    /// What sets the floor; of a sum, what sets most of it.
    pub bound: Bound,
    /// The least time: of a sum, that of its parts one after another.
    pub floor: Seconds,
    /// The time that may be expected.
    pub expected: Seconds,
    /// The floor over that: the share of the roof that is reached.
    pub share: f64,
}

impl Roof {
    /// The device called `name` with products in `precision`.
    ///
    /// # Errors
    /// [`PlanError::Hardware`] with the nearest device, or the precisions that it has.
    pub fn find(name: &str, precision: Precision) -> Result<Self, PlanError> {
        let machine = Machine::find(name, precision)?;
        Ok(Self { device: DeviceSpec::find(name)?, precision, machine })
    }

    /// Intensity from which products are bound by arithmetic.
    pub fn ridge_point(&self) -> FlopsPerByte {
        FlopsPerByte(self.machine.peak / self.device.memory_bandwidth.value.as_f64())
    }

    /// Bytes per second of all shared memories together: 32 banks of 4 bytes a clock, the clock being that of the sheet's
    /// f32 rate.
    pub fn shared_bandwidth(&self) -> Option<f64> {
        let lanes = f32_lanes(self.device.compute_capability.as_deref()?)?;
        Some(self.device.vector_f32.as_ref()?.value.as_f64() / (2 * lanes) as f64 * 128.0)
    }

    /// `[m, k] x [k, n]` of the roof's precision, its result in 16 bits.
    pub fn matmul(&self, m: usize, n: usize, k: usize) -> RooflineWork {
        let element = bytes_of(self.precision);
        let [m, n, k] = [m, n, k].map(|d| d as f64);
        RooflineWork {
            scope: format!("{m} x {n} x {k}"),
            op: "matmul".into(),
            class: Class::Matmul,
            calls: 1,
            matrix: 2.0 * m * n * k,
            vector: 0.0,
            bytes: element * (m * k + k * n) + 2.0 * m * n,
            peak: self.machine.peak,
            expected: self.machine.matmul(Class::Matmul, m, n, k, element * n * k),
        }
    }

    /// Attention of `heads` heads of `width` over `tokens` tokens, in 16 bits: its three steps where scores are written
    /// to memory, and fused, where they never leave the chip (Dao et al. 2022, "FlashAttention", sections 2.2 and 3.1).
    pub fn attention(&self, heads: usize, tokens: usize, width: usize, causal: bool) -> [RooflineWork; 4] {
        let (h, t, d) = (heads as f64, tokens as f64, width as f64);
        // Without fusing, pairs above the diagonal are computed and masked.
        let pairs = h * t * t;
        let seen = if causal { h * 0.5 * t * (t + 1.0) } else { pairs };
        let rows = 2.0 * h * t * d;
        let m = &self.machine;
        let work = |op: &str, matrix: f64, vector: f64, bytes: f64, share: f64| RooflineWork {
            scope: "attention".into(),
            op: op.into(),
            class: if matrix > 0.0 { Class::Attention } else { Class::Memory },
            calls: 1,
            matrix,
            vector,
            bytes,
            peak: m.peak_16,
            expected: (matrix / (m.peak_16 * share)).max(m.moving(bytes)),
        };
        [
            work("scores", 2.0 * pairs * d, 0.0, 2.0 * (rows + pairs), m.efficiency.scores),
            // A maximum, a difference, an exponential, a sum and a quotient.
            work("softmax", 0.0, 5.0 * pairs, 4.0 * pairs, 1.0),
            work("values", 2.0 * pairs * d, 0.0, 2.0 * (rows + pairs), m.efficiency.scores),
            work("fused", 4.0 * seen * d, 5.0 * seen, 4.0 * rows, m.efficiency.attention),
        ]
    }

    /// Where `work` stands.
    pub fn under(&self, work: &RooflineWork) -> RooflineRow {
        let (arithmetic, memory) = self.floors(work);
        let flops = work.matrix + work.vector;
        let floor = arithmetic.max(memory);
        // Nothing is expected to beat its floor.
        let expected = work.expected.max(floor);
        RooflineRow {
            scope: work.scope.clone(),
            op: work.op.clone(),
            class: Some(work.class),
            calls: work.calls,
            flops: Flops(flops),
            bytes: Bytes(work.bytes as u64),
            intensity: FlopsPerByte(ratio(flops, work.bytes)),
            bound: if memory > arithmetic { Bound::Memory } else { Bound::Compute },
            floor: Seconds(floor),
            expected: Seconds(expected),
            share: ratio(floor, expected),
        }
    }

    /// Seconds of arithmetic alone and of memory alone.
    fn floors(&self, work: &RooflineWork) -> (f64, f64) {
        let vector = self.device.vector_f32.as_ref().map_or(0.0, |rate| work.vector / rate.value.as_f64());
        (vector.max(work.matrix / work.peak), work.bytes / self.device.memory_bandwidth.value.as_f64())
    }

    /// `rows` as one, called `scope`.
    pub fn sum(scope: impl Into<String>, rows: &[&RooflineRow]) -> RooflineRow {
        let total = |of: fn(&RooflineRow) -> f64| rows.iter().map(|r| of(r)).sum::<f64>();
        let (flops, bytes) = (total(|r| r.flops.0), total(|r| r.bytes.as_f64()));
        let (floor, expected) = (total(|r| r.floor.0), total(|r| r.expected.0));
        let memory = rows.iter().filter(|r| r.bound == Bound::Memory).map(|r| r.floor.0).sum::<f64>();
        RooflineRow {
            scope: scope.into(),
            op: String::new(),
            class: None,
            calls: rows.iter().map(|r| r.calls).max().unwrap_or(0),
            flops: Flops(flops),
            bytes: Bytes(bytes as u64),
            intensity: FlopsPerByte(ratio(flops, bytes)),
            bound: if 2.0 * memory > floor { Bound::Memory } else { Bound::Compute },
            floor: Seconds(floor),
            expected: Seconds(expected),
            share: ratio(floor, expected),
        }
    }
}

/// A tile of fused attention: so many queries of a head against so many keys at a time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AttentionTile {
    /// Shared memory for the queries, and the keys and values of one turn.
    pub shared: Bytes,
    /// Registers of a block for the scores and the output, in f32.
    pub registers: Bytes,
    /// What all blocks read of keys and values, mostly from the second-level cache.
    pub reads: Bytes,
    /// What the whole matrix of scores would take in 16 bits.
    pub scores: Bytes,
}

impl AttentionTile {
    /// Tiles of `[queries, keys]` for `heads` heads of `width` over `tokens` tokens, in 16 bits. With `causal` the queries
    /// of a block read no keys behind the last of them.
    pub fn new(heads: usize, tokens: usize, width: usize, [queries, keys]: [usize; 2], causal: bool) -> Self {
        let [h, t, d, q, k] = [heads, tokens, width, queries, keys].map(|n| n as u64);
        let blocks = t.div_ceil(q);
        // Keys that the blocks of a head read: all by each, or q by the first, 2 q by the second, all by the last.
        let seen = match causal {
            true => (q * (blocks - 1)).saturating_mul(blocks) / 2 + t,
            false => t.saturating_mul(blocks),
        };
        Self {
            shared: Bytes(2 * d) * (q + 2 * k),
            registers: Bytes(4 * q) * (k + d),
            reads: Bytes(4 * d) * seen * h,
            scores: Bytes(2 * h) * t * t,
        }
    }
}

/// Bytes of an element that matrix units take.
fn bytes_of(precision: Precision) -> f64 {
    match precision {
        Precision::Fp8 | Precision::Int8 => 1.0,
        _ => 2.0,
    }
}

fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 0.0 }
}
