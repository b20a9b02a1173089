//! `ridge plan topology`: assignment of ranks to GPUs from the output of `nvidia-smi topo -m`.

use std::path::PathBuf;
use std::process::Command;

use clap::Args;
use ridge_hw::topology::Matrix;
use ridge_hw::units::BytesPerSecond;
use ridge_plan::topology::{Degrees, ParallelAxis, PlacementAdvice, RankPlacement, Rates, SOURCE, ways};
use serde_json::json;

use super::page::PlanOutputArgs;
use crate::args::whole;
use crate::error::{Error, Result, refused};
use crate::input;
use crate::output::{columns, count, print, print_json};

/// Map parallel ranks to a machine's GPUs
///
/// The axis with the most traffic gets the fastest links. Prints the bandwidth of each axis, that of a bad order, and the
/// network card and NUMA node of each rank.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge plan topology                                 links of this machine (needs nvidia-smi)
  ridge plan topology --file topo.txt --tp 2 --dp 4
  ssh node nvidia-smi topo -m | ridge plan topology --file - --tp 8 --dp 4 --nodes 4")]
pub(crate) struct PlanTopologyArgs {
    /// Output of `nvidia-smi topo -m`; `-` reads standard input [default: run it]
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,

    /// Device, for its link bandwidths [default: inferred from the number of NVLinks]
    #[arg(long, value_name = "NAME")]
    device: Option<String>,

    /// Tensor parallel ranks
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 65536>)]
    tp: usize,

    /// Context parallel ranks
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 65536>)]
    cp: usize,

    /// Expert-parallel ranks, among those of the context and data axes
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 65536>)]
    ep: usize,

    /// Pipeline stages
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 65536>)]
    pp: usize,

    /// Data parallel ranks [default: all remaining GPUs]
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 65536>)]
    dp: Option<usize>,

    /// Number of machines like this one [default: as many as the ranks need]
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 16384>)]
    nodes: Option<usize>,

    /// Bandwidth of a network card, such as 400Gb/s
    #[arg(long, value_name = "RATE")]
    network: Option<BytesPerSecond>,

    #[command(flatten)]
    shown: PlanOutputArgs,
}

impl PlanTopologyArgs {
    fn text(&self) -> Result<String> {
        match &self.file {
            Some(path) if path.as_os_str() == "-" => input::stdin(),
            Some(path) => input::file(path),
            None => match Command::new("nvidia-smi").args(["topo", "-m"]).output() {
                Ok(ran) if ran.status.success() => Ok(String::from_utf8_lossy(&ran.stdout).into_owned()),
                _ => Err(Error::Setting {
                    flag: "--file".into(),
                    value: "(not given)".into(),
                    why: "nvidia-smi is not available here; give a file with the output of `nvidia-smi topo -m` from another machine".into(),
                }),
            },
        }
    }

    fn degrees(&self, gpus: usize) -> (Degrees, usize) {
        let others = self.tp * self.cp * self.pp;
        let nodes = self.nodes.unwrap_or_else(|| (others * self.dp.unwrap_or(1)).div_ceil(gpus).max(1));
        let dp = self.dp.unwrap_or_else(|| (gpus * nodes / others).max(1));
        (Degrees { tp: self.tp, pp: self.pp, dp, cp: self.cp, ep: self.ep }, nodes)
    }
}

pub(super) fn run(args: &PlanTopologyArgs) -> Result<()> {
    let matrix = Matrix::parse(&args.text()?).map_err(ridge_plan::PlanError::from)?;
    let mut rates = Rates::find(args.device.as_deref(), &matrix)?;
    if let Some(network) = args.network {
        if network.0 < 1.0 {
            return Err(refused("--network", network, "is not a valid bandwidth; the minimum is 1 B/s"));
        }
        rates.nic = network.0;
    }
    let (degrees, nodes) = args.degrees(matrix.gpus.len());
    let advice = PlacementAdvice::new(&matrix, &rates, degrees, nodes)?;
    if args.shown.json {
        return print_json(&json!({
            "matrix": matrix, "rates": rates, "advice": advice,
            "sources": { "matrix": "given", "rates": *SOURCE, "placement": "modelled" },
        }));
    }
    let rate = |r: f64| BytesPerSecond(r).to_string();
    let mut text = format!(
        "{} and {}; links as of {}\n\n",
        count(matrix.gpus.len(), "GPU"),
        count(matrix.nics.len(), "network card"),
        if rates.device == "other" { "PCIe 4.0 and NVLink 2 or 3" } else { &rates.device }
    );
    let mut rows = vec![["link", "pairs of GPUs", "bandwidth"].map(str::to_owned).to_vec()];
    for (way, pairs) in ways(&matrix) {
        rows.push(vec![way.to_string(), pairs.to_string(), rate(rates.of(way))]);
    }
    if rows.len() > 1 {
        text += &columns(&rows);
    }
    if !advice.best.axes.is_empty() {
        text += &format!("\n{}\n", title(&advice));
        text += &axes(args, &advice);
    }
    text += &format!("\n{}\n", if advice.nodes > 1 { "assignment, for each node" } else { "assignment" });
    text += &places(&advice);
    text += &hints(&advice);
    if args.shown.explain {
        text += &format!(
            "\nsources\n  the matrix: given\n  rates: {}; a network card {}\n  placement: modelled; ranks are numbered tp, \
             cp, dp, pp, the first innermost, as Megatron does\n",
            *SOURCE,
            rate(rates.nic)
        );
    }
    print(&text)
}

fn title(advice: &PlacementAdvice) -> String {
    let Degrees { tp, pp, dp, cp, ep } = advice.degrees;
    let all = [("TP", tp), ("CP", cp), ("EP", ep), ("DP", dp), ("PP", pp)];
    let named: Vec<String> = all.iter().filter(|(_, n)| *n > 1).map(|(name, n)| format!("{name} {n}")).collect();
    format!("{} over {}", named.join(", "), count(advice.nodes, "node"))
}

/// The bandwidth of each axis, here and in other assignments.
fn axes(args: &PlanTopologyArgs, advice: &PlacementAdvice) -> String {
    let elsewhere = |placement: &RankPlacement, axis: ParallelAxis, best: f64| {
        placement.axes.iter().find(|a| a.axis == axis).map_or(String::new(), |a| {
            if a.rate < 0.995 * best {
                format!("{}, {:.1}x slower", BytesPerSecond(a.rate), best / a.rate)
            } else {
                "equal".to_owned()
            }
        })
    };
    let mut rows =
        vec![["axis", "over", "bandwidth", "numbered from pp", "worst GPU order"].map(str::to_owned).to_vec()];
    for a in &advice.best.axes {
        let mut over = match a.way {
            Some(way) => way.to_string(),
            None => "network".to_owned(),
        };
        if a.way.is_some() && a.in_node < a.degree {
            over += " and network";
        }
        if a.sharing > 1 {
            over += &format!(", {} sharing", a.sharing);
        }
        if a.in_node < a.degree && a.rail {
            over += ", one rail";
        }
        let mut row = vec![
            format!("{} {}", a.axis.name(), a.degree),
            over,
            BytesPerSecond(a.rate).to_string(),
            elsewhere(&advice.reversed, a.axis, a.rate),
            elsewhere(&advice.shuffled, a.axis, a.rate),
        ];
        row.extend(args.shown.explain.then(|| a.axis.reason().to_owned()));
        rows.push(row);
    }
    columns(&rows)
}

fn places(advice: &PlacementAdvice) -> String {
    let mut rows = vec![["rank", "GPU", "NUMA node", "CPUs", "card", "to card"].map(str::to_owned).to_vec()];
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    for seat in &advice.best.seats {
        rows.push(vec![
            seat.rank.to_string(),
            seat.gpu.clone(),
            or_dash(seat.numa.map(|n| n.to_string())),
            or_dash(seat.cpus.clone()),
            or_dash(seat.nic.clone()),
            or_dash(seat.to_nic.map(|w| w.to_string())),
        ]);
    }
    columns(&rows)
}

/// Environment variables that realise the assignment.
fn hints(advice: &PlacementAdvice) -> String {
    let seats = &advice.best.seats;
    let gpus: Vec<&str> = seats.iter().map(|s| s.gpu.trim_start_matches("GPU")).collect();
    let mut text = format!("\nCUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={}\n", gpus.join(","));
    let mut cards: Vec<&str> = seats.iter().filter_map(|s| s.nic.as_deref()).collect();
    cards.sort_by_key(|card| (card.len(), *card));
    cards.dedup();
    if advice.nodes > 1 && !cards.is_empty() {
        // The second = requests exact names instead of prefixes.
        text += &format!("NCCL_IB_HCA=={}\n", cards.join(","));
    }
    if seats.iter().any(|s| s.numa.is_some()) {
        text += "run each rank under numactl --cpunodebind=N --membind=N, where N is its NUMA node\n";
    }
    text
}
