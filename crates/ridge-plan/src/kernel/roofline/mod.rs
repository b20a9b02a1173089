//! FLOPs, bytes and the least time of a matrix product, of attention, or of every op and scope of a model's step, on any
//! device sheet; beside it the time that its efficiency lets expect, and the picture.
//!
//! Source of the model: Williams et al. 2009 (see [`ridge_hw::roofline`]). Work that several units do is bounded by each.

mod draw;
mod model;

pub use model::Step;

use ridge_hw::roofline::Bound;
use ridge_hw::spec::{DeviceSpec, Precision};
use ridge_hw::units::{Bytes, Flops, FlopsPerByte, Seconds};
use serde::Serialize;

use super::occupancy::f32_lanes;
use crate::PlanError;
use crate::efficiency::Machine;
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
pub struct Work {
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

/// Work under a roof.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
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
    pub fn matmul(&self, m: usize, n: usize, k: usize) -> Work {
        let element = bytes_of(self.precision);
        let [m, n, k] = [m, n, k].map(|d| d as f64);
        Work {
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
    pub fn attention(&self, heads: usize, tokens: usize, width: usize, causal: bool) -> [Work; 4] {
        let (h, t, d) = (heads as f64, tokens as f64, width as f64);
        // Without fusing, pairs above the diagonal are computed and masked.
        let pairs = h * t * t;
        let seen = if causal { h * 0.5 * t * (t + 1.0) } else { pairs };
        let rows = 2.0 * h * t * d;
        let m = &self.machine;
        let work = |op: &str, matrix: f64, vector: f64, bytes: f64, share: f64| Work {
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
    pub fn under(&self, work: &Work) -> Row {
        let (arithmetic, memory) = self.floors(work);
        let flops = work.matrix + work.vector;
        let floor = arithmetic.max(memory);
        // Nothing is expected to beat its floor.
        let expected = work.expected.max(floor);
        Row {
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
    fn floors(&self, work: &Work) -> (f64, f64) {
        let vector = self.device.vector_f32.as_ref().map_or(0.0, |rate| work.vector / rate.value.as_f64());
        (vector.max(work.matrix / work.peak), work.bytes / self.device.memory_bandwidth.value.as_f64())
    }

    /// `rows` as one, called `scope`.
    pub fn sum(scope: impl Into<String>, rows: &[&Row]) -> Row {
        let total = |of: fn(&Row) -> f64| rows.iter().map(|r| of(r)).sum::<f64>();
        let (flops, bytes) = (total(|r| r.flops.0), total(|r| r.bytes.as_f64()));
        let (floor, expected) = (total(|r| r.floor.0), total(|r| r.expected.0));
        let memory = rows.iter().filter(|r| r.bound == Bound::Memory).map(|r| r.floor.0).sum::<f64>();
        Row {
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
pub struct Tile {
    /// Shared memory for the queries, and the keys and values of one turn.
    pub shared: Bytes,
    /// Registers of a block for the scores and the output, in f32.
    pub registers: Bytes,
    /// What all blocks read of keys and values, mostly from the second-level cache.
    pub reads: Bytes,
    /// What the whole matrix of scores would take in 16 bits.
    pub scores: Bytes,
}

impl Tile {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Quantisation;
    use crate::plot::Style;
    use crate::reading::Reading;

    fn near(a: f64, b: f64) -> bool {
        (a / b - 1.0).abs() < 1e-9
    }

    #[test]
    fn a_square_product_has_a_third_of_its_edge_as_intensity() {
        // 2 n^3 / (3 n^2 x 2 B)
        let roof = Roof::find("A100", Precision::Bf16).unwrap();
        let row = roof.under(&roof.matmul(4096, 4096, 4096));
        assert!(near(row.intensity.0, 4096.0 / 3.0) && row.bound == Bound::Compute);
        assert!(near(row.floor.0, 2.0 * 4096f64.powi(3) / 312e12));
        assert!(near(roof.ridge_point().0, 312e12 / 2.039e12));
        // A product of one row reads its weight for two FLOPs an element.
        let row = roof.under(&roof.matmul(1, 4096, 4096));
        assert!(row.bound == Bound::Memory && row.intensity.0 < 1.0);
        assert!(row.share > 0.5 && row.share <= 1.0);
    }

    #[test]
    fn shared_memory_moves_128_bytes_a_clock_and_multiprocessor() {
        // 108 multiprocessors at 1.41 GHz.
        let a100 = Roof::find("A100", Precision::Bf16).unwrap().shared_bandwidth().unwrap();
        assert!((a100 / (108.0 * 128.0 * 1.41e9) - 1.0).abs() < 0.01, "{a100}");
        assert!(Roof::find("MI300X", Precision::Bf16).unwrap().shared_bandwidth().is_none());
    }

    #[test]
    fn fused_attention_computes_half_and_moves_a_hundredth() {
        let roof = Roof::find("H100", Precision::Bf16).unwrap();
        let rows = roof.attention(64, 8192, 128, true).map(|w| roof.under(&w));
        let steps = Roof::sum("attention", &[&rows[0], &rows[1], &rows[2]]);
        assert!(steps.bytes.as_f64() / rows[3].bytes.as_f64() > 60.0);
        assert_eq!((steps.bound, rows[3].bound), (Bound::Memory, Bound::Compute));
        assert!((rows[3].flops.0 / steps.flops.0 - 0.5).abs() < 0.01);
        let tile = Tile::new(64, 8192, 128, [128, 64], false);
        assert_eq!((tile.shared, tile.scores), (Bytes::from_kib(64), Bytes::from_gib(8)));
        // 64 blocks of 128 queries: all 64 x 64 tiles of keys, or the 64 x 65 / 2 up to the diagonal.
        let causal = Tile::new(64, 8192, 128, [128, 64], true);
        assert_eq!(causal.reads.0 * 2 * 64, tile.reads.0 * 65);
    }

    #[test]
    fn ops_of_a_model_add_up_to_its_weights_and_two_flops_a_parameter() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/configs/Meta-Llama-3.1-8B.json");
        let reading = Reading::from_json("config.json", &std::fs::read_to_string(file).unwrap()).unwrap();
        let roof = Roof::find("H200", Precision::Bf16).unwrap();
        let weights = Quantisation::Bf16;
        let step = |batch, new, context| Step { tp: 1, batch, new, context, weights, cache_bytes: 2.0 };
        let total = |step| {
            let kinds = roof.model(&reading, &step);
            Roof::sum("step", &kinds.iter().flat_map(|k| &k.1).collect::<Vec<_>>())
        };
        // One token reads every weight but the embedding, and its cache: 2 x 32 layers x 8 heads x 128 x 2 B a token.
        let one = total(step(1, 1, 1));
        let weights = 2.0 * (reading.parameters as f64 - reading.embedding);
        assert!((one.bytes.as_f64() / weights - 1.0).abs() < 0.002, "{} {weights}", one.bytes);
        let long = total(step(1, 1, 8192));
        assert!(near(long.bytes.as_f64() - one.bytes.as_f64(), 8191.0 * 131_072.0));
        assert!((one.flops.0 / (2.0 * reading.active()) - 1.0).abs() < 0.01);
        assert_eq!((one.bound, total(step(1, 4096, 4096)).bound), (Bound::Memory, Bound::Compute));
        // Eight ranks have an eighth each of the weights, all but the norms, and of the cache.
        let eighth = total(Step { tp: 8, ..step(1, 1, 8192) });
        assert!((eighth.bytes.as_f64() * 8.0 / long.bytes.as_f64() - 1.0).abs() < 0.005, "{}", eighth.bytes);
        assert!((eighth.flops.0 * 8.0 / long.flops.0 - 1.0).abs() < 0.005, "{}", eighth.flops);
    }

    #[test]
    fn points_stand_below_their_ceilings() {
        let roof = Roof::find("L4", Precision::Fp8).unwrap();
        let rows = [roof.under(&roof.matmul(4096, 4096, 4096)), roof.under(&roof.matmul(16, 4096, 4096))];
        let chart = roof.chart("products", &rows.iter().collect::<Vec<_>>());
        let peak = roof.machine.peak;
        for point in chart.series.iter().filter(|s| s.style == Style::Points).flat_map(|s| &s.points) {
            assert!(point.y <= peak.min(point.x * roof.device.memory_bandwidth.value.0) * (1.0 + 1e-9), "{point:?}");
        }
        assert!(chart.series.iter().filter(|s| s.style == Style::Ceiling).count() >= 4);
    }
}
