//! Kernels that claim patterns, at the sizes at which they change their ways: few and many rows, long and ragged
//! contexts, odd columns; each is held against its f64 meaning, and must be what runs.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::cache;
use crate::cases::{self, KernelCase};
use crate::codes;
use crate::common::gpu;
use crate::convolution;
use crate::few;
use crate::latents;
use crate::mixer;
use crate::one_row;
use crate::rotated;
use crate::running::{run, same_bits};
use crate::sparse;
use crate::training;
use ridge_cuda::{CudaKernelRegistry, PlannedGpu, sources};
use ridge_graph::conformance::judge_graph;
use ridge_graph::format::{CodeType, ScaleLayout, ScaledFormat};
use ridge_graph::passes::Kernel;
use ridge_graph::sample::Rng;
use ridge_graph::{
    Arg, Bindings, Builder, DType, FormatRef, Graph, GroupKind, Op, Result, Role, Tensor, Type, Value, Var,
};
use ridge_hw::spec::DeviceSpec;
use ridge_runtime::{Backend, WeightData, component_offsets, lower};

/// The names of the kernels that claim something of the graph.
fn claimed(kernels: &[Kernel], graph: &Graph) -> Vec<String> {
    let names: Vec<&str> = graph.main().outputs.iter().filter(|o| o.role == Role::Data).map(|o| &*o.name).collect();
    let lowered = lower(graph, &names, kernels).expect("lowers");
    let groups = lowered.main().nodes.iter().filter_map(|n| match &n.op {
        Op::Group(group) => match &group.kind {
            GroupKind::Kernel(name) => Some(name.to_string()),
            GroupKind::Fused => None,
        },
        _ => None,
    });
    groups.collect()
}

/// Requires that each case's kernel claims its graph and that the GPU's results are right and the same each time. Cases are
/// spread over the processor's cores, since their meaning takes longer than the GPU does.
fn hold(gpu: &Arc<dyn Backend>, cases: &[KernelCase]) {
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(why) = holds(gpu, case) {
                        failures.lock().expect("no thread panics").push(why);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().expect("no thread panics");
    let shown = failures.iter().take(20).map(String::as_str).collect::<Vec<_>>().join("\n");
    assert!(failures.is_empty(), "{} of {} cases fail:\n{shown}", failures.len(), cases.len());
}

fn holds(gpu: &Arc<dyn Backend>, case: &KernelCase) -> std::result::Result<(), String> {
    let KernelCase { kernel, what, graph, given } = case;
    let named = |why: String| format!("{kernel}, {what}: {why:.800}");
    let claims = claimed(gpu.kernels(), graph);
    if claims != [*kernel] {
        return Err(named(format!("{claims:?} claim\n{graph}")));
    }
    // Encoding weights takes longer than the products.
    let made = RefCell::new(BTreeMap::new());
    let value = |arg: &Arg| match given.iter().find(|(name, _)| *name == &*arg.name) {
        Some((_, tensor)) => Value::Plain(tensor.clone()),
        None => made.borrow_mut().entry(Arc::clone(&arg.name)).or_insert_with(|| normal(arg)).clone(),
    };
    let step = || run(gpu, graph, &Bindings::new(), &value).map_err(|e| named(e.to_string()));
    let (got, again) = (step()?, step()?);
    if !same_bits(&got, &again) {
        return Err(named("a second run gives other bits".to_owned()));
    }
    judge_graph(graph, &|arg| Some(value(arg)), &Bindings::new(), &got).map(|_| ()).map_err(named)
}

fn normal(arg: &Arg) -> Value {
    let salt = arg.name.bytes().fold(3u64, |h, b| h.wrapping_mul(31).wrapping_add(u64::from(b)));
    let shape = arg.ty.shape.as_const().expect("constant");
    let tensor = Rng::new(salt).normal(arg.ty.dtype, &shape);
    match &arg.ty.format {
        Some(format) => Value::stored(&tensor, format),
        None => Value::Plain(tensor),
    }
}

fn built(build: impl FnOnce(&mut Builder) -> Result<Vec<Var>>) -> Graph {
    let mut g = Builder::new();
    let outputs = build(&mut g).expect("builds");
    g.finish(outputs.into_iter().enumerate().map(|(i, v)| (i.to_string(), v)).collect()).expect("finishes")
}

#[test]
fn linears_of_few_and_many_rows_with_what_goes_before_and_after() {
    let Some(gpu) = gpu() else { return };
    hold(&gpu, &cases::linears());
}

#[test]
fn norms_of_rows_up_to_the_widest() {
    let Some(gpu) = gpu() else { return };
    hold(&gpu, &cases::norms());
}

#[test]
fn convolutions_read_and_write_the_lines_of_their_rows() {
    let Some(gpu) = gpu() else { return };
    hold(&gpu, &convolution::convolutions());
}

#[test]
fn convolutions_go_on_to_recurrences_in_one_launch() {
    let Some(gpu) = gpu() else { return };
    hold(&gpu, &mixer::mixers());
}

#[test]
fn values_are_quantised_where_they_are_made_and_multiplied_as_codes() {
    let Some(gpu) = gpu() else { return };
    hold(&gpu, &codes::quantised());
}

#[test]
fn prompts_and_single_tokens_read_caches_of_codes() {
    let Some(gpu) = gpu() else { return };
    hold(&gpu, &codes::attentions_over_codes());
}

#[test]
fn rows_become_codes_on_the_way_to_products_by_codes() {
    let Some(gpu) = gpu() else { return };
    hold(&gpu, &codes::linears_of_codes());
}

/// Are `values`, `[rows, columns]`, made into `format` on the device as on the host?
fn hold_encoding(gpu: &dyn Backend, format: &FormatRef, dtype: DType, values: &[f32], shape: [usize; 2]) {
    let plain = dtype.encode(values.iter().map(|v| f64::from(*v)));
    let ty = Type::tensor(dtype, shape).stored_as(format.clone());
    let buffer = gpu.encode(&ty, &WeightData::Owned(plain)).expect("encodes").expect("on the device");
    let (offsets, _) = component_offsets(&ty, &Bindings::new()).expect("has components");
    let got = gpu.read(&buffer).expect("reads");
    for (wanted, offset) in format.encode(values, &shape, None).iter().zip(offsets) {
        let got = &got[offset..][..wanted.len()];
        let differs = got.iter().zip(wanted).position(|(got, wanted)| got != wanted);
        let around = |bytes: &[u8]| differs.map(|at| bytes[at..].iter().take(16).copied().collect::<Vec<_>>());
        assert!(
            differs.is_none(),
            "{} of {dtype}, component at {offset}, byte {differs:?}: {:?} for {:?}",
            format.name(),
            around(got),
            around(wanted)
        );
    }
}

#[test]
fn weights_are_encoded_on_the_device_as_on_the_host() {
    let Some(gpu) = gpu() else { return };
    let rows = |codes| FormatRef::new(ScaledFormat::new(codes, ScaleLayout::Row));
    let by_rows = [CodeType::F8E4M3, CodeType::Int8].map(|codes| (rows(codes), [37, 129]));
    // Blocks of 256 that do not fill the last block of threads, and some of zeros, of few digits and of a wide range.
    let in_blocks = ridge_graph::format::all().into_iter().map(|format| (format, [37, 1280]));
    for (format, shape) in by_rows.into_iter().chain(in_blocks) {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let plain = Rng::new(4).normal(dtype, &shape);
            let mut values: Vec<f32> = plain.floats().iter().map(|v| *v as f32).collect();
            for (i, x) in values.iter_mut().enumerate() {
                match i / 256 % 7 {
                    1 => *x = 0.0,
                    2 => *x = x.round(),
                    3 => *x = x.abs(),
                    4 => *x *= f32::powi(2.0, i as i32 % 13 - 9),
                    5 => *x = -0.25,
                    _ => {}
                }
            }
            let values: Vec<f32> =
                Tensor::from_bytes(dtype, &shape, &dtype.encode(values.iter().map(|v| f64::from(*v))))
                    .floats()
                    .iter()
                    .map(|v| *v as f32)
                    .collect();
            hold_encoding(&*gpu, &format, dtype, &values, shape);
        }
    }
}

#[test]
fn weights_in_blocks_are_multiplied_as_they_are_stored() {
    let Some(gpu) = gpu() else { return };
    hold(&gpu, &cases::blocks());
    hold(&gpu, &one_row::several_tiles());
    hold(&gpu, &one_row::few_rows());
    hold(&gpu, &one_row::rows_of_groups());
    hold(&gpu, &one_row::biased_experts());
}

#[test]
fn experts_are_gated_and_added_in_one_launch() {
    let Some(gpu) = gpu() else { return };
    hold(&gpu, &cases::experts());
}

#[test]
fn few_tokens_are_routed_and_their_experts_added_up_in_one_launch_each() {
    let Some(gpu) = gpu() else { return };
    hold(&gpu, &few::routers());
    hold(&gpu, &few::gates_of_few());
    hold(&gpu, &few::sums_of_experts());
}

/// Whatever the number of rows, and on a machine without a GPU.
#[test]
fn groups_for_few_rows_are_made_of_parts_for_many() {
    let registry = CudaKernelRegistry::builtin();
    let cases = [
        few::routers(),
        few::sums_of_experts(),
        few::products_of_heads(),
        latents::values(),
        latents::queries(),
        mixer::mixers(),
        one_row::biased_experts(),
    ];
    let mut launched = [0, 0];
    for case in cases.iter().flatten() {
        let names = case.graph.main().outputs.iter().filter(|o| o.role == Role::Data).map(|o| &*o.name);
        let lowered = lower(&case.graph, &names.collect::<Vec<_>>(), &registry.claims()).expect("lowers");
        let sources = sources(&registry, &lowered, &Bindings::new());
        let sources = sources.unwrap_or_else(|why| panic!("{}, {}: {why}", case.kernel, case.what));
        let fused = ["expert_route", "expert_sum", "head_products", "conv_recurrence", "grouped_blocks_row"];
        launched[usize::from(sources.iter().all(|source| fused.contains(&&*source.entry)))] += 1;
    }
    assert!(launched.iter().all(|count| *count > 3), "{launched:?} of parts, and as one");
}

/// Also on a machine without a GPU.
#[test]
fn gated_mlps_of_many_rows_of_codes_are_one_group() {
    let registry = CudaKernelRegistry::builtin();
    let h200 = PlannedGpu::new(DeviceSpec::find("H200").expect("is listed")).expect("has kernels");
    let mut groups = 0;
    for case in codes::quantised().iter().filter(|case| case.kernel == "scaled_mlp") {
        let names = case.graph.main().outputs.iter().filter(|o| o.role == Role::Data).map(|o| &*o.name);
        let lowered = lower(&case.graph, &names.collect::<Vec<_>>(), h200.kernels()).expect("lowers");
        let nodes = &lowered.main().nodes;
        let is_group = |op: &Op| matches!(op, Op::Group(group) if group.kind == GroupKind::Kernel("scaled_mlp".into()));
        groups += nodes.iter().filter(|node| is_group(&node.op)).count();
        sources(&registry, &lowered, &Bindings::new()).expect("all have kernels");
    }
    assert_eq!(groups, 3);
}

/// Also on a machine without a GPU.
#[test]
fn mixers_of_few_tokens_are_one_launch_and_of_many_the_usual_ones() {
    let registry = CudaKernelRegistry::builtin();
    let (mut few, mut many) = (0, 0);
    for case in mixer::mixers() {
        let names = case.graph.main().outputs.iter().filter(|o| o.role == Role::Data).map(|o| &*o.name);
        let lowered = lower(&case.graph, &names.collect::<Vec<_>>(), &registry.claims()).expect("lowers");
        let sources = sources(&registry, &lowered, &Bindings::new());
        let sources = sources.unwrap_or_else(|why| panic!("{}, {}: {why}", case.kernel, case.what));
        let entries: Vec<&str> = sources.iter().map(|source| &*source.entry).collect();
        let ids = case.given.iter().find(|(name, _)| *name == "ids").map_or(0, |(_, ids)| ids.shape[0]);
        let [together, apart] = ["conv_recurrence", "causal_conv1d"].map(|entry| entries.contains(&entry));
        assert_eq!((together, apart), (ids < 32, ids >= 32), "{}, {}: {entries:?}\n{lowered}", case.kernel, case.what);
        // What is beside them reads states.
        let views = ["slice", "fused", "recurrence"].iter().any(|entry| entries.contains(entry));
        assert!(!together || !views, "{}, {}: {entries:?}", case.kernel, case.what);
        *if together { &mut few } else { &mut many } += 1;
    }
    assert!(few > 20 && many > 10, "{few} of few tokens, {many} of many");
}

#[test]
fn parts_of_a_stack_of_matrices_are_multiplied_where_they_lie() {
    let Some(gpu) = gpu() else { return };
    hold(&gpu, &few::products_of_heads());
}

#[test]
fn keys_are_normed_and_rotated_on_their_way_to_the_cache() {
    let Some(gpu) = gpu() else { return };
    hold(&gpu, &cases::cache_writes());
}

#[test]
fn of_equal_places_of_a_table_the_last_value_stays() {
    let Some(gpu) = gpu() else { return };
    hold(&gpu, &cases::table_writes());
}

#[test]
fn products_of_few_tokens_write_keys_and_values_to_the_cache() {
    let Some(gpu) = gpu() else { return };
    hold(&gpu, &cache::projections().iter().map(|of| of.case(false)).collect::<Vec<_>>());
}

#[test]
fn keys_and_values_have_the_same_bits_by_launches_of_their_own() {
    let Some(gpu) = gpu() else { return };
    for of in cache::projections() {
        let [together, apart] = [false, true].map(|apart| {
            let case = of.case(apart);
            let value = |arg: &Arg| match case.given.iter().find(|(name, _)| *name == &*arg.name) {
                Some((_, tensor)) => Value::Plain(tensor.clone()),
                None => normal(arg),
            };
            let results = run(&gpu, &case.graph, &Bindings::new(), &value);
            (claimed(gpu.kernels(), &case.graph), results.unwrap_or_else(|why| panic!("{}: {why}", case.what)), case)
        });
        assert_ne!(together.0, apart.0, "{}", apart.2.what);
        assert!(same_bits(&together.1[..2], &apart.1[..2]), "{} {}", together.2.kernel, together.2.what);
    }
}

/// Also on a machine without a GPU.
#[test]
fn keys_and_values_of_few_tokens_are_one_launch_with_their_products_and_of_many_the_usual_ones() {
    let entries = |case: &KernelCase, registry: &CudaKernelRegistry| {
        let names = case.graph.main().outputs.iter().filter(|o| o.role == Role::Data).map(|o| &*o.name);
        let lowered = lower(&case.graph, &names.collect::<Vec<_>>(), &registry.claims()).expect("lowers");
        let sources = sources(registry, &lowered, &Bindings::new());
        let sources = sources.unwrap_or_else(|why| panic!("{}, {}: {why}", case.kernel, case.what));
        sources.iter().map(|source| source.entry.to_string()).collect::<Vec<_>>()
    };
    let registry = CudaKernelRegistry::builtin();
    let (mut few, mut many, mut in_blocks) = (0, 0, 0);
    for of in cache::projections() {
        let (together, apart) = (of.case(false), of.case(true));
        let writes = |entries: &[String]| entries.iter().any(|entry| entry == "kv_write");
        let launched = entries(&together, &registry);
        let usual = entries(&apart, &registry);
        match (of.is_in_blocks(), of.tokens()) {
            (false, ..=16) => {
                assert!(!writes(&launched), "{}: {launched:?}", together.what);
                few += 1;
            }
            // On Hopper one, and elsewhere the usual ones.
            (true, 2..=16) => {
                assert_eq!(launched[0], "linear_blocks_rows", "{}", together.what);
                assert_eq!(launched[1..], usual, "{}", together.what);
                in_blocks += 1;
            }
            _ => {
                assert_eq!(launched, usual, "{}", together.what);
                many += 1;
            }
        }
        assert!(writes(&usual), "{}", apart.what);
    }
    assert!(few > 20 && many > 5 && in_blocks > 5, "{few} of few tokens, {in_blocks} in blocks, {many} of many");
}

#[test]
fn attention_of_long_ragged_and_windowed_steps() {
    let Some(gpu) = gpu() else { return };
    hold(&gpu, &cases::attentions());
}

#[test]
fn prompts_rotate_their_queries_on_the_way() {
    let Some(gpu) = gpu() else { return };
    hold(&gpu, &rotated::rotated_prompts());
}

#[test]
fn queries_keys_and_values_of_latents_are_a_launch_each() {
    let cases = [latents::queries(), latents::keys(), latents::values()].into_iter().flatten().collect::<Vec<_>>();
    // Also on a machine without a GPU.
    let kernels = CudaKernelRegistry::builtin().claims();
    for case in &cases {
        assert_eq!(claimed(&kernels, &case.graph), [case.kernel], "{}", case.what);
    }
    let Some(gpu) = gpu() else { return };
    hold(&gpu, &cases);
}

#[test]
fn sparse_attention_and_its_index() {
    let Some(gpu) = gpu() else { return };
    hold(&gpu, &sparse::indices());
    hold(&gpu, &sparse::selections());
}

#[test]
fn attention_without_a_cache_and_its_gradient() {
    let Some(gpu) = gpu() else { return };
    hold(&gpu, &training::attentions());
    hold(&gpu, &training::attentions_in_blocks());
}

#[test]
fn gradients_of_linears_norms_and_the_loss() {
    let Some(gpu) = gpu() else { return };
    hold(&gpu, &training::gradients());
    hold(&gpu, &training::whole_gradients());
}

/// Also on a machine without a GPU.
#[test]
fn gradients_of_norms_are_whole_where_a_kernel_takes_them_and_parts_elsewhere() {
    let entries = |case: &KernelCase, registry: &CudaKernelRegistry| {
        let names = case.graph.main().outputs.iter().filter(|o| o.role == Role::Data).map(|o| &*o.name);
        let lowered = lower(&case.graph, &names.collect::<Vec<_>>(), &registry.claims()).expect("lowers");
        let sources = sources(registry, &lowered, &Bindings::new());
        let sources = sources.unwrap_or_else(|why| panic!("{}, {}: {why}", case.kernel, case.what));
        let mut entries: Vec<String> = sources.iter().map(|source| source.entry.to_string()).collect();
        entries.sort_unstable();
        entries
    };
    let registry = CudaKernelRegistry::builtin();
    for case in training::whole_gradients() {
        let whole = ["norm_gradients", "norm_gradients_join"];
        assert_eq!(entries(&case, &registry), whole, "{}, {}", case.kernel, case.what);
        let apart = entries(&case, &CudaKernelRegistry::builtin().deterministic());
        assert!(apart.iter().all(|entry| !whole.contains(&&**entry)), "{}: {apart:?}", case.what);
    }
    // Rows that are not whole vectors.
    let odd = entries(&training::whole_gradient(DType::BF16, [3, 37], true, true, true, 0b111), &registry);
    for part in ["row_statistics", "sum_parts", "sum_join"] {
        assert!(odd.iter().any(|entry| entry == part), "{odd:?} without {part}");
    }
}

#[test]
fn gelu_and_its_gradient_are_computed_with_products() {
    // Also on a machine without a GPU: products that cuBLASLt makes are not for deterministic devices.
    let registry = CudaKernelRegistry::builtin();
    let (usual, deterministic) = (registry.claims(), registry.clone().deterministic().claims());
    let cases = training::activations();
    for case in cases.iter().filter(|case| case.kernel == "linear_input_gradient_gelu") {
        for (claims, takes) in [(&usual, true), (&deterministic, false)] {
            let lowered = lower(&case.graph, &["0"], claims).expect("lowers").to_string();
            assert_eq!(lowered.contains(case.kernel), takes, "{lowered}");
        }
    }
    let Some(gpu) = gpu() else { return };
    hold(&gpu, &cases);
}

#[test]
fn rows_of_a_linear_do_not_depend_on_their_company() {
    let Some(gpu) = gpu() else { return };
    let all = Rng::new(5).normal(DType::BF16, &[16, 520]);
    let product = |rows: std::ops::Range<usize>| {
        let graph = built(|g| {
            let x = g.step_input("x", Type::tensor(DType::BF16, [rows.len(), 520]))?;
            let w = g.weight("w", Type::tensor(DType::BF16, [37, 520]))?;
            Ok(vec![g.linear(x, w)?])
        });
        let given = all.floats()[rows.start * 520..rows.end * 520].to_vec();
        let x = Tensor::float(DType::BF16, &[rows.len(), 520], given);
        let value = |arg: &Arg| if &*arg.name == "x" { Value::Plain(x.clone()) } else { normal(arg) };
        run(&gpu, &graph, &Bindings::new(), &value).expect("runs")[0].floats().to_vec()
    };
    let sixteen = product(0..16);
    for rows in [1, 3, 8, 9, 15] {
        assert_eq!(product(0..rows), sixteen[..rows * 37], "{rows} rows");
    }
    assert_eq!(product(7..8), sixteen[7 * 37..8 * 37], "a row alone");
}

#[test]
fn random_weights_are_those_of_the_host() {
    let Some(gpu) = gpu() else { return };
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let ty = Type::tensor(dtype, [33, 7]);
        let mut rng = Rng::new(9);
        let state = rng.state();
        let buffer = gpu.random(&ty, state, 0.25).expect("makes").expect("makes it on the device");
        let mut wanted = Vec::new();
        while wanted.len() < 33 * 7 {
            let bits = rng.bits();
            wanted.extend((0..4).rev().map(|i| {
                let part = (bits >> (16 * i)) as u16;
                (f64::from(part & 0xff) + f64::from(part >> 8) - 255.0) * 0.25
            }));
        }
        wanted.truncate(33 * 7);
        assert_eq!(dtype.decode(&gpu.read(&buffer).expect("reads")), wanted, "{dtype}");
    }
}
