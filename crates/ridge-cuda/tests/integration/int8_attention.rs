//! Attention of prompts whose queries are rounded to int8, held against the f64 meaning of the rounded queries.

use std::collections::BTreeMap;
use std::sync::Arc;

use ridge_cuda::{CudaKernelRegistry, sources};
use ridge_graph::conformance::judge_graph;
use ridge_graph::sample::Rng;
use ridge_graph::{Arg, Bindings, DType, Tensor, Value};
use ridge_runtime::{Backend, lower};

use crate::cases::KernelCase;
use crate::codes::OverCodes;
use crate::common::int8_gpu;
use crate::running::{run, same_bits};

/// Tokens of a sequence in a step from which on its queries are rounded: fewer are computed one by one.
const MANY: usize = 8;
/// Units of the standard deviation of queries from which on down their rounding shows in every result.
const COARSE: f64 = 2.0;

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

/// Runs `case` with queries of this spread. Are the results those of the rounded queries, and where these are coarse not those of the
/// exact ones?
fn holds(gpu: &Arc<dyn Backend>, case: &KernelCase, spread: f64) -> Result<(), String> {
    let given = |name: &str| case.given.iter().find(|(known, _)| *known == name).map(|(_, tensor)| tensor.clone());
    let ids = given("ids").expect("ids");
    let value = |arg: &Arg, rounded: bool| match (given(&arg.name), &*arg.name) {
        (Some(tensor), _) => Value::Plain(tensor),
        (None, "q") => Value::Plain(queries(arg, &ids, spread)[usize::from(rounded)].clone()),
        (None, _) => Value::Plain(Rng::new(5).normal(arg.ty.dtype, &arg.ty.shape.as_const().expect("constant"))),
    };
    let named = |why: String| format!("{}, spread {spread}: {why:.800}", case.what);
    let step = || run(gpu, &case.graph, &Bindings::new(), &|arg| value(arg, false)).map_err(|e| named(e.to_string()));
    let (got, again) = (step()?, step()?);
    if !same_bits(&got, &again) {
        return Err(named("a second run gives other bits".to_owned()));
    }
    let judged =
        |rounded| judge_graph(&case.graph, &|arg| Some(value(arg, rounded)), &Bindings::new(), &got).map_err(named);
    judged(true)?;
    if spread <= COARSE && judged(false).is_ok() {
        return Err(named("queries are not rounded".to_owned()));
    }
    Ok(())
}

#[test]
fn prompts_over_caches_of_int8_alone_have_scores_of_int8() {
    let registry = CudaKernelRegistry::builtin().with_int8_attention();
    for codes in [DType::I8, DType::F8E4M3] {
        let case = OverCodes {
            dtype: DType::BF16,
            codes,
            heads: [2, 1],
            dim: 128,
            block: 16,
            sequences: &[(0, 150)],
            padding: 0,
            window: None,
            softcap: None,
            sinks: false,
        };
        let lowered = lower(&case.case().graph, &["0"], &registry.claims()).expect("lowers");
        let prompt = sources(&registry, &lowered, &Bindings::new()).expect("compiles").into_iter();
        let prompt: Vec<_> = prompt.filter(|source| &*source.entry == "attention_sm90").collect();
        let [source] = &prompt[..] else { panic!("{} kernels of prompts", prompt.len()) };
        let wanted = format!("#define INT8_SCORES {}\n", u8::from(codes == DType::I8));
        assert!(source.text.contains(&wanted), "over {codes}: no {wanted}");
    }
}

#[test]
fn scores_of_prompts_are_those_of_queries_rounded_to_int8() {
    let Some(gpu) = int8_gpu() else { return };
    // Several tiles of rows and columns, and tokens that are computed one by one among them.
    let prompt: &[(usize, usize)] = &[(0, 150)];
    let mixed: &[(usize, usize)] = &[(60, 1), (0, 40), (130, 20), (5, 3)];
    let cases = [
        (DType::BF16, 128, 16, prompt, 3, (None, None), false),
        (DType::BF16, 128, 64, mixed, 0, (None, Some(20.0)), true),
        (DType::BF16, 64, 128, prompt, 0, (None, None), true),
        (DType::F16, 64, 8, mixed, 2, (Some(50), None), false),
    ]
    .map(|(dtype, dim, block, sequences, padding, (window, softcap), sinks)| {
        let (codes, heads) = (DType::I8, [2, 1]);
        OverCodes { dtype, codes, heads, dim, block, sequences, padding, window, softcap, sinks }.case()
    });
    let gpu = &gpu;
    let failures: Vec<String> = std::thread::scope(|scope| {
        // Queries of one magnitude, and with an outlier beside which they are a few units.
        let pairs = cases.iter().flat_map(|case| [40.0, COARSE].map(|spread| (case, spread)));
        let threads: Vec<_> = pairs.map(|(case, spread)| scope.spawn(move || holds(gpu, case, spread))).collect();
        threads.into_iter().filter_map(|thread| thread.join().expect("no thread panics").err()).collect()
    });
    assert!(failures.is_empty(), "{} fail:\n{}", failures.len(), failures.join("\n"));
}
