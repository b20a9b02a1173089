//! From numbers to a verdict: the largest loss, told apart where several causes look alike from afar.

use ridge_hw::units::{BytesPerSecond, FlopsPerSecond, Seconds};

use super::measure::{Measured, SHORT};
use super::verdict::{Confidence, Diagnosis, Verdict};
use crate::error::PlanError;

/// Idle or waiting for others less than this, a step's time is its kernels'.
const LITTLE: f64 = 0.25;
/// Communication that counts as the loss.
const MUCH_COMMUNICATION: f64 = 0.2;

/// Words of functions that plan a server's steps.
const SCHEDULING: [&str; 8] = [
    "schedul",
    "get_next_batch",
    "recv_requests",
    "prepare_inputs",
    "detokeni",
    "process_batch_result",
    "update_from_output",
    "sample_next",
];
/// Words of calls in which the host waits for the device.
const WAITING: [&str; 5] = ["synchronize", "_local_scalar_dense", "aten::item", "cudamemcpyasync", "cudaeventquery"];

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn has(name: &str, words: &[&str]) -> bool {
    let name = name.to_ascii_lowercase();
    words.iter().any(|w| name.contains(w))
}

/// Share of what the host did in gaps that has one of `words`.
fn share_of(m: &Measured, words: &[&str]) -> f64 {
    let all: f64 = m.in_gaps.iter().map(|n| n.seconds).sum();
    let found: f64 = m.in_gaps.iter().filter(|n| has(&n.name, words)).map(|n| n.seconds).sum();
    if all > 0.0 { found / all } else { 0.0 }
}

/// Arithmetic or bytes: by floors where the trace tells, else by the share of products and attention.
fn kernels_bound(m: &Measured) -> (Verdict, f64, f64) {
    let busy = m.matmul + m.attention + m.other;
    let arithmetic = m.compute_floor.unwrap_or((m.matmul + m.attention) / busy.max(f64::MIN_POSITIVE));
    let (compute, memory) = (busy * arithmetic, busy * (1.0 - arithmetic) + m.copies);
    if compute >= memory { (Verdict::Compute, compute, memory) } else { (Verdict::Memory, memory, compute) }
}

pub(super) fn judge(m: Measured) -> Result<Diagnosis, PlanError> {
    let (kernels, most, less) = kernels_bound(&m);
    let verdict = if m.communication >= MUCH_COMMUNICATION && m.communication >= m.idle {
        Verdict::Communication
    } else if m.idle >= LITTLE {
        if share_of(&m, &SCHEDULING) > 0.5 {
            Verdict::Scheduler
        } else if m.short_gaps >= 0.5 {
            Verdict::Launch
        } else {
            Verdict::Host
        }
    } else {
        kernels
    };
    let (loss, next) = match verdict {
        Verdict::Communication => (m.communication, m.idle.max(m.other)),
        Verdict::Launch | Verdict::Host | Verdict::Scheduler => (m.idle, m.communication),
        Verdict::Compute | Verdict::Memory => (most, less.max(m.idle).max(m.communication)),
    };
    let (sure, because) = sureness(&m, verdict, loss, next);
    let (experiment, shows) = experiment(&m, verdict);
    Ok(Diagnosis { verdict, sure, because, evidence: evidence(&m), experiment, shows, measured: m })
}

fn sureness(m: &Measured, verdict: Verdict, loss: f64, next: f64) -> (Confidence, String) {
    let idle = matches!(verdict, Verdict::Launch | Verdict::Host | Verdict::Scheduler);
    let ahead = format!("{} of the time, {} for the next cause", percent(loss), percent(next));
    if idle && m.unknown_gaps > 0.5 && verdict != Verdict::Launch {
        return (Confidence::Low, format!("{ahead}; the trace does not show what the host did in most gaps"));
    }
    if m.kernels < 20 {
        return (Confidence::Low, format!("{ahead}; the trace has only {} kernels", m.kernels));
    }
    let guessed = matches!(verdict, Verdict::Compute | Verdict::Memory) && m.compute_floor.is_none();
    if guessed {
        let sure = if loss > 2.0 * next { Confidence::Medium } else { Confidence::Low };
        return (
            sure,
            format!("{ahead}; kernels are classified by name, because the trace lacks shapes or a known device"),
        );
    }
    let between_idle = verdict == Verdict::Launch && m.short_gaps < 0.7;
    match loss / next.max(1e-9) {
        ratio if ratio >= 2.0 && !between_idle => (Confidence::High, ahead),
        ratio if ratio >= 1.25 => (Confidence::Medium, ahead),
        _ => (Confidence::Low, ahead),
    }
}

fn evidence(m: &Measured) -> Vec<String> {
    let mut told = vec![
        format!(
            "{}{} is busy {} of {}",
            m.device.clone().unwrap_or_else(|| if m.on_cpu { "the CPU".into() } else { "the device".into() }),
            if m.devices > 1 { format!(" (the busiest of {})", m.devices) } else { String::new() },
            percent(1.0 - m.idle),
            Seconds(m.seconds)
        ),
        format!(
            "{:.0} {} per second, {} each on average",
            m.kernels_per_second,
            if m.on_cpu { "operators" } else { "kernels" },
            Seconds(m.mean_kernel)
        ),
    ];
    if m.communication + m.hidden_communication > 0.0 {
        told.push(format!(
            "communication: {} of the time exposed, {} overlapped with kernels",
            percent(m.communication),
            percent(m.hidden_communication)
        ));
    }
    if m.gaps > 0 && m.idle > 0.0 {
        told.push(format!(
            "{} gaps of {} on average; {} of the idle time is in gaps below {}",
            m.gaps,
            Seconds(m.idle * m.seconds / m.gaps as f64),
            percent(m.short_gaps),
            Seconds(SHORT)
        ));
    }
    if m.idle >= 0.05 && !m.in_gaps.is_empty() {
        let idle = m.idle * m.seconds;
        let names: Vec<String> =
            m.in_gaps.iter().take(3).map(|n| format!("{} ({})", n.name, percent(n.seconds / idle))).collect();
        told.push(format!("in the gaps the host was in {}", names.join(", ")));
    }
    if let Some(queue) = m.queue {
        told.push(format!(
            "a kernel begins {} after its launch (median): the host is {}",
            Seconds(queue),
            if queue < 50e-6 { "not ahead of the device" } else { "ahead of the device" }
        ));
    }
    if m.launching > 0.0 {
        told.push(format!("the host is inside launches for {} of the time", percent(m.launching)));
    }
    let against = |reached: String, rate: f64, peak: Option<f64>, of: &str| match peak {
        Some(peak) if peak > 0.0 => format!("{reached}, {} of the device's {of}", percent(rate / peak)),
        _ => reached,
    };
    if let Some(rate) = m.flops_per_second {
        let what = if m.bytes_per_second.is_some() { "kernels" } else { "matrix products" };
        let peak = m.roofline.map(|r| r.peak.as_f64());
        told.push(against(format!("{what} reach {}", FlopsPerSecond(rate)), rate, peak, "arithmetic"));
    }
    if let Some(rate) = m.bytes_per_second {
        let peak = m.roofline.map(|r| r.bandwidth.as_f64());
        told.push(against(format!("kernels move {}", BytesPerSecond(rate)), rate, peak, "bandwidth"));
    }
    if m.ignored > 0 {
        told.push(format!("{} events with a missing or invalid time were ignored", m.ignored));
    }
    told
}

/// What to try, and what that would show.
fn experiment(m: &Measured, verdict: Verdict) -> (String, String) {
    let busy = Seconds((1.0 - m.idle) * m.seconds);
    let first = m.in_gaps.first().map_or("the host's work between launches", |n| &n.name);
    let (what, shows) = match verdict {
        Verdict::Launch if m.on_cpu => (
            "compile the model (torch.compile), or double the batch".to_owned(),
            format!("if operator overhead is the limit, the time drops towards the compute time of {busy}, or stays the same with twice the work"),
        ),
        Verdict::Launch => (
            "capture the step as a CUDA graph (torch.compile mode=\"reduce-overhead\"), or double the batch".to_owned(),
            format!("if launches are the limit, {} drops towards the kernel time of {busy}, and twice the batch takes hardly longer", Seconds(m.seconds)),
        ),
        Verdict::Host if share_of(m, &WAITING) > 0.5 => (
            format!("remove synchronisation from the step: {first} (.item(), .cpu(), printing of tensors, copies from pageable memory)"),
            format!("if that is the limit, {} drops towards {busy}; nothing changes if the host is slow elsewhere", Seconds(m.seconds)),
        ),
        Verdict::Host => (
            format!("run the same step on inputs that are created once and stay on the device, and profile {first} with a CPU profiler"),
            format!("if the step becomes {busy}, data loading is the limit: use more workers or prefetching; if not, the code between launches is"),
        ),
        Verdict::Scheduler => (
            format!("prepare the next batch while the device computes (overlapped scheduling), or schedule several steps together; start with {first}"),
            format!("if the scheduler is the limit, a step drops towards {busy}, most at small batches"),
        ),
        Verdict::Communication => (
            "run the step without communication (one rank, or collectives removed), and with twice the micro-batch".to_owned(),
            format!("{} is the most that overlap can gain; `ridge plan comm` shows what the links allow, `ridge plan topology` whether ranks are placed well",
                Seconds(m.communication * m.seconds)),
        ),
        Verdict::Compute => (
            "halve the precision of products (fp8 for bf16), or compare their rate with `ridge plan kernel --matmul` shape by shape".to_owned(),
            format!("products and attention take {}; the time drops by up to half of that, and not at all with faster memory",
                Seconds((m.matmul + m.attention) * m.seconds)),
        ),
        Verdict::Memory => (
            "double the batch, then fuse the elementwise kernels (torch.compile) or store weights and cache in fewer bits".to_owned(),
            "if bytes are the limit, twice the batch takes much less than twice as long while weights dominate, and fewer bits shorten the step in proportion".to_owned(),
        ),
    };
    (what, shows)
}
