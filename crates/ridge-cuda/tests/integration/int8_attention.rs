//! Attention of prompts whose queries are rounded to int8, held against the f64 meaning of the rounded queries.

use std::collections::BTreeMap;
use std::sync::Arc;

use ridge_graph::conformance::judge_graph;
use ridge_graph::sample::Rng;
use ridge_graph::{Arg, Bindings, DType, Tensor, Value};
use ridge_runtime::Backend;

use crate::cases::KernelCase;
use crate::codes;
use crate::common::int8_gpu;
use crate::running::{run, same_bits};

/// Tokens of a sequence in a step from which on its queries are rounded: fewer are computed one by one.
const MANY: usize = 8;

/// Queries `[tokens, heads, dim]`, each row of a head of which has the largest magnitude 127 units, a unit being a power of two and
/// `spread` of them the other elements' standard deviation; and the same as whole units, where the token is of a run of [`MANY`].
fn queries(arg: &Arg, ids: &Tensor, spread: f64) -> [Tensor; 2] {
    let shape = arg.ty.shape.as_const().expect("constant");
    let [_, heads, dim] = shape[..] else { panic!("queries of {shape:?}") };
    let mut runs = BTreeMap::new();
    ids.ints().iter().for_each(|id| *runs.entry(*id).or_insert(0) += 1);
    let normal = Rng::new(21).normal(DType::F32, &shape);
    let mut given: Vec<f64> = normal.floats().iter().map(|x| (x * spread).clamp(-126.0, 126.0)).collect();
    for (row, of_row) in given.chunks_exact_mut(dim).enumerate() {
        let largest = &mut of_row[row * 7 % dim];
        *largest = largest.signum() * 127.0;
        // Scores of some units whatever the spread.
        let unit = f64::exp2((row % 3) as f64 - spread.log2().floor() - 1.0);
        of_row.iter_mut().for_each(|x| *x *= unit);
    }
    let given = Tensor::float(arg.ty.dtype, &shape, given).rounded();
    let rounded = given.floats().chunks_exact(dim).enumerate().flat_map(|(row, of_row)| {
        let few = runs[&ids.ints()[row / heads]] < MANY;
        let unit = of_row.iter().fold(0.0, |most: f64, x| most.max(x.abs())) / 127.0;
        of_row.iter().map(move |x| if few { *x } else { (x / unit).round_ties_even() * unit }).collect::<Vec<f64>>()
    });
    let rounded = Tensor::float(arg.ty.dtype, &shape, rounded.collect());
    [given, rounded]
}

/// Runs `case` with queries of this spread and judges the results by those of rounded queries, and by the exact ones.
fn judged(gpu: &Arc<dyn Backend>, case: &KernelCase, spread: f64) -> [Result<f64, String>; 2] {
    let given = |name: &str| case.given.iter().find(|(known, _)| *known == name).map(|(_, tensor)| tensor.clone());
    let ids = given("ids").expect("ids");
    let value = |arg: &Arg, rounded: bool| match (given(&arg.name), &*arg.name) {
        (Some(tensor), _) => Value::Plain(tensor),
        (None, "q") => Value::Plain(queries(arg, &ids, spread)[usize::from(rounded)].clone()),
        (None, _) => Value::Plain(Rng::new(5).normal(arg.ty.dtype, &arg.ty.shape.as_const().expect("constant"))),
    };
    let step = || run(gpu, &case.graph, &Bindings::new(), &|arg| value(arg, false)).expect("runs");
    let (got, again) = (step(), step());
    assert!(same_bits(&got, &again), "{}: a second run gives other bits", case.what);
    [true, false].map(|rounded| {
        judge_graph(&case.graph, &|arg| Some(value(arg, rounded)), &Bindings::new(), &got)
            .map_err(|why| format!("{}, spread {spread}: {why:.800}", case.what))
    })
}

#[test]
fn scores_of_prompts_are_those_of_queries_rounded_to_int8() {
    let Some(gpu) = int8_gpu() else { return };
    let mut failures = Vec::new();
    for case in codes::attentions_over_codes() {
        let coded_as = |dtype| case.given.iter().any(|(name, of)| *name == "kv" && of.dtype == dtype);
        // Queries of one magnitude, and with an outlier beside which they are a few units.
        for spread in [40.0, 2.0] {
            let [rounded, exact] = judged(&gpu, &case, spread);
            if coded_as(DType::I8) {
                failures.extend(rounded.err());
                if spread == 2.0 && exact.is_ok() {
                    failures.push(format!("{}: queries are not rounded", case.what));
                }
            } else {
                failures.extend(exact.err());
            }
        }
    }
    assert!(failures.is_empty(), "{} fail:\n{}", failures.len(), failures.join("\n"));
}
