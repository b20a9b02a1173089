//! The numbers of a trace: how the busiest device's time divides, and what the host did while it was idle.

use std::collections::HashMap;

use ridge_hw::roofline::Roofline;
use ridge_hw::spec::{DeviceSpec, Precision};
use ridge_hw::units::{Bytes, BytesPerSecond, Flops, FlopsPerSecond};
use serde::Serialize;

use super::trace::{Trace, TraceKernel, TraceSpan};
use crate::error::PlanError;

/// A name with seconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NamedTime {
    /// Which.
    pub name: String,
    /// How long.
    pub seconds: f64,
}

/// Numbers of the busiest device. Shares are of `seconds` and sum to one: matmul, attention, other, copies,
/// communication, idle.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Measured {
    /// From the first kernel's begin to the last one's end.
    pub seconds: f64,
    /// The device, by its driver's name, where the trace tells.
    pub device: Option<String>,
    /// Are the kernels operators of a CPU, since the trace has no device?
    pub on_cpu: bool,
    /// Devices of the trace.
    pub devices: usize,
    /// Kernels, copies aside.
    pub kernels: usize,
    /// Their mean length in seconds.
    pub mean_kernel: f64,
    /// Kernels a second.
    pub kernels_per_second: f64,
    /// Matrix products.
    pub matmul: f64,
    /// Attention.
    pub attention: f64,
    /// Other kernels: norms, activations, elementwise.
    pub other: f64,
    /// Copies that no kernel runs beside.
    pub copies: f64,
    /// Communication that no kernel runs beside.
    pub communication: f64,
    /// Communication that kernels run beside.
    pub hidden_communication: f64,
    /// Nothing.
    pub idle: f64,
    /// Gaps.
    pub gaps: usize,
    /// Share of idle time in gaps shorter than 30 microseconds.
    pub short_gaps: f64,
    /// Median seconds from a launch to its kernel's begin, where the trace relates them.
    pub queue: Option<f64>,
    /// Share of the time in which the host was inside launches.
    pub launching: f64,
    /// What the host did in the longest gaps.
    pub in_gaps: Vec<NamedTime>,
    /// Share of gaps' time in which it did nothing that was recorded.
    pub unknown_gaps: f64,
    /// The kernels that take longest.
    pub longest: Vec<NamedTime>,
    /// FLOP/s of matrix products or of all kernels, where the trace tells.
    pub flops_per_second: Option<f64>,
    /// Bytes per second of kernels, where the trace tells.
    pub bytes_per_second: Option<f64>,
    /// Rates of the device.
    #[serde(skip)]
    pub roofline: Option<Roofline>,
    /// Share of the kernels' floors that is arithmetic, where the trace tells FLOPs and bytes or shapes.
    pub compute_floor: Option<f64>,
    /// EventListSeed whose times cannot be.
    pub ignored: usize,
}

/// A gap that a launch explains: launches take some 5 microseconds, with the framework's part 10 to 20.
pub(super) const SHORT: f64 = 30e-6;
/// Gaps that are looked into.
const MAX_GAPS: usize = 2000;
/// Names that are told.
const TOLD: usize = 5;

#[derive(Clone, Copy, PartialEq, Eq)]
enum KernelClass {
    Matmul,
    Attention,
    Other,
    Communication,
}

fn class(name: &str) -> KernelClass {
    let name = name.to_ascii_lowercase();
    let has = |words: &[&str]| words.iter().any(|w| name.contains(w));
    if has(&[
        "nccl",
        "rccl",
        "allreduce",
        "all_reduce",
        "allgather",
        "all_gather",
        "reducescatter",
        "reduce_scatter",
        "alltoall",
        "all_to_all",
        "sendrecv",
        "cross_device_reduce",
        "deep_ep",
        "nvshmem",
        "c10d::",
    ]) {
        KernelClass::Communication
    } else if has(&["flash", "fmha", "attention", "attn"]) {
        KernelClass::Attention
    } else if has(&[
        "gemm",
        "gemv",
        "cublas",
        "cutlass",
        "nvjet",
        "matmul",
        "wgmma",
        "linear",
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "conv",
    ]) {
        KernelClass::Matmul
    } else {
        KernelClass::Other
    }
}

/// Intervals joined where they meet, by their begins.
fn union(mut spans: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    spans.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut joined: Vec<(f64, f64)> = Vec::new();
    for (start, end) in spans {
        match joined.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => joined.push((start, end)),
        }
    }
    joined
}

fn length(spans: &[(f64, f64)]) -> f64 {
    spans.iter().map(|(start, end)| end - start).sum()
}

/// Operators that others take less than half of: what a CPU does in place of kernels. Those inside one are a part of it.
fn innermost(mut ops: Vec<TraceSpan>) -> Vec<TraceKernel> {
    ops.sort_by(|a, b| a.on.cmp(&b.on).then(a.start.total_cmp(&b.start)).then(b.end.total_cmp(&a.end)));
    // Time of each one's children.
    let mut inside = vec![0.0; ops.len()];
    let mut open: Vec<usize> = Vec::new();
    let covers = |outer: &TraceSpan, inner: &TraceSpan| {
        outer.on == inner.on && inner.end <= outer.end && inner.start < outer.end
    };
    for (i, op) in ops.iter().enumerate() {
        while open.last().is_some_and(|&outer| !covers(&ops[outer], op)) {
            open.pop();
        }
        if let Some(&outer) = open.last() {
            inside[outer] += op.end - op.start;
        }
        open.push(i);
    }
    let mut kernels: Vec<TraceKernel> = Vec::new();
    let mut last: Option<TraceSpan> = None;
    for (op, inside) in ops.iter().zip(inside) {
        let taken = last.is_some_and(|outer| covers(&outer, op));
        if !taken && 2.0 * inside < op.end - op.start {
            last = Some(*op);
            let span = TraceSpan { on: 0, ..*op };
            kernels.push(TraceKernel { span, copy: false, correlation: None, flops: 0.0, bytes: 0.0 });
        }
    }
    kernels
}

fn longest_first(of: HashMap<u32, f64>, names: &[String]) -> Vec<NamedTime> {
    let mut all: Vec<(u32, f64)> = of.into_iter().collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    all.truncate(TOLD);
    all.into_iter().map(|(name, seconds)| NamedTime { name: names[name as usize].clone(), seconds }).collect()
}

impl Measured {
    pub(super) fn of(mut trace: Trace, given: Option<Roofline>) -> Result<Self, PlanError> {
        let on_cpu = trace.kernels.is_empty();
        if on_cpu {
            trace.kernels = innermost(std::mem::take(&mut trace.ops));
        }
        let mut busy: HashMap<u64, f64> = HashMap::new();
        for k in &trace.kernels {
            *busy.entry(k.span.on).or_default() += k.span.end - k.span.start;
        }
        let Some(device) = busy.iter().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(a.0))).map(|(d, _)| *d) else {
            return Err(PlanError::Trace {
                problem: "it has no kernels or operators with a duration".to_owned(),
                remedy: "record it with ProfilerActivity.CUDA and CPU, or with ridge bench --trace".to_owned(),
            });
        };
        let devices = busy.len();
        let mut kernels = std::mem::take(&mut trace.kernels);
        kernels.retain(|k| k.span.on == device);
        let start = kernels.iter().map(|k| k.span.start).fold(f64::INFINITY, f64::min);
        let end = kernels.iter().map(|k| k.span.end).fold(f64::NEG_INFINITY, f64::max);
        let seconds = end - start;
        if !(seconds > 0.0 && seconds.is_finite()) {
            return Err(PlanError::Trace {
                problem: "its kernels have zero duration".to_owned(),
                remedy: "record several steps, after a warm-up step".to_owned(),
            });
        }
        let roofline = trace
            .rates
            .map(|(flops, bytes)| Roofline { bandwidth: BytesPerSecond(bytes), peak: FlopsPerSecond(flops) })
            .or(given)
            .or_else(|| {
                let name = trace.device.as_deref()?.trim_start_matches("NVIDIA ");
                DeviceSpec::find(name).ok()?.roofline(Precision::Bf16).ok()
            });
        let mut made = Self {
            seconds,
            device: trace.device.clone(),
            on_cpu,
            devices,
            ignored: trace.ignored,
            launching: (trace.launching / seconds).min(1.0),
            roofline,
            ..Self::default()
        };
        let classes: Vec<KernelClass> = trace.names.iter().map(|name| class(name)).collect();
        made.divide(&kernels, &classes, &trace.names);
        made.gaps(&kernels, &trace, (start, end));
        made.queue = queue(&kernels, &trace.launches);
        made.rates(&kernels, &classes, &trace);
        Ok(made)
    }

    /// Shares of the time.
    fn divide(&mut self, kernels: &[TraceKernel], classes: &[KernelClass], names: &[String]) {
        let of = |k: &TraceKernel| classes[k.span.name as usize];
        let spans = |keep: &dyn Fn(&TraceKernel) -> bool| -> Vec<(f64, f64)> {
            union(kernels.iter().filter(|k| keep(k)).map(|k| (k.span.start, k.span.end)).collect())
        };
        let computing = |k: &TraceKernel| !k.copy && of(k) != KernelClass::Communication;
        let compute = length(&spans(&computing));
        let with_copies = length(&spans(&|k| k.copy || computing(k)));
        let all = length(&spans(&|_| true));
        let communication = length(&spans(&|k| !k.copy && of(k) == KernelClass::Communication));
        self.copies = (with_copies - compute) / self.seconds;
        self.communication = (all - with_copies) / self.seconds;
        self.hidden_communication = (communication - (all - with_copies)).max(0.0) / self.seconds;
        self.idle = (1.0 - all / self.seconds).max(0.0);
        // Kernels on several streams share their time by what each would take.
        let mut sums = [0.0_f64; 3];
        let mut by_name: HashMap<u32, f64> = HashMap::new();
        for k in kernels.iter().filter(|k| !k.copy) {
            let time = k.span.end - k.span.start;
            *by_name.entry(k.span.name).or_default() += time;
            self.kernels += 1;
            match of(k) {
                KernelClass::Matmul => sums[0] += time,
                KernelClass::Attention => sums[1] += time,
                KernelClass::Other => sums[2] += time,
                KernelClass::Communication => {}
            }
            self.mean_kernel += time;
        }
        self.mean_kernel /= self.kernels.max(1) as f64;
        self.kernels_per_second = self.kernels as f64 / self.seconds;
        let total: f64 = sums.iter().sum();
        let share = |sum: f64| if total > 0.0 { sum / total * compute / self.seconds } else { 0.0 };
        (self.matmul, self.attention, self.other) = (share(sums[0]), share(sums[1]), share(sums[2]));
        self.longest = longest_first(by_name, names);
    }

    /// Gaps, and what the host did in the longest.
    fn gaps(&mut self, kernels: &[TraceKernel], trace: &Trace, (_, end): (f64, f64)) {
        let busy = union(kernels.iter().map(|k| (k.span.start, k.span.end)).collect());
        let mut gaps: Vec<(f64, f64)> = busy.windows(2).map(|w| (w[0].1, w[1].0)).collect();
        debug_assert!(busy.last().is_none_or(|last| last.1 <= end));
        let total = length(&gaps);
        self.gaps = gaps.len();
        if total <= 0.0 {
            return;
        }
        let short: f64 = gaps.iter().map(|(a, b)| b - a).filter(|g| *g < SHORT).sum();
        self.short_gaps = short / total;
        gaps.sort_by(|a, b| (b.1 - b.0).total_cmp(&(a.1 - a.0)));
        gaps.truncate(MAX_GAPS);
        gaps.sort_by(|a, b| a.0.total_cmp(&b.0));
        let looked = length(&gaps);
        // The shortest event that covers a gap's middle is what the host was in.
        let middles: Vec<f64> = gaps.iter().map(|(a, b)| f64::midpoint(*a, *b)).collect();
        let mut inside: Vec<Option<(f64, u32)>> = vec![None; gaps.len()];
        for span in if self.on_cpu { &[][..] } else { &trace.host[..] } {
            let first = middles.partition_point(|m| *m < span.start);
            let last = middles.partition_point(|m| *m < span.end);
            let long = span.end - span.start;
            for found in &mut inside[first..last] {
                if found.is_none_or(|(shortest, _)| long < shortest) {
                    *found = Some((long, span.name));
                }
            }
        }
        let mut by_name: HashMap<u32, f64> = HashMap::new();
        let mut unknown = 0.0;
        for ((a, b), found) in gaps.iter().zip(inside) {
            match found {
                Some((_, name)) => *by_name.entry(name).or_default() += b - a,
                None => unknown += b - a,
            }
        }
        self.unknown_gaps = unknown / looked;
        self.in_gaps = longest_first(by_name, &trace.names);
        // The gaps that were not looked into are like those that were.
        self.in_gaps.iter_mut().for_each(|n| n.seconds *= total / looked);
    }

    /// What is reached, where the trace has FLOPs and bytes of kernels or shapes of products.
    fn rates(&mut self, kernels: &[TraceKernel], classes: &[KernelClass], trace: &Trace) {
        let told = || kernels.iter().filter(|k| !k.copy && (k.flops > 0.0 || k.bytes > 0.0));
        let time: f64 = told().map(|k| k.span.end - k.span.start).sum();
        if time > 0.0 {
            let flops: f64 = told().map(|k| k.flops).sum();
            let bytes: f64 = told().map(|k| k.bytes).sum();
            self.flops_per_second = (flops > 0.0).then_some(flops / time);
            self.bytes_per_second = (bytes > 0.0).then_some(bytes / time);
            if let Some(roofline) = self.roofline {
                // Kernels whose floor is arithmetic, by their time.
                let arithmetic =
                    |k: &&TraceKernel| k.flops / roofline.peak.as_f64() > k.bytes / roofline.bandwidth.as_f64();
                let bound: f64 = told().filter(arithmetic).map(|k| k.span.end - k.span.start).sum();
                self.compute_floor = Some(bound / time);
            }
            return;
        }
        let products: f64 = kernels
            .iter()
            .filter(|k| !k.copy && classes[k.span.name as usize] == KernelClass::Matmul)
            .map(|k| k.span.end - k.span.start)
            .sum();
        let flops: f64 = trace.products.iter().map(|p| p.flops).sum();
        if products > 0.0 && flops > 0.0 {
            self.flops_per_second = Some(flops / products);
            if let Some(roofline) = self.roofline {
                let floor = |p: &super::trace::TraceProduct| {
                    // Two bytes an element: products in 16 bits.
                    let bytes = Bytes((2.0 * p.elements) as u64);
                    (roofline.floor(Flops(p.flops), bytes).as_f64(), p.flops / roofline.peak.as_f64())
                };
                let floors: Vec<(f64, f64)> = trace.products.iter().map(floor).collect();
                let all: f64 = floors.iter().map(|f| f.0).sum();
                let arithmetic: f64 = floors.iter().filter(|f| f.1 >= f.0).map(|f| f.0).sum();
                self.compute_floor = (all > 0.0).then_some(arithmetic / all);
            }
        }
    }
}

/// Median seconds between a launch and its kernel's begin.
fn queue(kernels: &[TraceKernel], launches: &HashMap<u64, f64>) -> Option<f64> {
    let wait = |k: &TraceKernel| Some(k.span.start - launches.get(&k.correlation?)?);
    let mut waits: Vec<f64> = kernels.iter().filter_map(wait).filter(|w| *w >= 0.0).collect();
    waits.sort_by(f64::total_cmp);
    waits.get(waits.len() / 2).copied()
}
