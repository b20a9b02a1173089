//! FLOPs, bytes and the least time of a matrix product, of attention, or of every op and scope of a model's step, on any
//! device sheet; beside it the time that its efficiency lets expect, and the picture.
//!
//! Source of the model: Williams et al. 2009 (see [`ridge_hw::roofline`]). Work that several units do is bounded by each.

use ridge_hw::roofline::Bound;
use ridge_hw::spec::{DeviceSpec, Precision};
use ridge_hw::units::{Bytes, Flops, FlopsPerByte, Seconds};
use serde::Serialize;

use super::occupancy::f32_lanes;
use crate::PlanError;
use crate::efficiency::Machine;
use crate::ledger::Quantisation;
use crate::plot::{Axis, Chart, Mark, Point, Series, Style, Unit};
use crate::reading::{ACTIVATION, Class, LayerWork, OpWork, Reading};

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
    pub op: &'static str,
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
    pub op: &'static str,
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
            op: "matmul",
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
        let work = |op, matrix: f64, vector: f64, bytes: f64, share: f64| Work {
            scope: "attention".into(),
            op,
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
            op: work.op,
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
            op: "",
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

    /// `rows` below the ceilings of the sheet: memory and shared memory, every dense rate, arithmetic outside products.
    pub fn chart(&self, title: &str, rows: &[&Row]) -> Chart {
        let shown: Vec<&&Row> = rows.iter().filter(|r| r.flops.0 > 0.0).collect();
        let bandwidth = self.device.memory_bandwidth.value;
        let peak = self.device.dense_rates.values().map(|r| r.value.0).fold(0.0, f64::max);
        let intensities = || shown.iter().map(|r| r.intensity.0);
        let low = 10f64.powf(intensities().fold(1.0, f64::min).log10().floor());
        let high = 10f64.powf(intensities().fold(peak / bandwidth.0 * 2.0, f64::max).log10().ceil());
        let axes = (Axis::log("arithmetic intensity", Unit::FlopsPerByte), Axis::log("rate", Unit::FlopsPerSecond));
        let mut chart = Chart { height: 400.0, ..Chart::new(title, axes.0, axes.1) };
        let shared = self.shared_bandwidth().map(|rate| ("shared memory", ridge_hw::units::BytesPerSecond(rate)));
        for (name, rate) in [("memory", bandwidth)].into_iter().chain(shared) {
            let line = [(low, low * rate.0), (peak / rate.0, peak)];
            chart.series.push(Series::new(format!("{name}, {rate}"), Style::Ceiling, line));
        }
        let mut rates: Vec<(String, ridge_hw::units::FlopsPerSecond)> = Vec::new();
        for (precision, rate) in &self.device.dense_rates {
            match rates.iter_mut().find(|r| r.1 == rate.value) {
                Some((names, _)) => *names += &format!(", {precision}"),
                None => rates.push((precision.to_string(), rate.value)),
            }
        }
        rates.extend(self.device.vector_f32.as_ref().map(|rate| ("f32 outside products".to_owned(), rate.value)));
        for (name, rate) in rates {
            let line = [(rate.0 / bandwidth.0, rate.0), (high, rate.0)];
            chart.series.push(Series::new(format!("{name}, {rate}"), Style::Ceiling, line));
        }
        let classes = [
            (Some(Class::Matmul), "products"),
            (Some(Class::Experts), "products of experts"),
            (Some(Class::Attention), "attention"),
            (Some(Class::Memory), "others"),
            (None, "sums"),
        ];
        // Colours begin with the classes, whatever the number of ceilings.
        let mut series: Vec<Series> = Vec::new();
        for (class, name) in classes {
            let of = shown.iter().copied().filter(|r| r.class == class);
            let point = |r: &&Row| Point {
                x: r.intensity.0,
                y: r.flops.0 / r.expected.0,
                label: if r.op.is_empty() || r.scope.ends_with(r.op) || r.class == Some(Class::Matmul) {
                    r.scope.clone()
                } else {
                    format!("{} {}", r.scope, r.op)
                },
            };
            let points: Vec<Point> = of.map(point).collect();
            if !points.is_empty() {
                series.push(Series { name: format!("{name}, as expected"), points, style: Style::Points });
            }
        }
        series.append(&mut chart.series);
        chart.series = series;
        chart.marks.push(Mark { name: format!("ridge point {}", self.ridge_point()), x: self.ridge_point().0 });
        chart
    }

    /// Every op on one rank of a step of `reading` in which each of `batch` sequences adds `new` tokens and then has `context`: one
    /// list a kind of layer, and the logits.
    pub fn model(&self, reading: &Reading, step: &Step) -> Vec<(String, Vec<Row>)> {
        let mut found = Vec::new();
        for (kind, layer) in reading.kinds.iter().enumerate() {
            let at: Vec<usize> = (0..reading.layers.len()).filter(|i| reading.layers[*i] == kind).collect();
            let rows = self.layer(layer, at.len(), step);
            found.push((format!("{} layers, such as {}", at.len(), at.first().unwrap_or(&0)), rows));
        }
        let (rows, h) = (step.batch as f64, reading.hidden as f64);
        let v = reading.vocab as f64 / step.tp as f64;
        let logits = Work {
            scope: "lm_head".into(),
            op: "linear",
            class: Class::Matmul,
            calls: 1,
            matrix: 2.0 * rows * v * h,
            vector: 0.0,
            bytes: 2.0 * (v * h + rows * (v + h)),
            peak: self.machine.peak_16,
            expected: self.machine.matmul_16(rows, v, h),
        };
        found.push(("logits".into(), vec![self.under(&logits)]));
        found
    }

    /// The ops of a kind of layer, all of one name and scope together.
    fn layer(&self, layer: &LayerWork, count: usize, step: &Step) -> Vec<Row> {
        let mut works: Vec<Work> = Vec::new();
        for op in &layer.ops {
            let mut work = self.op(op, step);
            let times = count as f64;
            for figure in [&mut work.matrix, &mut work.vector, &mut work.bytes, &mut work.expected] {
                *figure *= times;
            }
            work.calls = count;
            match works.iter_mut().find(|w| w.scope == work.scope && w.op == work.op) {
                Some(same) => {
                    same.calls += count;
                    same.matrix += work.matrix;
                    same.vector += work.vector;
                    same.bytes += work.bytes;
                    same.expected += work.expected;
                }
                None => works.push(work),
            }
        }
        works.iter().map(|w| self.under(w)).collect()
    }

    fn op(&self, op: &OpWork, step: &Step) -> Work {
        let m = &self.machine;
        let cut = match (op.cut, op.class) {
            (false, _) => 1.0,
            (true, Class::Attention) => op.heads.min(step.tp).max(1) as f64,
            (true, _) => step.tp as f64,
        };
        let (batch, new, context) = (step.batch as f64, step.new as f64, step.context as f64);
        let tokens = batch * new;
        let element = step.weights.bits() / 8.0;
        let mut work = Work {
            scope: op.scope.clone(),
            op: op.name,
            class: op.class,
            calls: 1,
            matrix: tokens * op.flops_token / cut,
            vector: tokens * op.vector_token / cut,
            bytes: tokens * op.bytes_token / cut,
            peak: m.peak,
            expected: 0.0,
        };
        // Of a product that ends in a sum the inputs are cut, of others the outputs.
        let (n, k) = if op.reduced { (op.n as f64, op.k as f64 / cut) } else { (op.n as f64 / cut, op.k as f64) };
        match op.class {
            Class::Matmul => {
                let weight = element * op.weight / cut;
                work.vector = 0.0;
                work.bytes = ACTIVATION * tokens * (n + k) + weight;
                work.expected = m.matmul(Class::Matmul, tokens, n, k, weight);
            }
            Class::Experts => {
                work.vector = 0.0;
                // Experts that any token chose, each choosing for itself.
                let all = op.experts as f64;
                let reached = all * (1.0 - (1.0 - op.top_k as f64 / all).powf(tokens));
                let rows = tokens * op.top_k as f64;
                work.bytes = ACTIVATION * rows * (n + k) + element * reached * n * k;
                let share = m.matmul_share(Class::Experts, (rows / reached).max(1.0), n * reached, k);
                let moving = element * reached * n * k / m.stream_experts + 2.0 * rows * (n + k) / m.bandwidth;
                work.expected = (work.matrix / (m.peak * share)).max(moving);
            }
            Class::Attention => {
                let seen = new * (context - new) + 0.5 * new * (new + 1.0);
                let (seen, cached) = match op.window {
                    Some(w) => (seen.min(new * w as f64), context.min(w as f64 + new)),
                    None => (seen, context),
                };
                // What all heads share is read by each rank.
                let shared = if op.weight > 0.0 { 1.0 } else { cut };
                work.matrix += batch * seen * op.flops_pair / cut;
                work.vector = 0.0;
                work.bytes += batch * cached * op.bytes_cached * (step.cache_bytes / 2.0) / shared;
                work.bytes += ACTIVATION * op.weight / cut;
                work.peak = m.peak_16;
                // Single rows fill half of a tile at best.
                let share = m.efficiency.attention * if step.new == 1 { 0.5 } else { 1.0 };
                work.expected = (work.matrix / (m.peak_16 * share)).max(work.bytes / m.stream);
            }
            Class::Memory => {
                work.peak = m.peak_16;
                work.bytes += batch * op.bytes_seq;
                work.expected = m.moving(work.bytes);
            }
        }
        work
    }
}

/// What a step of a model computes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Step {
    /// Ranks of tensor parallelism, of which one is looked at.
    pub tp: usize,
    /// Sequences.
    pub batch: usize,
    /// Tokens that each adds: 1 for an answer, all for a prompt.
    pub new: usize,
    /// Tokens that each then has.
    pub context: usize,
    /// Format of matrices.
    pub weights: Quantisation,
    /// Bytes of an element of the cache.
    pub cache_bytes: f64,
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
    /// Tiles of `queries` x `keys` for `heads` heads of `width` over `tokens` tokens, in 16 bits.
    pub fn new(heads: usize, tokens: usize, width: usize, queries: usize, keys: usize) -> Self {
        let [h, t, d, q, k] = [heads, tokens, width, queries, keys].map(|n| n as u64);
        Self {
            shared: Bytes(2 * d) * (q + 2 * k),
            registers: Bytes(4 * q) * (k + d),
            reads: Bytes(4 * d) * t * t.div_ceil(q) * h,
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
        let tile = Tile::new(64, 8192, 128, 128, 64);
        assert_eq!((tile.shared, tile.scores), (Bytes::from_kib(64), Bytes::from_gib(8)));
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
