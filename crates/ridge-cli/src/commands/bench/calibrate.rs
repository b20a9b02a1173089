//! Achievable rates of this machine by class of op, as a file for `ridge plan --efficiency`.
//!
//! The ops are those of a running model: products, attention and passes over activations in a prompt, streamed weights in
//! decoding. An efficiency is the time that the planner predicts for these ops at full rates, divided by the measured
//! time, so a plan of the same model reproduces the measurement.

use std::fmt::Write as _;

use ridge_hw::spec::{DeviceSpec, Precision};
use ridge_models::Model;
use ridge_plan::PlanError;
use ridge_plan::efficiency::{Calibration, Efficiency, Machine};
use ridge_plan::reading::{Class, Reading};

use super::ops::OpTime;
use super::report::BenchResult;
use super::test::BenchTest;
use crate::error::{Result, refused};

/// A two-layer model with the product shapes of an 8B model.
pub(super) const CONFIG: &str = r#"{
  "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2,
  "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 4096, "max_position_embeddings": 8192,
  "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16"
}"#;

/// The measured device.
pub(super) struct CalibratedDevice<'a> {
    /// Its name: the driver's, or `cpu`.
    pub(super) name: &'a str,
    /// Threads of the CPU that compute, if it is one.
    pub(super) threads: Option<usize>,
    /// Bytes a second that reading memory reaches.
    pub(super) memory: f64,
}

/// Time and work of the ops of one class.
#[derive(Default, Clone, Copy)]
struct ClassWork {
    seconds: f64,
    flops: f64,
    bytes: f64,
}

/// The launches of `outcome` that `wanted` selects. Launches timed one by one take longer than within a step, so their sum is
/// scaled to at most the time of the step.
fn sum(outcome: &BenchResult, steps: usize, wanted: fn(&OpTime) -> bool) -> ClassWork {
    let all: f64 = outcome.ops.iter().map(|op| op.seconds).sum();
    let scale = (outcome.median() / steps as f64 / all).min(1.0);
    outcome.ops.iter().filter(|op| wanted(op)).fold(ClassWork::default(), |s, op| ClassWork {
        seconds: s.seconds + scale * op.seconds,
        flops: s.flops + op.flops,
        bytes: s.bytes + op.bytes as f64,
    })
}

fn is_product(op: &OpTime) -> bool {
    op.name.contains("linear")
}

fn is_attention(op: &OpTime) -> bool {
    op.name.contains("attention")
}

/// The text of the file, from tests whose prompts were processed in chunks of `chunk` tokens.
pub(super) fn file(
    device: &CalibratedDevice<'_>,
    model: &Model,
    outcomes: &[BenchResult],
    chunk: usize,
) -> Result<String> {
    let of = |wanted: fn(&BenchTest) -> bool| outcomes.iter().find(|o| wanted(&o.test));
    let prompt = of(|t| matches!(t, BenchTest::Prompt(_)));
    let token = of(|t| matches!(t, BenchTest::Generate(_)));
    let (Some(prompt), Some(token)) = (prompt, token) else {
        return Err(refused(
            "--calibrate",
            "",
            "needs a prompt test and a generation test: set --prompt and --generate above 0",
        ));
    };
    let chunks = prompt.test.steps(chunk).len();
    let products = sum(prompt, chunks, is_product);
    let attention = sum(prompt, chunks, is_attention);
    let passes = sum(prompt, chunks, |op| !is_product(op) && !is_attention(op));
    let streamed = sum(token, token.test.tokens(), is_product);
    if [products, attention, passes, streamed].iter().any(|s| s.seconds <= 0.0) {
        return Err(refused("--calibrate", "", "found no products, attention or elementwise passes in the model"));
    }
    let best = prompt.ops.iter().filter(|op| is_product(op)).map(|op| op.flops / op.seconds).fold(0.0, f64::max);
    let stream = streamed.bytes / streamed.seconds;
    let name = device.name.trim_start_matches("NVIDIA ");
    let mut text =
        String::from("# Written by `ridge bench --calibrate` for `ridge plan fit|train|serve --efficiency`.\n");
    let busy = [prompt, token].into_iter().any(BenchResult::noisy);
    if busy {
        text += "# The machine was busy: its runs differ by more than a tenth. Measure again when it is idle.\n";
    }
    text.push('\n');
    let reading = Reading::new(model)?;
    let rows = prompt.test.steps(chunk).last().copied().unwrap_or(1) as f64;
    let sheet_of = |rate: f64| -> Result<(String, DeviceSpec)> {
        match device.threads {
            None => Ok((String::new(), found(name)?)),
            Some(threads) => {
                let text = cpu_sheet(threads, device.memory.max(stream), rate, model);
                let read = Calibration::parse("the sheet", &text)?.sheet;
                Ok((text, read.ok_or_else(|| refused("--calibrate", "", "produced no specification sheet"))?))
            }
        }
    };
    let (mut described, mut sheet) = sheet_of(best)?;
    let mut matmul = ideal_seconds(&reading, &sheet, rows)? / products.seconds;
    if matmul > 1.0 && device.threads.is_some() {
        // The planner's shape efficiencies imply a peak above the rate of the best product.
        (described, sheet) = sheet_of(best * matmul)?;
        matmul = ideal_seconds(&reading, &sheet, rows)? / products.seconds;
    }
    text += &described;
    if !described.is_empty() {
        text.push('\n');
    }
    let shipped = Efficiency::embedded(&sheet.name)?;
    let peak = sheet.roofline(Precision::Bf16).map_err(PlanError::from)?.peak.as_f64();
    let bandwidth = sheet.memory_bandwidth.value.as_f64();
    let share = |x: f64| (x.clamp(0.001, 1.0) * 1000.0).round() / 1000.0;
    let matmul = share(matmul);
    let efficiency = Efficiency {
        name: sheet.name.clone(),
        matmul,
        serving: matmul,
        attention: share(attention.flops / attention.seconds / peak),
        memory: share(passes.bytes / passes.seconds / bandwidth),
        stream: share(stream / bandwidth),
        source: format!(
            "measured by ridge bench --calibrate on {name}{}: matmul, serving, attention, memory and stream; the others are \
             Ridge's defaults for {}",
            if busy { ", which was busy" } else { "" },
            if shipped.name == sheet.name { &sheet.name } else { "unmeasured devices" }
        ),
        ..shipped
    };
    text += &efficiency.text();
    for outcome in [prompt, token] {
        for op in &outcome.ops {
            let step = outcome.test.name(0);
            let _ = write!(
                text,
                "\n[[measured]]\nstep = \"{step}\"\nop = \"{}\"\nlaunches = {}\nseconds = {:e}\nflops = {:e}\nbytes = {}\n",
                op.name, op.launches, op.seconds, op.flops, op.bytes
            );
        }
    }
    Ok(text)
}

/// The sheet that Ridge has of a GPU.
fn found(name: &str) -> Result<DeviceSpec> {
    let sheet = DeviceSpec::find(name);
    sheet.cloned().map_err(|why| refused("--device", name, &format!("has no specification sheet: {why}")))
}

/// Seconds that the planner predicts for the products of a prompt of `rows` tokens if the best shapes reach the sheet's rate.
fn ideal_seconds(reading: &Reading, sheet: &DeviceSpec, rows: f64) -> Result<f64> {
    let unit = Efficiency { matmul: 1.0, ..Efficiency::embedded(&sheet.name)? };
    let ideal = Machine::of(sheet, unit, Precision::Bf16)?;
    let ops = reading.each_layer().flat_map(|l| &l.ops).filter(|op| op.class == Class::Matmul);
    let of = |n: usize, k: usize| ideal.matmul(Class::Matmul, rows, n as f64, k as f64, 2.0 * (n * k) as f64);
    let head = ideal.matmul_16(1.0, reading.vocab as f64, reading.hidden as f64);
    Ok(ops.map(|op| of(op.n, op.k)).sum::<f64>() + head)
}

/// The sheet of this machine's CPU, with the measured rates.
fn cpu_sheet(threads: usize, bandwidth: f64, products: f64, model: &Model) -> String {
    let memory = ridge_hw::cpu::Cpu::detect().available_memory().map_or(model.weight_bytes(), |b| b.0);
    format!(
        "[sheet]\nname = \"cpu\"\nvendor = \"this machine\"\n\
         memory_bytes = {{ value = {memory}, source = \"system\" }}\n\
         memory_bytes_per_second = {{ value = {bandwidth:e}, source = \"measured\" }}\n\
         compute_units = {{ value = {threads}, source = \"system\" }}\n\n\
         [sheet.dense_flops_per_second]\nbf16 = {{ value = {products:e}, source = \"measured\" }}\n\n\
         [sheet.sources]\nsystem = \"reported by the system: memory that was free, threads that computed\"\n\
         measured = \"measured by ridge bench --calibrate: the fastest reading, the fastest product of a prompt\"\n"
    )
}
