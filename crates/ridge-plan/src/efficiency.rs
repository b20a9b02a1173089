//! What a device reaches of its sheet, by class of op and size. Shares are data (`efficiency.toml`); how a matrix
//! product falls short of its best shape is arithmetic of tiles: work comes in tiles of 128 x 128 that fill the compute
//! units in waves, and each tile first fills a pipeline as deep as its inner loop is short.

use std::sync::LazyLock;

use ridge_hw::spec::{DeviceSpec, Precision};
use serde::{Deserialize, Serialize};

use crate::comm::{Collective, CollectiveAlgorithm, Fabric, Link, RankGroup};
use crate::error::PlanError;
use crate::reading::Class;

/// Shares of the sheet's figures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Efficiency {
    /// The sheet's name.
    pub name: String,
    /// Of the dense rate, the best shapes of matrix products.
    pub matmul: f64,
    /// The same in a server, whose bursts are short and whose kernels are fused and captured.
    pub serving: f64,
    /// Of the dense rate, products of experts.
    pub experts: f64,
    /// Of the dense rate, fused attention.
    pub attention: f64,
    /// Of the dense rate, the two products of attention that is not fused.
    pub scores: f64,
    /// Of the memory's rate, norms and other passes over activations.
    pub memory: f64,
    /// Of the memory's rate, weights and caches that a decode step reads.
    pub stream: f64,
    /// The same of experts' weights.
    pub stream_experts: f64,
    /// Of both, and of the rate, weights in 4 bits reach this share.
    pub four_bit: f64,
    /// Of the link's rate.
    pub link: f64,
    /// Bytes per second of a GPU to other nodes, one way.
    pub scale_out: f64,
    /// Where these come from.
    pub source: String,
}

#[derive(Deserialize)]
struct EfficiencyTable {
    device: Vec<Efficiency>,
}

static TABLE: LazyLock<Vec<Efficiency>> = LazyLock::new(|| {
    let table: EfficiencyTable =
        toml::from_str(include_str!("efficiency.toml")).expect("the embedded table parses, as a test shows");
    table.device
});

/// What a machine was measured to reach, as `ridge bench --calibrate` writes it: in the place of the embedded table for
/// the devices that it names, with a sheet for one that none comes with.
#[derive(Clone, Debug, Default)]
pub struct Calibration {
    /// Of a device that none comes with.
    pub sheet: Option<DeviceSpec>,
    /// Shares.
    pub devices: Vec<Efficiency>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CalibrationFile {
    sheet: Option<toml::Table>,
    #[serde(default)]
    device: Vec<Efficiency>,
    /// What the shares were made of.
    #[serde(default, rename = "measured")]
    _measured: Vec<toml::Table>,
}

impl Calibration {
    /// Reads the text of such a file; `file` is its name, for messages.
    ///
    /// # Errors
    /// [`PlanError::Setting`] where it is no such file or a share is none, [`PlanError::Hardware`] where its sheet is not
    /// whole.
    pub fn parse(file: &str, text: &str) -> Result<Self, PlanError> {
        let wrong = |problem: String| {
            PlanError::setting("--efficiency", file, &problem, "write it with ridge bench --calibrate FILE")
        };
        let parsed: CalibrationFile = toml::from_str(text).map_err(|e| wrong(e.to_string().trim().to_owned()))?;
        for e in &parsed.device {
            for (key, share) in e.shares() {
                if !(share > 0.0 && share <= 1.0) {
                    return Err(wrong(format!("has {key} = {share} for {}, which is not a share", e.name)));
                }
            }
            if !(e.scale_out.is_finite() && e.scale_out > 0.0) {
                return Err(wrong(format!("has scale_out = {} for {}, which is not a rate", e.scale_out, e.name)));
            }
        }
        let sheet = parsed.sheet.map(|table| DeviceSpec::parse(file, &table.to_string())).transpose()?;
        Ok(Self { sheet, devices: parsed.device })
    }

    /// The machine made of the device called `name`, as [`Machine::find`] has it.
    ///
    /// # Errors
    /// As for [`Machine::find`].
    pub fn machine(&self, name: &str, precision: Precision) -> Result<Machine, PlanError> {
        let own = self.sheet.as_ref().filter(|sheet| sheet.name.eq_ignore_ascii_case(name));
        let spec = own.map_or_else(|| DeviceSpec::find(name), Ok)?;
        let efficiency = self.devices.iter().find(|e| e.name == spec.name).cloned();
        let efficiency = efficiency.map_or_else(|| Efficiency::embedded(&spec.name), Ok)?;
        Ok(Machine { specified: own.is_none(), ..Machine::of(spec, efficiency, precision)? })
    }
}

impl Efficiency {
    /// That of the embedded table for the sheet called `name`; what is usual, where there is none.
    ///
    /// # Errors
    /// [`PlanError::Setting`] where there is neither.
    pub fn embedded(name: &str) -> Result<Self, PlanError> {
        let of = |name: &str| TABLE.iter().find(|e| e.name == name);
        of(name)
            .or_else(|| of("other"))
            .cloned()
            .ok_or_else(|| PlanError::setting("device", name, "has no efficiencies", "add it to efficiency.toml"))
    }

    /// As an entry of a calibration.
    pub fn text(&self) -> String {
        let table = toml::to_string(self).expect("names, numbers and text are TOML");
        format!("[[device]]\n{table}")
    }

    /// All shares, by their keys.
    fn shares(&self) -> [(&'static str, f64); 10] {
        [
            ("matmul", self.matmul),
            ("serving", self.serving),
            ("experts", self.experts),
            ("attention", self.attention),
            ("scores", self.scores),
            ("memory", self.memory),
            ("stream", self.stream),
            ("stream_experts", self.stream_experts),
            ("four_bit", self.four_bit),
            ("link", self.link),
        ]
    }
}

/// A device as plans see it: plain numbers, ready for millions of evaluations.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Machine {
    /// The sheet's name.
    pub name: String,
    /// Are its rates those that its maker states, rather than measured?
    pub specified: bool,
    /// Bytes of memory.
    pub memory: f64,
    /// Bytes per second that passes over activations reach.
    pub bandwidth: f64,
    /// Bytes per second that reading weights and caches reaches.
    pub stream: f64,
    /// The same of experts' weights.
    pub stream_experts: f64,
    /// FLOP/s of the sheet for the precision of products with weights.
    pub peak: f64,
    /// FLOP/s of the sheet in 16 bits, which attention and logits are computed in.
    pub peak_16: f64,
    /// Compute units.
    pub units: f64,
    /// Links in a node and between nodes.
    pub fabric: Fabric,
    /// Shares.
    pub efficiency: Efficiency,
}

/// Elements of a tile's edge.
const TILE: f64 = 128.0;
/// Depth of an inner loop at which half of the time goes into filling the pipeline.
const DEPTH: f64 = 192.0;
/// Bytes per second from which a link is taken for NVLink or one of its kind: sheets do not name it.
const LEAST_NVLINK: f64 = 100e9;

impl Machine {
    /// The machine made of the device called `name`, in nodes of 8, in `precision`.
    ///
    /// # Errors
    /// [`PlanError::Hardware`] with the nearest device, or the precisions that it has.
    pub fn find(name: &str, precision: Precision) -> Result<Self, PlanError> {
        let spec = DeviceSpec::find(name)?;
        Self::of(spec, Efficiency::embedded(&spec.name)?, precision)
    }

    /// The machine made of a device, in nodes of 8, in `precision`, which reaches these shares.
    ///
    /// # Errors
    /// [`PlanError::Hardware`] with the precisions that it has.
    pub fn of(spec: &DeviceSpec, efficiency: Efficiency, precision: Precision) -> Result<Self, PlanError> {
        let roofline = spec.roofline(precision)?;
        let link = spec.interconnect.as_ref().map_or(25e9, |l| l.value.as_f64());
        Ok(Self {
            name: spec.name.clone(),
            specified: true,
            memory: spec.memory.value.as_f64(),
            bandwidth: spec.memory_bandwidth.value.as_f64() * efficiency.memory,
            stream: spec.memory_bandwidth.value.as_f64() * efficiency.stream,
            stream_experts: spec.memory_bandwidth.value.as_f64() * efficiency.stream_experts,
            peak: roofline.peak.as_f64(),
            peak_16: spec.roofline(Precision::Bf16)?.peak.as_f64(),
            units: spec.compute_units.as_ref().map_or(128.0, |u| u.value as f64),
            fabric: Fabric {
                inside: if link >= LEAST_NVLINK { Link::nvlink } else { Link::pcie }(link * efficiency.link),
                node: if spec.name.contains("NVL72") { 72 } else { 8 },
                outside: Link::network(efficiency.scale_out),
                in_network: false,
            },
            efficiency,
        })
    }

    /// This machine as a server uses it: fused and captured kernels, in bursts.
    #[must_use]
    pub fn in_a_server(mut self) -> Self {
        self.efficiency.matmul = self.efficiency.serving;
        self.bandwidth = self.stream;
        self
    }

    /// This machine with weights in 4 bits. Sheets state no rate for them: matrix units that have them take half the
    /// bits twice as fast, and kernels come less near to it.
    #[must_use]
    pub fn in_four_bits(mut self) -> Self {
        let share = self.efficiency.four_bit;
        self.peak *= 2.0 * share;
        self.stream *= share;
        self.stream_experts *= share;
        self
    }

    /// Share of the dense rate that `[m, k] x [k, n]` reaches.
    pub fn matmul_share(&self, class: Class, m: f64, n: f64, k: f64) -> f64 {
        let best = if class == Class::Experts { self.efficiency.experts } else { self.efficiency.matmul };
        let tiles = (m / TILE).ceil() * (n / TILE).ceil();
        let waves = tiles / self.units;
        // A part of a wave is as long as a whole one; large tiles and split sums take half of that back.
        let full = if waves > 0.0 { waves / (0.5 * waves.ceil() + 0.5 * waves.max(1.0)) } else { 1.0 };
        let edge = (m / TILE) / (m / TILE).ceil();
        best * full.min(1.0) * (0.5 + 0.5 * edge) * k / (k + DEPTH)
    }

    /// Seconds of `[m, k] x [k, n]` whose weight is `weight_bytes`.
    pub fn matmul(&self, class: Class, m: f64, n: f64, k: f64, weight_bytes: f64) -> f64 {
        let compute = 2.0 * m * n * k / (self.peak * self.matmul_share(class, m, n, k));
        compute.max(weight_bytes / self.stream + 2.0 * m * (n + k) / self.bandwidth)
    }

    /// Seconds of `[m, k] x [k, n]` in 16 bits, whatever the precision of other products.
    pub fn matmul_16(&self, m: f64, n: f64, k: f64) -> f64 {
        let compute = 2.0 * m * n * k / (self.peak_16 * self.matmul_share(Class::Matmul, m, n, k));
        compute.max(2.0 * n * k / self.stream + 2.0 * m * (n + k) / self.bandwidth)
    }

    /// Seconds of `bytes` through memory.
    pub fn moving(&self, bytes: f64) -> f64 {
        bytes / self.bandwidth
    }

    /// Seconds of `collective` over `ranks` that lie `stride` apart, by what NCCL would choose; `bytes` are those of the
    /// larger buffer of a rank.
    pub fn communicate(&self, collective: Collective, bytes: f64, ranks: usize, stride: usize) -> f64 {
        self.fabric.nccl(collective, bytes, RankGroup { ranks, stride }).map_or(0.0, |e| e.seconds)
    }

    /// The same in a server, whose sums of few bytes are kernels that read all ranks' buffers at once.
    pub fn communicate_in_a_server(&self, collective: Collective, bytes: f64, ranks: usize, stride: usize) -> f64 {
        let nccl = self.communicate(collective, bytes, ranks, stride);
        let group = RankGroup { ranks, stride };
        self.fabric
            .best(collective, bytes, group, &[CollectiveAlgorithm::OneShot])
            .map_or(nccl, |e| e.seconds.min(nccl))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_parses_and_every_share_is_one() {
        assert!(TABLE.iter().any(|e| e.name == "other"));
        for e in TABLE.iter() {
            for (key, share) in e.shares() {
                assert!((0.1..1.0).contains(&share), "{} {key}: {share}", e.name);
            }
            assert!(e.name == "other" || DeviceSpec::find(&e.name).is_ok(), "{}", e.name);
        }
    }

    #[test]
    fn a_large_product_reaches_the_published_share_and_a_small_one_less() {
        let h100 = Machine::find("H100", Precision::Bf16).unwrap();
        let large = h100.matmul_share(Class::Matmul, 8192.0, 8192.0, 8192.0);
        assert!(large > 0.93 * h100.efficiency.matmul && large <= h100.efficiency.matmul, "{large}");
        assert!(h100.matmul_share(Class::Matmul, 64.0, 1024.0, 1024.0) < 0.2 * large);
        // One token: the weight's bytes.
        let one = h100.matmul(Class::Matmul, 1.0, 4096.0, 4096.0, 2.0 * 4096.0 * 4096.0);
        assert!((one / (2.0 * 4096.0 * 4096.0 / h100.stream) - 1.0).abs() < 1e-2);
    }

    #[test]
    fn a_link_of_the_sheet_is_the_one_of_the_fabric() {
        let a100 = Machine::find("A100", Precision::Bf16).unwrap();
        assert_eq!(a100.fabric.inside.rate, 300e9 * a100.efficiency.link);
        let time = a100.communicate(Collective::AllReduce, 1e9, 8, 1);
        assert!((time - 2.0 * 7.0 / 8.0 * 1e9 / a100.fabric.inside.rate) < 1e-4 && time > 6.6e-3, "{time}");
        // One rank a node has one port; eight of a node have eight.
        let apart = a100.communicate(Collective::AllReduce, 1e9, 16, 8);
        assert!(apart > 5.0 * time && a100.communicate(Collective::AllReduce, 1e9, 16, 1) < 2.0 * time);
        assert_eq!(Machine::find("L4", Precision::Bf16).unwrap().fabric.inside.name, "PCIe");
        // A sum of a few rows is one kernel.
        let few = a100.communicate_in_a_server(Collective::AllReduce, 1e4, 8, 1);
        assert!(few < 0.5 * a100.communicate(Collective::AllReduce, 1e4, 8, 1), "{few}");
    }
}
