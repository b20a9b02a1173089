//! Every op on this backend, in every dtype and with every instruction set of this machine, against its f64 meaning by the
//! one rule of tolerance: claimed by kernels and decomposed, on one thread and on several, on time and late, with poisoned
//! memory.
//!
//! The f64 meaning of a sample takes longer to evaluate than the sample takes to run. So one process evaluates it once and
//! judges the results of all instruction sets, of which each has a process of its own (`results.rs`).

use std::fs::File;
use std::sync::Arc;

use crate::common::{Unclaimed, poisoned, run, same_bits};
use crate::rerun::{ISA_VARIABLE, instruction_sets_beside_ours, rerun};
use crate::results::{ResultReader, ResultWriter, Results};
use ridge_graph::conformance::{Reference, all_samples};
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

    fn results(&self, sample: &Sample) -> Result<Results, String> {
        Ok(Results { claimed: agreed(&self.claimed, sample)?, unclaimed: agreed(&self.unclaimed, sample)? })
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

/// Names the file that a process writes its results to, for the one that started it to judge.
const RESULTS: &str = "RIDGE_CPU_CONFORMANCE_RESULTS";

/// The results of `test` of this binary with another instruction set.
fn results_with(isa: &str, test: &str) -> ResultReader {
    let file = tempfile::NamedTempFile::new().expect("there is room for results");
    let path = file.path().to_str().expect("its name is text");
    let (passed, printed) = rerun(&[test], &[(ISA_VARIABLE, isa), (RESULTS, path)]);
    assert!(passed, "{isa}: {printed}");
    ResultReader::new(file.into_file())
}

/// Judges the results of this process, and those of `test`, which calls this, with each of the instruction sets `others`.
fn conforms(dtype: DType, test: &str, others: &[&'static str]) {
    let (ways, samples) = (Ways::new(), all_samples(dtype, 11));
    if let Some(path) = std::env::var_os(RESULTS) {
        let mut writer = ResultWriter::new(File::create(path).expect("the file is there"));
        samples.iter().for_each(|(_, sample)| writer.write(&ways.results(sample)).expect("results are written"));
        return writer.finish().expect("results are written");
    }
    let mut others: Vec<_> = others.iter().map(|isa| (*isa, results_with(isa, test))).collect();
    let mut failures = Vec::new();
    for (name, sample) in &samples {
        let reference = Reference::of(sample);
        let mut judge = |isa: &str, results: Result<Results, String>| {
            let judged = reference.as_ref().map_err(Clone::clone);
            let judged = judged.and_then(|reference| results?.judge(reference));
            failures.extend(judged.err().map(|why| format!("{name}, {isa}: {why:.600}")));
        };
        judge(ridge_cpu::instruction_set(), ways.results(sample));
        for (isa, results) in &mut others {
            judge(isa, results.read().expect("each sample has results"));
        }
    }
    assert!(others.iter_mut().all(|(_, results)| results.is_at_end().expect("results are read")));
    let shown = failures.iter().take(12).map(String::as_str).collect::<Vec<_>>().join("\n");
    assert!(failures.is_empty(), "{} of {} samples fail:\n{shown}", failures.len(), samples.len());
}

#[test]
fn every_op_conforms_in_f32() {
    conforms(DType::F32, "conformance::every_op_conforms_in_f32", &instruction_sets_beside_ours());
}

#[test]
fn every_op_conforms_in_bf16() {
    conforms(DType::BF16, "conformance::every_op_conforms_in_bf16", &instruction_sets_beside_ours());
}

#[test]
fn every_op_conforms_in_f16() {
    conforms(DType::F16, "conformance::every_op_conforms_in_f16", &instruction_sets_beside_ours());
}

#[test]
fn every_op_conforms_in_f8e4m3() {
    conforms(DType::F8E4M3, "conformance::every_op_conforms_in_f8e4m3", &[]);
}

#[test]
fn every_op_conforms_in_f8e5m2() {
    conforms(DType::F8E5M2, "conformance::every_op_conforms_in_f8e5m2", &[]);
}

#[test]
fn an_unknown_instruction_set_is_refused() {
    let (passed, printed) = rerun(&["conformance::every_op_conforms_in_f32"], &[(ISA_VARIABLE, "mmx")]);
    assert!(!passed && printed.contains("RIDGE_CPU_ISA=mmx is none of what this machine has"), "{printed}");
    assert!(ridge_cpu::instruction_sets().iter().all(|isa| printed.contains(isa)), "{printed}");
}
