//! Every op on this backend, in every dtype, against its f64 meaning by the one rule of tolerance: claimed by kernels
//! and decomposed, on one thread and on several, on time and late, with poisoned memory.

use std::sync::Arc;

use crate::common::{Unclaimed, poisoned, run, same_bits};
use crate::rerun::{rerun, with_instruction_sets};
use ridge_graph::conformance::{all_samples, judge};
use ridge_graph::sample::Sample;
use ridge_graph::{Arg, Bindings, DType, Tensor};
use ridge_runtime::Backend;
use ridge_runtime::late::Late;

/// The ways that each sample is run: they must agree to the bit within each of the two groups.
struct Ways {
    claimed: [Arc<dyn Backend>; 3],
    unclaimed: [Arc<dyn Backend>; 2],
}

impl Ways {
    fn new() -> Self {
        let (one, three) = (poisoned(1), poisoned(3));
        let late = Arc::new(Late::new(poisoned(2), 2));
        Self {
            unclaimed: [Arc::new(Unclaimed(Arc::clone(&one))), Arc::new(Unclaimed(Arc::clone(&three)))],
            claimed: [one, three, late],
        }
    }

    fn check(&self, sample: &Sample) -> Result<(), String> {
        let claimed = agreed(&self.claimed, sample)?;
        judge(sample, &claimed)?;
        let unclaimed = agreed(&self.unclaimed, sample)?;
        if !same_bits(&claimed, &unclaimed) {
            judge(sample, &unclaimed).map_err(|why| format!("decomposed: {why}"))?;
        }
        Ok(())
    }
}

fn agreed(backends: &[Arc<dyn Backend>], sample: &Sample) -> Result<Vec<Tensor>, String> {
    let graph = sample.graph().map_err(|e| e.to_string())?;
    let value = |arg: &Arg| sample.inputs[arg.name.parse::<usize>().expect("inputs are numbered")].clone();
    let results = backends
        .iter()
        .map(|backend| run(backend, &graph, &Bindings::new(), &value).map_err(|e| e.to_string()))
        .collect::<Result<Vec<_>, String>>()?;
    match results.iter().position(|other| !same_bits(&results[0], other)) {
        None => Ok(results.into_iter().next().expect("there are backends")),
        Some(i) => Err(format!("{:?}: way {i} gives {:?}, the first {:?}", sample.op, results[i], results[0])),
    }
}

fn conforms(dtype: DType) {
    let ways = Ways::new();
    let samples = all_samples(dtype, 11);
    let failures: Vec<String> = samples
        .iter()
        .filter_map(|(name, sample)| ways.check(sample).err().map(|why| format!("{name}: {why:.600}")))
        .collect();
    let shown = failures.iter().take(12).map(String::as_str).collect::<Vec<_>>().join("\n");
    assert!(failures.is_empty(), "{} of {} samples fail:\n{shown}", failures.len(), samples.len());
}

#[test]
fn every_op_conforms_in_f32() {
    conforms(DType::F32);
}

#[test]
fn every_op_conforms_in_bf16() {
    conforms(DType::BF16);
}

#[test]
fn every_op_conforms_in_f16() {
    conforms(DType::F16);
}

#[test]
fn every_op_conforms_in_f8e4m3() {
    conforms(DType::F8E4M3);
}

#[test]
fn every_op_conforms_in_f8e5m2() {
    conforms(DType::F8E5M2);
}

/// The tests above are of the best instruction set that the machine has. They are run again with each lesser one.
const IN_WIDE_DTYPES: [&str; 3] = [
    "conformance::every_op_conforms_in_f32",
    "conformance::every_op_conforms_in_bf16",
    "conformance::every_op_conforms_in_f16",
];

with_instruction_sets! {
    IN_WIDE_DTYPES,
    every_op_conforms_without_vectors: "portable",
    every_op_conforms_with_avx2: "avx2",
    every_op_conforms_with_avx512: "avx512",
    every_op_conforms_with_avx512_vnni: "avx512_vnni",
    every_op_conforms_with_avx512_bf16: "avx512_bf16",
    every_op_conforms_with_neon: "neon",
    every_op_conforms_with_neon_dotprod: "neon_dotprod",
    every_op_conforms_with_neon_i8mm: "neon_i8mm",
}

#[test]
fn an_unknown_instruction_set_is_refused() {
    let (passed, printed) = rerun(&IN_WIDE_DTYPES, ("RIDGE_CPU_ISA", "mmx"));
    assert!(!passed && printed.contains("RIDGE_CPU_ISA=mmx is none of what this machine has"), "{printed}");
}
