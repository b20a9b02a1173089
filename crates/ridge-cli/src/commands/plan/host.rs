//! `ridge plan fit --gpu-memory`: the weights that the engine would keep in memory of the host, and the time of a step that
//! reads them over the link.

use ridge::{HostPlan, HostPlanSettings, NumberSettings};
use ridge_engine::costs::StepWork;
use ridge_graph::DType;
use ridge_hw::roofline::Bound;
use ridge_hw::spec::{DeviceSpec, Precision};
use ridge_hw::units::{Bytes, BytesPerSecond};
use ridge_plan::PlanError;
use ridge_plan::efficiency::Machine;
use ridge_plan::ledger::Quantisation;
use serde_json::{Value, json};

use super::page::{Page, PageArgs, PageBlock, PageTable, seconds};
use super::target::{TargetArgs, sources, sources_json};
use crate::error::{Result, refused};
use crate::output::{Spinner, count, grouped};

/// Share of a link's specified rate that copies of page-locked memory reach: PCIe sends headers with every 256 bytes at most, and
/// waits for credits.
const LINK_SHARE: f64 = 0.86;

/// Sequences of the steps that are shown beside those of one.
const BATCHES: [usize; 2] = [4, 16];

/// Tokens of a step unless they are given: those of `ridge generate`.
const STEP_TOKENS: usize = 512;

/// The time of a step.
struct StepTime {
    /// Tokens that it gives or takes.
    tokens: usize,
    /// Weights in host memory, with room on the GPU for the cache of its sequences.
    on_host: Bytes,
    work: StepWork,
    device: f64,
    link: f64,
    seconds: f64,
}

impl StepTime {
    /// Kernels read experts in place one after another with all others; copies run beside them.
    fn new(tokens: usize, on_host: Bytes, work: StepWork, machine: &Machine, link: BytesPerSecond) -> Self {
        let products = machine.peak * machine.efficiency.matmul;
        let device = (work.bytes as f64 / machine.stream).max(work.matrix_flops / products);
        let over = |bytes: u64| bytes as f64 / link.as_f64();
        let crossing = over(work.host.bytes());
        Self { tokens, on_host, work, device, link: crossing, seconds: crossing.max(over(work.host.in_place) + device) }
    }

    fn bound(&self, machine: &Machine) -> Bound {
        let memory = self.work.bytes as f64 / machine.stream;
        match (self.link > self.device, memory < self.device) {
            (true, _) => Bound::HostLink,
            (false, true) => Bound::Compute,
            (false, false) => Bound::Memory,
        }
    }

    fn json(&self, machine: &Machine) -> Value {
        json!({
            "tokens": self.tokens, "host_weight_bytes": self.on_host, "host_bytes": self.work.host.bytes(),
            "host_bytes_in_place": self.work.host.in_place, "device_bytes": self.work.bytes, "seconds": self.seconds,
            "link_seconds": self.link, "device_seconds": self.device, "limit": self.bound(machine),
            "tokens_per_second": self.tokens as f64 / self.seconds,
        })
    }
}

/// A step that is shown: its time, or why its sequences do not fit.
struct ShownStep {
    what: String,
    time: Result<StepTime, String>,
}

impl ShownStep {
    fn json(&self, machine: &Machine) -> Value {
        let mut json = match &self.time {
            Ok(time) => time.json(machine),
            Err(why) => json!({ "why": why }),
        };
        json["step"] = self.what.clone().into();
        json["fits"] = self.time.is_ok().into();
        json
    }

    fn show(&self, table: &mut PageTable, machine: &Machine) {
        match &self.time {
            Ok(s) => {
                let cells = [
                    self.what.clone(),
                    s.on_host.to_string(),
                    Bytes(s.work.host.bytes()).to_string(),
                    Bytes(s.work.host.in_place).to_string(),
                    seconds(s.device),
                    seconds(s.seconds),
                    format!("{:.1}", s.tokens as f64 / s.seconds),
                    s.bound(machine).to_string(),
                ];
                let formula = format!("max(link {}, in place + GPU {})", seconds(s.link), seconds(s.device));
                table.push(cells, formula);
            }
            Err(why) => table.push([self.what.clone(), "does not fit".to_owned()], why.clone()),
        }
    }
}

/// A plan of the engine on one GPU of limited memory.
pub(super) struct HostFit<'a> {
    pub(super) target: &'a TargetArgs,
    /// Maximum memory of the GPU.
    pub(super) gpu_memory: Bytes,
    /// Dtype of the cache.
    pub(super) cache: DType,
    /// Rate of the link, if it is given.
    pub(super) host_link: Option<BytesPerSecond>,
    pub(super) context: Option<usize>,
    pub(super) step_tokens: Option<usize>,
    pub(super) page: &'a PageArgs,
}

/// The rate of the link to the host, and where it comes from.
fn link(args: &HostFit<'_>, sheet: &DeviceSpec) -> Result<(BytesPerSecond, String)> {
    if let Some(rate) = args.host_link {
        if rate.as_f64() <= 0.0 {
            return Err(refused("--host-link", rate, "must be above 0, such as 55GB/s"));
        }
        return Ok((rate, format!("host link: {rate}, given by --host-link")));
    }
    let Some(link) = &sheet.host_link else {
        let why = format!("the sheet of {} has no rate of it; give --host-link, such as 55GB/s", sheet.name);
        return Err(refused("--host-link", "", &why));
    };
    let rate = BytesPerSecond(link.value.as_f64() * LINK_SHARE);
    Ok((rate, format!("host link: {rate}, {LINK_SHARE} of the {} specified by its sheet", link.value)))
}

/// The plan, or why it does not fit, in the options of `ridge plan fit`.
fn planned(plan: Result<HostPlan, ridge::Error>) -> Result<Result<HostPlan, String>> {
    match plan {
        Ok(plan) => Ok(Ok(plan)),
        Err(ridge::Error::Memory { what, needed, available, .. }) => Ok(Err(format!(
            "{what} need {needed}, but at most {available} may be allocated; raise --gpu-memory, or lower --context or \
             --step-tokens"
        ))),
        Err(other) => Err(other.into()),
    }
}

pub(super) fn run(args: &HostFit<'_>) -> Result<()> {
    let (config, source) = args.target.config_and_weights()?;
    let sheet = DeviceSpec::find(&args.target.device).map_err(PlanError::from)?;
    if args.gpu_memory > sheet.memory.value {
        let why = format!("exceeds the memory of {}, {}", sheet.name, sheet.memory.value);
        return Err(refused("--gpu-memory", args.gpu_memory, &why));
    }
    // What products of prompts multiply, where the device has a rate for it.
    let precision = match Quantisation::of_source(&config, &source)?.unwrap_or(Quantisation::Bf16) {
        Quantisation::File { precision, .. } if sheet.dense_rates.contains_key(&precision) => precision,
        _ => Precision::Bf16,
    };
    let machine = args.target.machine(precision)?;
    let (rate, rate_source) = link(args, sheet)?;
    let context = args.context.unwrap_or(8192.min(config.max_context()));
    if context > config.max_context() {
        let why = format!("exceeds the model's context; the longest is {}", config.max_context());
        return Err(refused("--context", context, &why));
    }
    let chunk = args.step_tokens.unwrap_or(STEP_TOKENS).min(context);
    let numbers =
        NumberSettings { dtype: Some(DType::BF16), cache_dtype: Some(args.cache), ..NumberSettings::default() };
    let gpu_memory = args.gpu_memory;
    let spinner = Spinner::new();
    let plan = |sequences: usize| {
        // All programs of the engine are compiled, and buckets of theirs planned, which takes seconds for large models.
        spinner.now(format!("planning the engine's steps of {}", count(sequences, "sequence")));
        let settings = HostPlanSettings { gpu_memory, context, sequences, chunk };
        planned(HostPlan::new(&config, &source, &numbers, sheet, settings))
    };
    let title = format!("{} on {} with {gpu_memory} of its memory", config.model_type(), machine.name);
    let one = match plan(1)? {
        Ok(one) => one,
        Err(why) => {
            let json = json!({ "device": machine.name, "gpu_memory": gpu_memory, "context": context });
            return args.page.shown.does_not_fit(&title, &why, json);
        }
    };
    let time = |plan: &HostPlan, sequences: &[(usize, usize)], tokens: usize| -> Result<StepTime> {
        Ok(StepTime::new(tokens, plan.on_host.bytes, plan.step(sequences)?, &machine, rate))
    };
    let token = time(&one, &[(context / 2, 1)], 1)?;
    let of_one = (Bytes(token.work.host.bytes()), token.seconds);
    let mut steps = vec![ShownStep { what: "a token each of 1".to_owned(), time: Ok(token) }];
    for batch in BATCHES {
        // Its cache and workspace leave less room for weights.
        let time = match plan(batch)? {
            Ok(plan) => Ok(time(&plan, &vec![(context / 2, 1); batch], batch)?),
            Err(why) => Err(why),
        };
        steps.push(ShownStep { what: format!("a token each of {batch}"), time });
    }
    let what = format!("{} tokens of a prompt", grouped(chunk as u64));
    steps.push(ShownStep { what, time: Ok(time(&one, &[(0, chunk)], chunk)?) });
    drop(spinner);
    let page = page((&machine, rate_source), title, (&one, of_one), (gpu_memory, context, &steps));
    args.page.show(&page)
}

fn page(
    (machine, rate_source): (&Machine, String),
    title: String,
    (plan, (token_bytes, token_seconds)): (&HostPlan, (Bytes, f64)),
    (limit, context, steps): (Bytes, usize, &[ShownStep]),
) -> Page {
    let used = plan.on_gpu + plan.cache + plan.workspace;
    let mut memory = PageTable::with_head("memory with one sequence", ["what", "where", "bytes"]);
    let whole = |bytes: Bytes| bytes.to_string();
    for (what, place, bytes) in [
        ("weights", "GPU", plan.on_gpu),
        ("cache of a sequence", "GPU", plan.cache),
        ("workspace, with slots of fetched weights", "GPU", plan.workspace),
        ("free", "GPU", Bytes(limit.0.saturating_sub(used.0))),
        ("weights", "host", plan.on_host.bytes),
    ] {
        memory.push([what.to_owned(), place.to_owned(), whole(bytes)], "as the engine admits it");
    }
    let head = ["step", "on the host", "over the link", "in place", "on the GPU", "time", "tok/s", "limit"];
    let mut table =
        PageTable::with_head(format!("steps, with {} tokens in the cache", grouped(context as u64 / 2)), head);
    steps.iter().for_each(|step| step.show(&mut table, machine));
    let answer = match plan.on_host.bytes {
        Bytes(0) => "everything fits into GPU memory; nothing is kept in host memory".to_owned(),
        bytes => format!(
            "{bytes} of weights ({} tensors) are kept in host memory; a token reads {} of them, in {}",
            plan.on_host.names.len(),
            token_bytes,
            seconds(token_seconds)
        ),
    };
    let mut of_device = sources(machine);
    of_device.push(rate_source);
    let mut page = Page {
        title,
        blocks: vec![PageBlock::Table(memory), PageBlock::Table(table), PageBlock::Answer(answer)],
        sources: of_device,
        json: json!({
            "device": machine.name, "gpu_memory": limit, "context": context, "fits": true,
            "gpu_weight_bytes": plan.on_gpu, "host_weight_bytes": plan.on_host.bytes,
            "host_weights": plan.on_host.names, "cache_bytes": plan.cache, "workspace_bytes": plan.workspace,
            "steps": steps.iter().map(|s| s.json(machine)).collect::<Vec<_>>(), "sources": sources_json(machine),
        }),
        ..Page::default()
    };
    page.given("maximum GPU memory", limit, "--gpu-memory");
    page.given("tokens per sequence", context, "--context");
    page.assume(machine);
    page
}
