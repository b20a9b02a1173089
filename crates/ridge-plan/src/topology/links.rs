//! What each way carries, from `links.toml`.

use std::sync::LazyLock;

use ridge_hw::spec::DeviceSpec;
use ridge_hw::topology::{Matrix, PathType};
use serde::{Deserialize, Serialize};

use crate::error::PlanError;

#[derive(Deserialize)]
struct PathRateFile {
    nvlink: Vec<NvLink>,
    ways: PcieShares,
    sources: PathRateSources,
}

#[derive(Deserialize)]
struct NvLink {
    device: String,
    links: u32,
    link: f64,
    pcie: f64,
}

#[derive(Deserialize)]
struct PcieShares {
    pix: f64,
    pxb: f64,
    phb: f64,
    node: f64,
    sys_bytes_per_second: f64,
}

#[derive(Deserialize)]
struct PathRateSources {
    links: String,
}

static TABLE: LazyLock<PathRateFile> =
    LazyLock::new(|| toml::from_str(include_str!("links.toml")).expect("the embedded table parses, as a test shows"));

/// Where the rates come from.
pub static SOURCE: LazyLock<&'static str> = LazyLock::new(|| &TABLE.sources.links);

/// Bytes per second, one way, of the links of a machine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rates {
    /// The device that they are those of.
    pub device: String,
    /// Of one NVLink.
    pub nvlink: f64,
    /// Of a GPU's PCIe.
    pub pcie: f64,
    /// Between two NUMA nodes.
    pub sys: f64,
    /// Of a network card.
    pub nic: f64,
}

impl Rates {
    /// Rates of `device`; without one, of the device that has as many NVLinks as the matrix shows most. A network card
    /// has 400 Gb/s beside PCIe 5.0, and 200 Gb/s beside PCIe 4.0.
    ///
    /// # Errors
    /// [`PlanError::Hardware`] with the nearest device.
    pub fn find(device: Option<&str>, matrix: &Matrix) -> Result<Self, PlanError> {
        let other = |name: &str| TABLE.nvlink.iter().find(|n| n.device == name);
        let (name, row) = match device {
            Some(name) => {
                let name = &DeviceSpec::find(name)?.name;
                (name.clone(), other(name).or_else(|| other("other")))
            }
            None => {
                let links = |way: &PathType| if let PathType::NvLink(n) = way { *n } else { 0 };
                let most = matrix.between.iter().flatten().map(links).max().unwrap_or(0);
                // Of those that have 18, Hopper: more machines are.
                let fits = |n: &&NvLink| n.links == most && n.link < 40e9;
                match TABLE.nvlink.iter().find(fits).filter(|_| most > 6) {
                    Some(row) => (row.device.clone(), Some(row)),
                    None => ("other".to_owned(), other("other")),
                }
            }
        };
        let row = row.unwrap_or(&TABLE.nvlink[0]);
        Ok(Self {
            device: name,
            nvlink: row.link,
            pcie: row.pcie,
            sys: TABLE.ways.sys_bytes_per_second,
            nic: if row.pcie > 40e9 { 50e9 } else { 25e9 },
        })
    }

    /// Of a way that nobody shares.
    pub fn of(&self, way: PathType) -> f64 {
        let ways = &TABLE.ways;
        match way {
            PathType::X => f64::INFINITY,
            PathType::NvLink(links) => f64::from(links) * self.nvlink,
            PathType::Pix => self.pcie * ways.pix,
            PathType::Pxb => self.pcie * ways.pxb,
            PathType::Phb => self.pcie * ways.phb,
            PathType::Node => self.pcie * ways.node,
            PathType::Sys => self.sys.min(self.pcie * ways.node),
        }
    }
}
