//! Links as data: what a hop costs and what of a rate each protocol reaches (`links.toml`).

use std::fmt;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

/// How NCCL moves data (its environment's `NCCL_PROTO`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Protocol {
    /// 4 bytes of data beside 4 of flag: least latency.
    #[serde(rename = "LL")]
    Ll,
    /// 120 bytes of data beside 8 of flag.
    #[serde(rename = "LL128")]
    Ll128,
    /// Whole slots behind a fence: most bandwidth.
    Simple,
}

impl Protocol {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Ll, Self::Ll128, Self::Simple];
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ll => "LL",
            Self::Ll128 => "LL128",
            Self::Simple => "Simple",
        })
    }
}

/// One class of links at one rate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Link {
    /// Its class.
    pub name: &'static str,
    /// Bytes per second, one way, that one GPU's link reaches at best.
    pub rate: f64,
    /// Seconds of a hop, by protocol.
    pub hop: [f64; 3],
    /// Share of the rate, by protocol.
    pub share: [f64; 3],
    /// Where latencies and shares come from.
    pub source: &'static str,
}

impl Link {
    /// NVLink and what is like it, of `rate` bytes per second.
    pub fn nvlink(rate: f64) -> Self {
        TABLE.link("NVLink", rate)
    }

    /// PCI Express.
    pub fn pcie(rate: f64) -> Self {
        TABLE.link("PCIe", rate)
    }

    /// A port of InfiniBand or RoCE.
    pub fn network(rate: f64) -> Self {
        TABLE.link("network", rate)
    }
}

/// What the file says, in seconds.
#[derive(Debug)]
pub(super) struct LinkTable {
    /// Seconds between calls that the host needs.
    pub host: f64,
    /// Seconds of a one-shot kernel without its hop and bytes.
    pub one_shot: f64,
    /// Seconds of a sum in the switch, and its share of the rate.
    pub in_network: (f64, f64),
    /// Seconds before the first hop, by protocol.
    pub base: [f64; 3],
    links: Vec<Link>,
}

impl LinkTable {
    fn link(&self, name: &str, rate: f64) -> Link {
        // All names that are asked for are in the file, as a test shows.
        let class = self.links.iter().find(|l| l.name == name).unwrap_or(&self.links[0]);
        Link { rate, ..class.clone() }
    }
}

#[derive(Deserialize)]
struct LinkFile {
    host_us: f64,
    one_shot_us: f64,
    in_network_us: f64,
    in_network_share: f64,
    protocol: [LinkFileProtocol; 3],
    link: Vec<LinkFileLink>,
}

#[derive(Deserialize)]
struct LinkFileProtocol {
    name: String,
    base_us: f64,
}

#[derive(Deserialize)]
struct LinkFileLink {
    name: String,
    hop_us: [f64; 3],
    share: [f64; 3],
    source: String,
}

pub(super) static TABLE: LazyLock<LinkTable> = LazyLock::new(|| {
    let file: LinkFile =
        toml::from_str(include_str!("links.toml")).expect("the embedded table parses, as a test shows");
    let link = |l: LinkFileLink| Link {
        name: l.name.leak(),
        rate: 0.0,
        hop: l.hop_us.map(|us| us * 1e-6),
        share: l.share,
        source: l.source.leak(),
    };
    debug_assert!(file.protocol.iter().map(|p| p.name.as_str()).eq(["LL", "LL128", "Simple"]));
    LinkTable {
        host: file.host_us * 1e-6,
        one_shot: file.one_shot_us * 1e-6,
        in_network: (file.in_network_us * 1e-6, file.in_network_share),
        base: file.protocol.map(|p| p.base_us * 1e-6),
        links: file.link.into_iter().map(link).collect(),
    }
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_each_class_and_its_shares_rise_with_latency() {
        for (link, name) in [(Link::nvlink(1.0), "NVLink"), (Link::pcie(1.0), "PCIe"), (Link::network(1.0), "network")]
        {
            assert_eq!(link.name, name);
            assert!(link.share.is_sorted() && link.share.iter().all(|s| (0.1..=1.0).contains(s)), "{link:?}");
            assert!(link.hop.iter().all(|h| (1e-7..1e-4).contains(h)), "{link:?}");
        }
        assert!(TABLE.base.is_sorted());
    }
}
