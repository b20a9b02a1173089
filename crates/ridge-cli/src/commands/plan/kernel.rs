//! `ridge plan kernel`: work under a device's roofline, the occupancy of a launch, and the cost of its memory accesses.

use std::path::{Path, PathBuf};

use clap::{ArgGroup, Args};
use ridge_hw::spec::Precision;
use ridge_hw::units::{Bytes, BytesPerSecond};
use ridge_plan::efficiency::Calibration;
use ridge_plan::kernel::access::Access;
use ridge_plan::kernel::occupancy::{KernelLaunch, Limit, Occupancy, most_shared_bytes, occupancy};
use ridge_plan::kernel::roofline::{AttentionTile, ModelStep, Roof, RooflineRow};
use ridge_plan::ledger::Quantisation;
use ridge_plan::plot::{Axis, Chart, Mark, Series, Style, Unit};
use ridge_plan::reading::Class;
use serde_json::{Value, json};

use super::page::{Page, PageArgs, PageBlock, PageTable};
use super::parsers::{named, quantisation};
use super::target::{read_model, serving_machine};
use crate::args::whole;
use crate::error::{Result, refused};
use crate::output::grouped;

/// Rooflines, occupancy and memory access patterns of kernels
#[derive(Debug, Args)]
#[command(
    group(ArgGroup::new("question").required(true).multiple(true)
        .args(["matmul", "attention", "model", "threads", "stride"])),
    after_help = "\
Examples:
  ridge plan kernel --matmul 4096x4096x4096 --device A100 --explain --plot roofline.svg
  ridge plan kernel --attention 64x8192x128 --causal --device H100
  ridge plan kernel --model Llama-3.1-8B --device H200 --batch 64 --html decode.html
  ridge plan kernel --model Llama-3.1-8B --new 4096 --context 4096
  ridge plan kernel --threads 128 --registers 64 --shared-bytes 49152 --capability 8.0
  ridge plan kernel --stride 4096 --width 4"
)]
pub(crate) struct PlanKernelArgs {
    /// Device, by its marketing name or the driver's name for it
    #[arg(long, value_name = "NAME", default_value = "H100-SXM")]
    device: String,

    /// Matrix product of [M, K] and [K, N]
    #[arg(long, value_name = "MxNxK", value_parser = sizes::<3>, help_heading = "Roofline")]
    matmul: Option<[usize; 3]>,

    /// Attention with this many heads, tokens and head size
    #[arg(long, value_name = "HEADSxTOKENSxWIDTH", value_parser = sizes::<3>, help_heading = "Roofline")]
    attention: Option<[usize; 3]>,

    /// Every op and scope of a step of a model: a folder, or a config.json
    #[arg(long, value_name = "MODEL", help_heading = "Roofline")]
    model: Option<PathBuf>,

    /// Precision of the product: f16, bf16, fp8 or int8
    #[arg(long, value_name = "NAME", value_parser = precision, default_value = "bf16", help_heading = "Roofline")]
    dtype: Precision,

    /// Causal attention
    #[arg(long, requires = "attention", help_heading = "Roofline")]
    causal: bool,

    /// Tile of fused attention, queries x keys; the default is FlashAttention-2's for heads of 128 on an A100
    #[arg(long, value_name = "QxK", value_parser = sizes::<2>, default_value = "128x64", help_heading = "Roofline")]
    tile: [usize; 2],

    /// Tensor-parallel ranks of the model; one rank is shown
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 4096>, help_heading = "Roofline")]
    tp: usize,

    /// Sequences per step of the model
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 1_000_000>, help_heading = "Roofline")]
    batch: usize,

    /// New tokens per sequence and step: 1 for decoding, --context for a prompt
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 100_000_000>, help_heading = "Roofline")]
    new: usize,

    /// Tokens per sequence after the step
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = whole::<usize, 1, 100_000_000>, help_heading = "Roofline")]
    context: usize,

    /// Format of the model's matrices: bf16, fp8, q8, int4, nvfp4 or mxfp4
    #[arg(long, value_name = "FORMAT", value_parser = quantisation, default_value = "bf16", help_heading = "Roofline")]
    weights: Quantisation,

    /// Bits per element of the KV cache; one of 8 bits also has a 4-byte scale per key and value of each head
    #[arg(long, value_name = "BITS", default_value_t = 16, value_parser = whole::<usize, 2, 32>, help_heading = "Roofline")]
    cache_bits: usize,

    /// Compute capability [default: the device's]: 8.0 is A100, 8.9 L4 and L40S, 9.0 H100 and H200, 10.0 B200
    #[arg(long, value_name = "X.Y", help_heading = "Launch")]
    capability: Option<String>,

    /// Threads per block
    #[arg(long, value_name = "N", requires = "registers", help_heading = "Launch")]
    threads: Option<u64>,

    /// 32-bit registers per thread
    #[arg(long, value_name = "N", requires = "threads", help_heading = "Launch")]
    registers: Option<u64>,

    /// Shared memory per block, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 0, help_heading = "Launch")]
    shared_bytes: u64,

    /// Distance between the addresses of adjacent lanes, in bytes
    #[arg(long, value_name = "BYTES", help_heading = "Access")]
    stride: Option<u64>,

    /// Offset of the first lane's address from a multiple of 128, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 0, requires = "stride", help_heading = "Access")]
    offset: u64,

    /// Bytes read per lane: 1, 2, 4, 8 or 16
    #[arg(long, value_name = "BYTES", default_value_t = 4, requires = "stride", help_heading = "Access")]
    width: u64,

    #[command(flatten)]
    page: PageArgs,
}

/// Sizes separated by `x`, such as `4096x4096x4096`.
fn sizes<const N: usize>(typed: &str) -> Result<[usize; N], String> {
    let sizes: Option<Vec<usize>> =
        typed.split(['x', 'X']).map(|s| s.trim().parse().ok().filter(|n| (1..=1_000_000_000).contains(n))).collect();
    let found = sizes.and_then(|sizes| <[usize; N]>::try_from(sizes).ok());
    found.ok_or_else(|| {
        format!("must be {N} whole numbers from 1 to 1000000000 with x between them, such as {}", ["128"; N].join("x"))
    })
}

fn precision(typed: &str) -> Result<Precision, String> {
    const ALL: [Precision; 4] = [Precision::F16, Precision::Bf16, Precision::Fp8, Precision::Int8];
    named(typed, &ALL, |p| match p {
        Precision::F16 => "f16",
        Precision::Fp8 => "fp8",
        Precision::Int8 => "int8",
        _ => "bf16",
    })
}

pub(super) fn run(args: &PlanKernelArgs) -> Result<()> {
    let mut page = Page { json: json!({}), ..Page::default() };
    if args.matmul.is_some() || args.attention.is_some() {
        ops(args, &mut page)?;
    }
    if let Some(path) = &args.model {
        model(args, path, &mut page)?;
    }
    if let (Some(threads), Some(registers)) = (args.threads, args.registers) {
        launch(args, KernelLaunch { threads, registers, shared_bytes: args.shared_bytes }, &mut page)?;
    }
    if let Some(stride) = args.stride {
        access(args, stride, &Access::new(args.offset, stride, args.width)?, &mut page);
    }
    page.json["sources"] = json!({
        "limits": "specified", "rates": "specified", "flops": "modelled", "bytes": "modelled", "occupancy": "modelled",
        "access": "modelled", "expected": "modelled",
    });
    args.page.show(&page)
}

/// Columns of a roofline.
const COLUMNS: [&str; 10] =
    ["scope", "op", "calls", "FLOPs", "bytes", "FLOP/B", "bound", "floor", "expected", "reached"];

fn cells(row: &RooflineRow) -> Vec<String> {
    vec![
        row.scope.clone(),
        row.op.clone(),
        row.calls.to_string(),
        row.flops.to_string(),
        row.bytes.to_string(),
        row.intensity.to_string().trim_end_matches(" FLOP/B").to_owned(),
        row.bound.to_string(),
        row.floor.to_string(),
        row.expected.to_string(),
        format!("{:.0} %", 100.0 * row.share),
    ]
}

/// The roofline of a product or attention of given sizes.
fn ops(args: &PlanKernelArgs, page: &mut Page) -> Result<()> {
    let roof = Roof::find(&args.device, args.dtype)?;
    let ridge = roof.ridge_point();
    page.title = format!("{} in {}: ridge point {ridge}", roof.device.name, args.dtype);
    let mut table = PageTable::with_head("", COLUMNS);
    let mut rows = Vec::new();
    if let Some([m, n, k]) = args.matmul {
        let row = roof.under(&roof.matmul(m, n, k));
        let side = if row.intensity >= ridge { "above" } else { "below" };
        page.blocks.push(PageBlock::Answer(format!(
            "{} at {}, {side} the ridge point: bound by {}; {} at least, {} expected",
            row.flops, row.intensity, row.bound, row.floor, row.expected
        )));
        let formula = "2 m n k FLOPs; m k and k n elements read, m n of 2 B written; floor: the longer of FLOPs / rate, bytes / bandwidth";
        table.push(cells(&row), formula);
        rows.push(row);
    }
    if let Some([heads, tokens, width]) = args.attention {
        let [scores, softmax, values, fused] =
            roof.attention(heads, tokens, width, args.causal).map(|work| roof.under(&work));
        let steps = Roof::sum("attention", &[&scores, &softmax, &values]);
        let steps = RooflineRow { op: "unfused".into(), class: Some(Class::Attention), ..steps };
        for (row, formula) in [
            (&scores, "2 h t^2 d FLOPs; q and k read, h t^2 scores of 2 B written"),
            (&softmax, "5 FLOPs per score, read and written"),
            (&values, "2 h t^2 d FLOPs; scores and v read, h t d of 2 B written"),
            (&steps, "sum of the three"),
            (&fused, "4 h d FLOPs per unmasked pair; q, k and v read, the output written"),
        ] {
            table.push(cells(row), formula);
        }
        let tile = AttentionTile::new(heads, tokens, width, args.tile, args.causal);
        let mut answer = format!(
            "unfused, with {} of scores in memory: {} at least; fused {}, bound by {}\n",
            tile.scores, steps.floor, fused.floor, fused.bound
        );
        answer += &format!(
            "a tile of {} x {} takes {} of shared memory and {} of registers; all blocks read {} of keys and values",
            args.tile[0], args.tile[1], tile.shared, tile.registers, tile.reads
        );
        if let Some(capability) = args.capability.as_ref().or(roof.device.compute_capability.as_ref()) {
            let most = Bytes(most_shared_bytes(capability)?);
            let blocks =
                occupancy(capability, KernelLaunch { threads: 128, registers: 32, shared_bytes: tile.shared.0 });
            let held = blocks.ok().and_then(|o| o.blocks_by.into_iter().find(|b| b.0 == Limit::SharedMemory));
            let fits = match held {
                None => "the tile does not fit".to_owned(),
                Some((_, n)) => format!("a multiprocessor holds {n} such blocks"),
            };
            answer += &format!("\ncompute capability {capability} allows {most} of shared memory per block; {fits}");
        }
        page.blocks.push(PageBlock::Answer(answer));
        page.json["tile"] = json!(tile);
        rows.extend([scores, softmax, values, steps, fused]);
    }
    page.blocks.push(PageBlock::Table(table));
    finish(&roof, page, &rows, &[]);
    Ok(())
}

/// Every op of a model's step, and sums by scope.
fn model(args: &PlanKernelArgs, path: &Path, page: &mut Page) -> Result<()> {
    let reading = read_model(path, args.cache_bits)?;
    if args.new > args.context {
        return Err(refused("--new", args.new, &format!("is more than the {} tokens of --context", args.context)));
    }
    if args.context > reading.max_context {
        let why = format!("exceeds the model's maximum of {}", reading.max_context);
        return Err(refused("--context", args.context, &why));
    }
    if reading.heads > 0 && !reading.heads.is_multiple_of(args.tp) {
        let why = format!("does not divide {} heads", reading.heads);
        return Err(refused("--tp", args.tp, &why));
    }
    let machine = serving_machine(&Calibration::default(), &args.device, args.weights)?;
    let precision = if args.weights == Quantisation::Fp8 { Precision::Fp8 } else { Precision::Bf16 };
    let roof = Roof { machine, ..Roof::find(&args.device, precision)? };
    let cache_bytes = args.cache_bits as f64 / 8.0;
    let step = ModelStep {
        tp: args.tp,
        batch: args.batch,
        new: args.new,
        context: args.context,
        weights: args.weights,
        cache_bytes,
    };
    let kinds = roof.model(&reading, &step);
    let all: Vec<&RooflineRow> = kinds.iter().flat_map(|k| &k.1).collect();
    let total = Roof::sum("step", &all);
    let rank = if args.tp > 1 { format!(", one of {} ranks, without communication", args.tp) } else { String::new() };
    page.title = format!(
        "{} with {} parameters on {}{rank}: {} x {} tokens of {}",
        reading.family,
        grouped(reading.parameters),
        roof.device.name,
        args.batch,
        grouped(args.new as u64),
        grouped(args.context as u64)
    );
    page.blocks.push(PageBlock::Answer(format!(
        "a step has {} and {}: {}, ridge point {}; mostly bound by {}; {} at least, {} expected without gaps between kernels",
        total.flops,
        total.bytes,
        total.intensity,
        roof.ridge_point(),
        total.bound,
        total.floor,
        total.expected
    )));
    let weights = reading.parameters as f64 * args.weights.bits() / 8.0 / args.tp as f64;
    if weights > roof.machine.memory {
        page.blocks.push(PageBlock::Text(format!(
            "about {} of weights do not fit a {}: times assume a device with enough memory; --tp shards the weights",
            Bytes(weights as u64),
            roof.device.name
        )));
    }
    for (name, rows) in &kinds {
        let mut table = PageTable::with_head(name.clone(), COLUMNS);
        for row in rows {
            table.push(cells(row), formula(row));
        }
        page.blocks.push(PageBlock::Table(table));
    }
    let mut sums: Vec<RooflineRow> = Vec::new();
    let scope = |row: &RooflineRow| row.scope.split('.').next().unwrap_or_default().to_owned();
    for row in &all {
        let scope = scope(row);
        if sums.iter().all(|s| s.scope != scope) {
            let of: Vec<&RooflineRow> =
                all.iter().copied().filter(|r| scope == r.scope.split('.').next().unwrap_or_default()).collect();
            sums.push(Roof::sum(scope, &of));
        }
    }
    sums.push(total);
    let mut table = PageTable::with_head("by scope", COLUMNS);
    for sum in &sums {
        let name = if sum.scope.is_empty() { "residuals" } else { &sum.scope };
        table.push(cells(&RooflineRow { scope: name.to_owned(), ..sum.clone() }), "sums of floors and times");
    }
    page.blocks.push(PageBlock::Table(table));
    page.json["step"] = json!(step);
    let owned: Vec<RooflineRow> = all.into_iter().cloned().collect();
    finish(&roof, page, &owned, &sums);
    Ok(())
}

fn formula(row: &RooflineRow) -> &'static str {
    match row.class {
        Some(Class::Matmul) => "2 FLOPs per weight and token; weights in their format, inputs and outputs of 2 B",
        Some(Class::Experts) => {
            "2 FLOPs per weight of a token's experts; weights of the active experts, E (1 - (1 - k / E)^tokens)"
        }
        Some(Class::Attention) => "4 FLOPs per head, pair and element; the cache is read once per sequence",
        _ => "inputs read and outputs written once",
    }
}

/// The common parts of rooflines: the figure, the sources and the JSON object.
fn finish(roof: &Roof, page: &mut Page, rows: &[RooflineRow], sums: &[RooflineRow]) {
    let shown: Vec<&RooflineRow> = rows.iter().chain(sums.iter().filter(|s| s.scope == "step")).collect();
    page.panels.push(roof.chart(&page.title, &shown).into());
    let bandwidth = &roof.device.memory_bandwidth;
    page.sources.push(format!("{}: rates {} by {}", roof.device.name, bandwidth.provenance, bandwidth.source));
    if let Some(shared) = roof.shared_bandwidth() {
        let rate = BytesPerSecond(shared);
        page.sources.push(format!(
            "shared memory, {rate}: modelled, 32 banks of 4 B per clock cycle, at the clock of the sheet's f32 rate (CUDA C++ Programming Guide)"
        ));
    }
    page.sources.push("FLOPs and bytes: modelled, each input read and each output written once".into());
    page.sources.push(format!("expected: modelled, by efficiencies {}", roof.machine.efficiency.source));
    page.assume(&roof.machine);
    page.json["roofline"] = json!({
        "device": roof.device.name, "precision": roof.precision, "ridge_point": roof.ridge_point(),
        "shared_bytes_per_second": roof.shared_bandwidth(), "rows": rows, "sums": sums,
    });
}

fn launch(args: &PlanKernelArgs, launch: KernelLaunch, page: &mut Page) -> Result<()> {
    let capability = match &args.capability {
        Some(typed) => typed.clone(),
        None => ridge_hw::spec::DeviceSpec::find(&args.device)
            .map_err(ridge_plan::PlanError::from)?
            .compute_capability
            .clone()
            .ok_or_else(|| refused("--device", &args.device, "has no compute capability; give --capability"))?,
    };
    let found = occupancy(&capability, launch)?;
    let limited: Vec<String> = found.limited_by.iter().map(ToString::to_string).collect();
    let answer = format!(
        "occupancy {:.1} %: {} blocks, {} of {} warps per multiprocessor at {capability}, limited by {}",
        100.0 * found.fraction(),
        found.blocks,
        found.warps,
        found.max_warps,
        limited.join(" and "),
    );
    if page.title.is_empty() {
        page.title = format!(
            "a block of {} threads, {} registers per thread, {} of shared memory",
            launch.threads,
            launch.registers,
            Bytes(launch.shared_bytes)
        );
    }
    page.blocks.push(PageBlock::Answer(answer));
    let mut table = PageTable { caption: "blocks by each limit".into(), ..PageTable::default() };
    for (limit, blocks) in &found.blocks_by {
        table.push([limit.to_string(), blocks.to_string()], limit.formula());
    }
    page.blocks.push(PageBlock::Table(table));
    page.panels.push(over_registers(&capability, launch).into());
    page.sources
        .push("limits: specified, CUDA C++ Programming Guide, Technical Specifications per Compute Capability".into());
    page.sources.push("occupancy: modelled by its rules and those of cuda_occupancy.h".into());
    page.json["occupancy"] = json!(found);
    page.json["fraction"] = json!(found.fraction());
    Ok(())
}

/// Resident warps over registers per thread.
fn over_registers(capability: &str, launch: KernelLaunch) -> Chart {
    let warps = |registers| {
        let found: Option<Occupancy> = occupancy(capability, KernelLaunch { registers, ..launch }).ok();
        (registers as f64, found.map_or(0.0, |o| o.warps as f64))
    };
    let title = format!(
        "Resident warps: {} threads, {} of shared memory, compute capability {capability}",
        launch.threads,
        Bytes(launch.shared_bytes)
    );
    let axis = |label: &str| Axis::linear(label, Unit::Number);
    let mut chart = Chart::new(title, axis("registers per thread"), axis("warps per multiprocessor"))
        .with(Series::new("warps", Style::Line, (1..=255).map(warps)));
    chart.marks.push(Mark { name: "this launch".into(), x: launch.registers as f64 });
    chart
}

fn access(args: &PlanKernelArgs, stride: u64, access: &Access, page: &mut Page) {
    let mut table = PageTable::default();
    if page.title.is_empty() {
        page.title = format!("a warp's access of {} bytes per lane, {} bytes apart", args.width, stride);
    } else {
        table.caption = "a warp's access".into();
    }
    let global = format!("{} sectors of 32 bytes, {:.1} % of them used", access.sectors(), 100.0 * access.efficiency());
    let shared =
        format!("{} passes, {:.1} times those without conflicts", access.shared_passes(), access.conflict_ways());
    table.push(["  global memory".to_owned(), global], "distinct sectors of 32 B that 32 lanes touch");
    table.push(["  shared memory".to_owned(), shared], "the most distinct words of a bank, of 32 banks of 4 B");
    page.blocks.push(PageBlock::Table(table));
    page.sources.push("sectors and banks: modelled by the rules of the CUDA C++ Best Practices Guide".into());
    page.json["access"] = access_json(access);
}

fn access_json(a: &Access) -> Value {
    json!({ "sectors": a.sectors(), "efficiency": a.efficiency(), "shared_passes": a.shared_passes(),
        "conflict_ways": a.conflict_ways() })
}
