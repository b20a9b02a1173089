//! `ridge plan kernel`: occupancy of a launch, and what its accesses cost.

use clap::Args;
use ridge_plan::kernel::access::Access;
use ridge_plan::kernel::occupancy::{Launch, occupancy};
use serde_json::json;

use crate::error::Result;
use crate::output::{columns, print, print_json};

/// Tell how many warps of a kernel are resident, what limits them, and what a warp's access costs
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge plan kernel --capability 8.0 --threads 256 --registers 128 --shared-bytes 49152
  ridge plan kernel --threads 128 --registers 64 --stride 4096 --width 4")]
pub(crate) struct KernelArgs {
    /// Compute capability: 8.0 is A100, 8.9 L4 and L40S, 9.0 H100 and H200, 10.0 B200
    #[arg(long, value_name = "X.Y", default_value = "9.0")]
    capability: String,

    /// Threads of a block
    #[arg(long, value_name = "N")]
    threads: u64,

    /// 32-bit registers of a thread
    #[arg(long, value_name = "N")]
    registers: u64,

    /// Shared memory of a block, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    shared_bytes: u64,

    /// Bytes from a lane's address to the next lane's; tells of the access too
    #[arg(long, value_name = "BYTES")]
    stride: Option<u64>,

    /// Address of the first lane, in bytes from a multiple of 128
    #[arg(long, value_name = "BYTES", default_value_t = 0, requires = "stride")]
    offset: u64,

    /// Bytes that a lane reads: 1, 2, 4, 8 or 16
    #[arg(long, value_name = "BYTES", default_value_t = 4, requires = "stride")]
    width: u64,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &KernelArgs) -> Result<()> {
    let launch = Launch { threads: args.threads, registers: args.registers, shared_bytes: args.shared_bytes };
    let found = occupancy(&args.capability, launch)?;
    let access = args.stride.map(|stride| Access::new(args.offset, stride, args.width)).transpose()?;
    if args.json {
        let access = access.map(|a| {
            json!({ "sectors": a.sectors(), "efficiency": a.efficiency(), "shared_passes": a.shared_passes(),
                "conflict_ways": a.conflict_ways() })
        });
        return print_json(&json!({ "occupancy": found, "fraction": found.fraction(), "access": access,
            "sources": { "limits": "specified", "occupancy": "modelled", "access": "modelled" } }));
    }
    let limited: Vec<String> = found.limited_by.iter().map(ToString::to_string).collect();
    let mut text = format!(
        "occupancy {:.1} %: {} blocks, {} of {} warps on a multiprocessor of {}, limited by {}\n\nblocks by each limit\n",
        100.0 * found.fraction(),
        found.blocks,
        found.warps,
        found.max_warps,
        args.capability,
        limited.join(" and "),
    );
    let rows: Vec<_> = found.blocks_by.iter().map(|(limit, n)| vec![limit.to_string(), n.to_string()]).collect();
    text += &columns(&rows);
    if let Some(access) = access {
        text += &format!(
            "\na warp's access\n  global memory  {} sectors of 32 bytes, {:.1} % of them used\n  shared memory  {} passes, \
             {:.1} times those without conflicts\n",
            access.sectors(),
            100.0 * access.efficiency(),
            access.shared_passes(),
            access.conflict_ways(),
        );
    }
    text += "\nsources\n  limits: specified, CUDA C++ Programming Guide\n  occupancy, sectors and passes: modelled by its rules\n";
    print(&text)
}
