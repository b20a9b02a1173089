//! `ridge plan devices`: the known devices with their specifications.

use clap::Args;
use ridge_hw::spec::{DeviceSpec, Precision};
use serde_json::json;

use super::page::{Page, PageBlock, PageTable, PlanOutputArgs};
use crate::error::Result;
use crate::output::{print, print_json};

/// List the known devices
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge plan devices
  ridge plan devices --explain    with the source of each figure

For any other device, create a sheet with `ridge bench --calibrate FILE` and pass it with --efficiency FILE.")]
pub(crate) struct PlanDevicesArgs {
    #[command(flatten)]
    shown: PlanOutputArgs,
}

pub(super) fn run(args: &PlanDevicesArgs) -> Result<()> {
    if args.shown.json {
        return print_json(&json!({ "devices": DeviceSpec::all() }));
    }
    let head = ["device", "memory", "bandwidth", "bf16, dense", "fp8, dense", "link", "other names"];
    let mut table = PageTable::with_head("", head);
    for device in DeviceSpec::all() {
        let rate =
            |precision| device.dense_rates.get(&precision).map_or_else(|| "-".to_owned(), |r| r.value.to_string());
        let link = device.interconnect.as_ref().map_or_else(|| "-".to_owned(), |l| l.value.to_string());
        let cells = [
            device.name.clone(),
            device.memory.value.to_string(),
            device.memory_bandwidth.value.to_string(),
            rate(Precision::Bf16),
            rate(Precision::Fp8),
            link,
            device.aliases.join(", "),
        ];
        let mut sources: Vec<String> = Vec::new();
        let rates = device.dense_rates.values().map(|r| r.source.clone());
        for source in [device.memory.source.clone(), device.memory_bandwidth.source.clone()].into_iter().chain(rates) {
            if !sources.contains(&source) {
                sources.push(source);
            }
        }
        table.push(cells, sources.join("; "));
    }
    let page = Page { blocks: vec![PageBlock::Table(table)], ..Page::default() };
    print(&page.text(args.shown.explain))
}
