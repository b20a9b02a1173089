//! `ridge plan comm`: the time of a collective, by algorithm and protocol, and how much of it overlaps with computation.

use std::path::PathBuf;

use clap::Args;
use ridge_hw::spec::Precision;
use ridge_hw::units::{Bytes, BytesPerSecond, Seconds};
use ridge_plan::comm::{Collective, CollectiveAlgorithm, CollectiveEstimate, Fabric, Link, RankGroup, chart, overlap};
use ridge_plan::efficiency::Machine;
use ridge_plan::plot::Mark;
use serde_json::json;

use super::page::{Page, PageArgs, PageBlock, PageTable, seconds};
use super::parsers::named;
use crate::args::whole;
use crate::error::{Result, refused};
use crate::output::write_file;

/// Estimate the time of a collective, per algorithm
///
/// BYTES is the size of a rank's larger buffer, as in nccl-tests.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge plan comm all-reduce 64MiB --gpus 8 --device H200
  ridge plan comm all-reduce 1GB --gpus 1024 --network 400Gb/s --explain
  ridge plan comm all-reduce 16GB --gpus 64 --compute 300ms --buckets 25 --trace overlap.json")]
pub(crate) struct PlanCommArgs {
    /// Collective: all-reduce, all-gather, reduce-scatter, all-to-all, broadcast or send-recv
    #[arg(value_name = "COLLECTIVE", value_parser = |typed: &str| named(typed, &Collective::ALL, Collective::name))]
    collective: Collective,

    /// Bytes, such as 64MiB or 1.5GB
    #[arg(value_name = "BYTES")]
    bytes: Bytes,

    /// Device, by its marketing name or the driver's name for it
    #[arg(long, value_name = "NAME", default_value = "H100-SXM")]
    device: String,

    /// Number of ranks
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = whole::<usize, 1, 1_000_000>)]
    gpus: usize,

    /// Rank stride of the group, such as the tensor-parallel degree for a data-parallel group
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 1_000_000>)]
    stride: usize,

    /// GPUs per node
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 1_000_000>)]
    node: Option<usize>,

    /// Achievable one-way bandwidth per GPU within a node, such as 360GB/s
    #[arg(long, value_name = "RATE")]
    link: Option<BytesPerSecond>,

    /// Network bandwidth per GPU, such as 400Gb/s
    #[arg(long, value_name = "RATE")]
    network: Option<BytesPerSecond>,

    /// In-network reduction in the node's switches (NVLink SHARP)
    #[arg(long)]
    in_network: bool,

    /// Duration of overlapping computation, such as 300ms for a backward pass
    #[arg(long, value_name = "TIME")]
    compute: Option<Seconds>,

    /// Number of gradient buckets
    #[arg(long, value_name = "N", default_value_t = 20, requires = "compute", value_parser = whole::<usize, 1, 100_000>)]
    buckets: usize,

    /// Write compute and communication as a Chrome trace
    #[arg(long, value_name = "FILE", requires = "compute")]
    trace: Option<PathBuf>,

    #[command(flatten)]
    page: PageArgs,
}

/// Maximum size of a collective, in bytes.
const MAX_BYTES: u64 = 1_000_000_000_000_000_000;
/// Maximum duration of overlapping computation, in seconds.
const MAX_SECONDS: f64 = 1e6 * 3600.0;

impl PlanCommArgs {
    fn fabric(&self) -> Result<(String, Fabric)> {
        let machine = Machine::find(&self.device, Precision::Bf16)?;
        let mut fabric = machine.fabric;
        fabric.in_network = self.in_network;
        fabric.node = self.node.unwrap_or(fabric.node);
        for (flag, rate) in [("--link", self.link), ("--network", self.network)] {
            if let Some(rate) = rate.filter(|r| r.0 < 1.0) {
                return Err(refused(flag, rate, "is not a valid bandwidth; the minimum is 1 B/s"));
            }
        }
        fabric.inside.rate = self.link.map_or(fabric.inside.rate, |r| r.0);
        if let Some(rate) = self.network {
            fabric.outside = Link::network(rate.0);
        }
        Ok((machine.name, fabric))
    }
}

pub(super) fn run(args: &PlanCommArgs) -> Result<()> {
    let (device, fabric) = args.fabric()?;
    let collective = args.collective;
    if collective == Collective::SendRecv && args.gpus != 2 {
        return Err(refused(
            "--gpus",
            args.gpus,
            "send-recv has two ranks; set --gpus 2, and --stride for the distance between them",
        ));
    }
    if args.bytes.0 > MAX_BYTES {
        return Err(refused("BYTES", args.bytes, "is too large; the maximum is 1000000 TB"));
    }
    if let Some(compute) = args.compute.filter(|c| c.0 > MAX_SECONDS) {
        return Err(refused("--compute", compute, "is too large; the maximum is 1000000 h"));
    }
    let group = RankGroup { ranks: args.gpus, stride: args.stride };
    let bytes = args.bytes.as_f64();
    let mut ways: Vec<CollectiveEstimate> =
        CollectiveAlgorithm::ALL.into_iter().filter_map(|a| fabric.best(collective, bytes, group, &[a])).collect();
    ways.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let nccl = fabric.nccl(collective, bytes, group);
    // Buckets are sent one after another and overlap with computation.
    let beside = args.compute.zip(nccl).map(|(compute, _)| {
        let part = fabric.nccl(collective, bytes / args.buckets as f64, group).map_or(0.0, |e| e.seconds);
        overlap(compute.0, args.buckets, part)
    });
    let title = format!("{collective} over {} GPUs, {device}, nodes of {}", args.gpus, fabric.node);
    if let (Some(path), Some(beside)) = (&args.trace, &beside) {
        write_file(path, &beside.chrome_trace().to_string())?;
    }
    let json = json!({
        "collective": collective, "bytes": args.bytes, "group": group, "device": device, "fabric": fabric,
        "algorithms": ways, "nccl": nccl,
        "bus_bytes_per_second": nccl.map(|e| e.bus_bandwidth(collective, bytes, args.gpus)),
        "overlap": beside.as_ref().map(|b| json!({ "hidden": b.hidden, "exposed": b.exposed })),
        "sources": { "inside": fabric.inside.source, "outside": fabric.outside.source },
    });
    let mut table = PageTable::with_head("", ["algorithm", "protocol", "time", "latency part", "bus bandwidth"]);
    for e in &ways {
        let bus = BytesPerSecond(e.bus_bandwidth(collective, bytes, args.gpus)).to_string();
        let cells = [e.algorithm.to_string(), e.protocol.to_string(), seconds(e.seconds), seconds(e.latency), bus];
        table.push(cells, fabric.explain(e));
    }
    let mut answer = String::new();
    if let Some(e) = nccl {
        answer += &format!("NCCL is expected to choose {} with {}: {}\n", e.algorithm, e.protocol, seconds(e.seconds));
    }
    if let (Some(beside), Some(compute)) = (&beside, args.compute) {
        answer += &format!(
            "with {compute} of computation in {} buckets: {} overlapped, {} exposed\n",
            args.buckets,
            seconds(beside.hidden),
            seconds(beside.exposed)
        );
    }
    let mut figure = chart(&fabric, collective, group, &title);
    figure.marks.push(Mark { name: args.bytes.to_string(), x: bytes });
    let page = Page {
        title: format!("{title}: {}", args.bytes),
        blocks: vec![PageBlock::Table(table), PageBlock::Answer(answer)],
        panels: vec![figure.into()],
        sources: vec![
            format!(
                "links in a node, {} of {:.0} GB/s: {}",
                fabric.inside.name,
                fabric.inside.rate / 1e9,
                fabric.inside.source
            ),
            format!("links between nodes, {:.0} GB/s a GPU: {}", fabric.outside.rate / 1e9, fabric.outside.source),
        ],
        json,
        ..Page::default()
    };
    args.page.show(&page)
}
