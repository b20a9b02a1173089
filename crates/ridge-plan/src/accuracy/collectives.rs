//! Collectives of one host: H200, NCCL.

use std::path::Path;

use ridge_hw::spec::Precision;

use super::section::{AccuracyRow, AccuracySection, ErrorStatistic};
use super::table::{Record, read};
use crate::comm::{Collective, CollectiveAlgorithm, Protocol, RankGroup};
use crate::efficiency::Machine;

fn collective_of(op: &str) -> Result<Collective, String> {
    Ok(match op {
        "all_reduce" => Collective::AllReduce,
        "all_gather" => Collective::AllGather,
        "reduce_scatter" => Collective::ReduceScatter,
        "all_to_all" => Collective::AllToAll,
        "p2p" => Collective::SendRecv,
        other => return Err(format!("op {other:?} is not a collective")),
    })
}

pub(super) fn sections(folder: &Path) -> Result<Vec<AccuracySection>, String> {
    let h200 = Machine::find("H200", Precision::Bf16).map_err(|e| e.to_string())?;
    let records = read(folder, "collectives_h200_measured.csv")?;
    let (mut rows, mut bound) = (Vec::new(), 0);
    for (i, r) in records.iter().enumerate() {
        let (collective, group, bytes) = asked(r)?;
        let gpu = h200.fabric.nccl(collective, bytes, group).ok_or("NCCL has no way")?.seconds;
        let captured = !r.text("graph_us").is_empty();
        if !captured && h200.fabric.called(gpu) > gpu {
            bound += 1;
            continue;
        }
        let measured = r.number(if captured { "graph_us" } else { "us" })?;
        let what = format!("{collective} of {bytes} B over {}", group.ranks);
        rows.push(AccuracyRow { what, fit: i % 2 == 0, measured, planned: gpu * 1e6 });
    }
    let times = AccuracySection {
        title: "Collectives of NCCL on 8 H200, microseconds".to_owned(),
        unit: "us",
        target: 0.10,
        judged: ErrorStatistic::Median,
        rows,
        note: format!(
            "every second row was fitted; {bound} small calls outside graphs are left out: they take the host's 25 us; rows that are 1.4 to 10 times slower than their neighbours stay in, hence the median"
        ),
        shown: false,
    };
    let mut rows = Vec::new();
    for r in read(folder, "collectives_measured.csv")? {
        let (collective, group, bytes) = asked(&r)?;
        let mut fabric = h200.fabric.clone();
        fabric.in_network = true;
        let sharp = r.text("algo") == "nvls";
        let algorithm = if sharp { CollectiveAlgorithm::InNetwork } else { CollectiveAlgorithm::Ring };
        let e = fabric.estimate(collective, bytes, group, algorithm, Protocol::Simple).ok_or("no such algorithm")?;
        let planned = e.bus_bandwidth(collective, bytes, group.ranks) / 1e9;
        let what = format!("{collective} of {bytes} B over {}, {algorithm}", group.ranks);
        rows.push(AccuracyRow { what, fit: sharp, measured: r.number("busbw_gbps")?, planned });
    }
    let bandwidth = AccuracySection {
        title: "Bus bandwidth of another host of 8 H200".to_owned(),
        unit: "GB/s",
        target: 0.10,
        judged: ErrorStatistic::Worst,
        rows,
        note: "sums in the switch were fitted on the one row that there is".to_owned(),
        shown: true,
    };
    Ok(vec![times, bandwidth])
}

fn asked(r: &Record) -> Result<(Collective, RankGroup, f64), String> {
    Ok((collective_of(r.text("op"))?, RankGroup::of(r.count("gpus")?), r.number("bytes")?))
}
