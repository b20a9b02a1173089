//! FLOPs, bytes and the least time of a matrix product, of attention, or of every op and scope of a model's step, on any
//! device sheet; beside it the time that its efficiency lets expect, and the picture.
//!
//! Source of the model: Williams et al. 2009 (see [`ridge_hw::roofline`]). RooflineWork that several units do is bounded by each.

mod draw;
mod model;
mod roof;

pub use model::ModelStep;
pub use roof::{AttentionTile, Roof, RooflineRow, RooflineWork};

#[cfg(test)]
mod tests {
    use super::*;
    use ridge_hw::roofline::Bound;
    use ridge_hw::spec::Precision;
    use ridge_hw::units::Bytes;

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
        let tile = AttentionTile::new(64, 8192, 128, [128, 64], false);
        assert_eq!((tile.shared, tile.scores), (Bytes::from_kib(64), Bytes::from_gib(8)));
        // 64 blocks of 128 queries: all 64 x 64 tiles of keys, or the 64 x 65 / 2 up to the diagonal.
        let causal = AttentionTile::new(64, 8192, 128, [128, 64], true);
        assert_eq!(causal.reads.0 * 2 * 64, tile.reads.0 * 65);
    }

    #[test]
    fn ops_of_a_model_add_up_to_its_weights_and_two_flops_a_parameter() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/configs/Meta-Llama-3.1-8B.json");
        let reading = Reading::from_json("config.json", &std::fs::read_to_string(file).unwrap()).unwrap();
        let roof = Roof::find("H200", Precision::Bf16).unwrap();
        let weights = Quantisation::Bf16;
        let step = |batch, new, context| ModelStep { tp: 1, batch, new, context, weights, cache_bytes: 2.0 };
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
        let eighth = total(ModelStep { tp: 8, ..step(1, 1, 8192) });
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
