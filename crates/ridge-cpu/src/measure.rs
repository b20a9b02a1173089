//! What this machine reaches, measured: reading of memory, and matrix products through Ridge's own kernels.
//!
//! Everything is allocated and filled with random numbers before the clock starts, and kernels have run once. A rate is that of the
//! fastest repetition, the one that the rest of the machine disturbed least; its source says how many there were and
//! what the median was.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use ridge_graph::passes::{Activations, round_activations};
use ridge_graph::sample::Rng;
use ridge_graph::{Bindings, Builder, DType, Dim, FormatRef, Type};
use ridge_hw::figure::Figure;
use ridge_hw::units::{Bytes, BytesPerSecond, Flops, FlopsPerSecond, Seconds};
use ridge_runtime::{Bucket, Compiled, MemoryLedger, MemoryOwner, Result, Session, WeightData};

use crate::backend::{Cpu, CpuOptions};
use crate::bytes::{cast, view};
use crate::memory::AlignedMemory;
#[cfg(target_arch = "x86_64")]
use crate::simd::{Isa, isa};

/// Least bytes that are read between two meetings of the threads.
const LEAST_READ: Bytes = Bytes::from_mib(16);
/// Most repetitions of one measurement.
const MOST: usize = 64;
/// Fewest repetitions, however long they take.
const FEWEST: usize = 3;

/// Memory to read, far larger than any cache, in huge pages where weights would be: small pages are read at little more than
/// half the rate on some virtual machines.
pub struct MemoryProbe {
    memory: AlignedMemory,
}

impl MemoryProbe {
    /// Allocates `size` and fills it with `threads` threads, each a part, so that on a machine of several NUMA nodes
    /// the pages are spread over them.
    ///
    /// # Errors
    /// When the machine does not give so much memory.
    pub fn new(size: Bytes, threads: usize) -> Result<Self> {
        let ledger = Arc::new(MemoryLedger::default());
        let memory = AlignedMemory::zeroed(&ledger, MemoryOwner::States, (size.0 / 8 * 8) as usize)?;
        // SAFETY: no step knows this memory, and this is the only slice of it.
        let words: &mut [u64] = cast(unsafe { memory.bytes_mut() });
        let part = words.len().div_ceil(threads.max(1)).max(1);
        std::thread::scope(|scope| {
            for (seed, part) in words.chunks_mut(part).enumerate() {
                scope.spawn(move || {
                    let mut rng = Rng::new(seed as u64);
                    part.fill_with(|| rng.bits());
                });
            }
        });
        Ok(Self { memory })
    }

    fn words(&self) -> &[u64] {
        // SAFETY: nobody writes this memory once it is filled.
        view(unsafe { self.memory.bytes() })
    }

    /// The rate at which `threads` threads read all of it, each a part, for about `budget`: a pass adds up 64-bit
    /// words, and counts each byte once. Where it is little, threads meet only after several passes.
    pub fn read(&self, threads: usize, budget: Duration) -> Figure<BytesPerSecond> {
        let words = self.words();
        let part = words.len().div_ceil(threads.max(1)).max(1);
        let parts: Vec<&[u64]> = words.chunks(part).collect();
        let (barrier, go) = (Barrier::new(parts.len().max(1)), AtomicBool::new(true));
        let mut times = Times::new(budget);
        let passes = (LEAST_READ.0 / (8 * words.len() as u64).max(1)).clamp(1, 1 << 12);
        let read = |part: &[u64]| {
            for _ in 0..passes {
                black_box(sum(black_box(part)));
            }
        };
        std::thread::scope(|scope| {
            for part in parts.iter().skip(1) {
                let (barrier, go, read) = (&barrier, &go, &read);
                scope.spawn(move || {
                    loop {
                        barrier.wait();
                        if !go.load(Ordering::Acquire) {
                            break;
                        }
                        read(part);
                        barrier.wait();
                    }
                });
            }
            loop {
                go.store(times.wants_more(), Ordering::Release);
                barrier.wait();
                if !go.load(Ordering::Acquire) {
                    break;
                }
                let start = Instant::now();
                if let Some(part) = parts.first() {
                    read(part);
                }
                barrier.wait();
                times.push(start.elapsed());
            }
        });
        let bytes = Bytes(8 * words.len() as u64);
        let rate = |time: Seconds| bytes * passes / time;
        let (best, median) = times.best_and_median();
        let of = if passes > 1 { format!("rounds of {passes} ") } else { String::new() };
        let work = format!("{of}passes over {bytes} by {}", count(parts.len().max(1), "thread"));
        let busy = busy(best, median);
        Figure::measured(rate(best), format!("best of {} {work}; median {}{busy}", times.taken.len(), rate(median)))
    }
}

/// A median so many times the best says that other work ran beside the measurement, or that the clock changed.
const BUSY: f64 = 1.25;

/// What is added to the source of a figure whose repetitions differ much.
fn busy(best: Seconds, median: Seconds) -> &'static str {
    if median.as_f64() > BUSY * best.as_f64() { "; the machine was busy, so it may reach more" } else { "" }
}

/// The sum of all words. With loads written out where the instruction set is known: compilers turn the plain loop into
/// gathers on some, which read a tenth of what memory gives.
fn sum(words: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    match isa() {
        // SAFETY: `isa` found the features on this machine.
        Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx => unsafe { return sum_avx512(words) },
        // SAFETY: `isa` found the features on this machine.
        Isa::Avx2 | Isa::AvxVnni => unsafe { return sum_avx2(words) },
        Isa::Portable => {}
    }
    sum_portable(words)
}

/// Words of four cache lines, which are added to as many partial sums, to keep the loads going.
const STRIDE: usize = 32;

fn sum_portable(words: &[u64]) -> u64 {
    let mut lanes = [0u64; STRIDE];
    let (chunks, rest) = words.as_chunks::<STRIDE>();
    for chunk in chunks {
        for (lane, word) in lanes.iter_mut().zip(chunk) {
            *lane = lane.wrapping_add(*word);
        }
    }
    lanes.iter().chain(rest).fold(0, |total, word| total.wrapping_add(*word))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn sum_avx512(words: &[u64]) -> u64 {
    use std::arch::x86_64::{_mm512_add_epi64, _mm512_loadu_si512, _mm512_reduce_add_epi64, _mm512_setzero_si512};

    let mut lanes = [_mm512_setzero_si512(); STRIDE / 8];
    let (chunks, rest) = words.as_chunks::<STRIDE>();
    for chunk in chunks {
        for (lane, words) in lanes.iter_mut().zip(chunk.as_chunks::<8>().0) {
            // SAFETY: the eight words are there.
            *lane = _mm512_add_epi64(*lane, unsafe { _mm512_loadu_si512(words.as_ptr().cast()) });
        }
    }
    let totals = lanes.map(|lane| _mm512_reduce_add_epi64(lane).cast_unsigned());
    totals.iter().chain(rest).fold(0, |total, word| total.wrapping_add(*word))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_avx2(words: &[u64]) -> u64 {
    use std::arch::x86_64::{_mm256_add_epi64, _mm256_loadu_si256, _mm256_setzero_si256, _mm256_storeu_si256};

    let mut lanes = [_mm256_setzero_si256(); STRIDE / 4];
    let (chunks, rest) = words.as_chunks::<STRIDE>();
    for chunk in chunks {
        for (lane, words) in lanes.iter_mut().zip(chunk.as_chunks::<4>().0) {
            // SAFETY: the four words are there.
            *lane = _mm256_add_epi64(*lane, unsafe { _mm256_loadu_si256(words.as_ptr().cast()) });
        }
    }
    let mut totals = [0u64; STRIDE];
    for (total, lane) in totals.as_chunks_mut::<4>().0.iter_mut().zip(lanes) {
        // SAFETY: there is room for four words.
        unsafe { _mm256_storeu_si256(total.as_mut_ptr().cast(), lane) };
    }
    totals.iter().chain(rest).fold(0, |total, word| total.wrapping_add(*word))
}

/// Both extents of the weight.
const WIDTH: usize = 1024;
/// Rows of the product, the most that are tried last.
const ROWS: [usize; 5] = [32, 64, 128, 256, 512];

/// The rate of matrix products `x w^T` that `threads` threads reach through Ridge's kernels, for about `budget`: `w` is
/// `[1024, 1024]`, and `x` has as many rows, 32 to 512, as leave time for some repetitions. Both are of `dtype`; where x
/// is rounded to 8-bit codes, `w` has such codes too (q8_0).
///
/// # Errors
/// When threads or memory run out, or there is no kernel for the product.
pub fn matmul(
    dtype: DType,
    activations: Activations,
    threads: usize,
    budget: Duration,
) -> Result<Figure<FlopsPerSecond>> {
    let codes = FormatRef::from_name("q8_0").filter(|_| activations == Activations::Int8);
    let mut g = Builder::new();
    let x = g.step_input("x", Type::tensor(dtype, [Dim::sym("rows"), WIDTH.into()]))?;
    let weight = Type { format: codes, ..Type::tensor(dtype, [WIDTH, WIDTH]) };
    let w = g.weight("w", weight.clone())?;
    let y = g.linear(x, w)?;
    let mut graph = g.finish(vec![("y".into(), y)])?;
    round_activations(&mut graph, activations);

    let mut session = Session::new(Arc::new(Cpu::new(CpuOptions { threads: Some(threads), ..CpuOptions::default() })?));
    let mut rng = Rng::new(0);
    let mut random = |rows: usize| rng.normal(dtype, &[rows, WIDTH]);
    let parts = match (&weight.format, random(WIDTH)) {
        (None, values) => vec![values.to_bytes()],
        (Some(format), values) => {
            let values: Vec<f32> = values.floats().iter().map(|v| *v as f32).collect();
            format.encode(&values, &[WIDTH, WIDTH], None)
        }
    };
    session.load("w", &weight, parts.into_iter().map(WeightData::Owned).collect())?;
    let compiled = session.compile(&graph, &["y"])?;
    let values = random(ROWS[ROWS.len() - 1]).to_bytes();

    let [mut rows, larger @ ..] = ROWS;
    let mut product = TimedProduct::new(&compiled, rows, &values)?;
    let a_row = product.run()? / rows as u32;
    if let Some(most) = larger.into_iter().rfind(|rows| a_row * *rows as u32 * FEWEST as u32 <= budget) {
        rows = most;
        product = TimedProduct::new(&compiled, rows, &values)?;
    }
    let mut times = Times::new(budget);
    while times.wants_more() {
        times.push(product.run()?);
    }
    let flops = Flops(2.0 * (rows * WIDTH * WIDTH) as f64);
    let rate = |time: Seconds| flops / time;
    let (best, median) = times.best_and_median();
    let of = if weight.format.is_some() { "8-bit codes" } else { dtype.name() };
    let work = format!("products [{rows}, {WIDTH}] x [{WIDTH}, {WIDTH}] of {of} by {}", count(threads, "thread"));
    let busy = busy(best, median);
    Ok(Figure::measured(rate(best), format!("best of {} {work}; median {}{busy}", times.taken.len(), rate(median))))
}

/// A product that is ready to run and has run once.
struct TimedProduct<'a> {
    bucket: Bucket,
    values: &'a [u8],
}

impl<'a> TimedProduct<'a> {
    fn new(compiled: &Compiled, rows: usize, values: &'a [u8]) -> Result<Self> {
        let bucket = compiled.bucket(&Bindings::new().with("rows", rows))?;
        let mut product = Self { bucket, values };
        product.run()?;
        Ok(product)
    }

    fn run(&mut self) -> Result<Duration> {
        // A step may leave anything in its inputs, so they are filled again each time, before the clock starts.
        let x = self.bucket.input(0);
        x.copy_from_slice(&self.values[..x.len()]);
        let start = Instant::now();
        self.bucket.submit()?;
        self.bucket.wait()?;
        Ok(start.elapsed())
    }
}

fn count(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

/// Times of repetitions, in memory that is there before the first.
struct Times {
    taken: Vec<Duration>,
    total: Duration,
    budget: Duration,
}

impl Times {
    fn new(budget: Duration) -> Self {
        Self { taken: Vec::with_capacity(MOST), total: Duration::ZERO, budget }
    }

    fn wants_more(&self) -> bool {
        self.taken.len() < FEWEST || self.taken.len() < MOST && self.total < self.budget
    }

    fn push(&mut self, time: Duration) {
        self.total += time;
        self.taken.push(time);
    }

    fn best_and_median(&mut self) -> (Seconds, Seconds) {
        self.taken.sort();
        // A clock too coarse for the work must not make a rate infinite.
        let seconds = |time: Duration| Seconds::from(time.max(Duration::from_nanos(1)));
        (seconds(self.taken[0]), seconds(self.taken[self.taken.len() / 2]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_read_once() {
        let words: Vec<u64> = (0..1000).collect();
        for len in [0, 1, 31, 32, 33, 1000] {
            assert_eq!(sum(&words[..len]), words[..len].iter().sum::<u64>());
            assert_eq!(sum_portable(&words[..len]), words[..len].iter().sum::<u64>());
        }
    }

    #[test]
    fn repetitions_that_differ_much_are_said_to_be_of_a_busy_machine() {
        assert_eq!(busy(Seconds(1.0), Seconds(1.2)), "");
        assert!(busy(Seconds(1.0), Seconds(1.3)).contains("busy"));
    }

    #[test]
    fn any_number_of_threads_reads() {
        for threads in [1, 2, 7] {
            let probe = MemoryProbe::new(Bytes::from_kib(64), threads).unwrap();
            let figure = probe.read(threads, Duration::from_millis(1));
            assert!(figure.value.as_f64() > 0.0 && figure.value.as_f64().is_finite());
            assert!(figure.source.contains("64 KiB by") && figure.source.contains("median"), "{}", figure.source);
        }
    }

    #[test]
    fn a_probe_without_words_reads_nothing() {
        assert_eq!(MemoryProbe::new(Bytes(0), 2).unwrap().read(2, Duration::ZERO).value.as_f64(), 0.0);
    }
}
