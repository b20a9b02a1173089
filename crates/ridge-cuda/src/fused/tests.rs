//! Generated kernels as C++ for the host, against the meaning of their groups: a kernel loops over whatever its blocks do not cover, so
//! that blocks of one thread, one after another, compute all of it.

#[path = "../../tests/common/views.rs"]
mod views;

use std::collections::HashSet;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use ridge_graph::conformance::all_samples;
use ridge_graph::sample::Rng;
use ridge_graph::{
    Bindings, Builder, DType, Dim, FuncId, Function, Graph, GroupKind, Op, Precision, Role, Shape, Tensor, Type, Value,
    evaluate,
};
use ridge_runtime::lower;

use super::make;
use crate::kernel::{CudaKernelSpec, CudaOperand, DeviceAction, LaunchArg};
use crate::kernels::CudaKernelRegistry;

/// What the kernels' headers take from CUDA, for one thread.
const HOST: &str = "
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>
#define __device__
#define __global__
#define __shared__
#define __align__(n) alignas(n)
#define __launch_bounds__(n)
#define __CUDA_ARCH__ 800
using std::max; using std::min;
struct Index { unsigned x, y, z; };
static Index threadIdx, blockIdx, blockDim = {1, 1, 1}, gridDim;
static float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
static float __int_as_float(int x) { return __uint_as_float((unsigned)x); }
static long long __float2ll_rz(float x) {
    return x >= 9223372036854775808.0f ? 0x7fffffffffffffffll : x < -9223372036854775808.0f ? -0x7fffffffffffffffll - 1 : (long long)x;
}
static float __fdividef(float a, float b) { return a / b; }
static float __ll2float_rn(long long x) { return (float)x; }
static unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
template <class T> static T __shfl_xor_sync(unsigned, T x, int) { return x; }
static void __syncthreads() {}
static unsigned short host_bf16(float x) {
    unsigned b = __float_as_uint(x);
    return x != x ? 0x7fff : (unsigned short)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
template <class Op, class S> static S alone(S x, S*) { return x; }
static float host_half(unsigned short x) { _Float16 h; memcpy(&h, &x, 2); return (float)h; }
static unsigned short host_to_half(float x) { _Float16 h = (_Float16)x; unsigned short y; memcpy(&y, &h, 2); return y; }
";

/// The functions of the host, and what it computes: `run(inputs, outputs)`.
const MAIN: &str = "
int main(int count, char** names) {
    FILE* in = fopen(names[1], \"rb\"); FILE* out = fopen(names[2], \"wb\");
    if (count != 3 || !in || !out) return 1;
    run(in, out);
    return fclose(out);
}
static void* input(FILE* in, size_t bytes) {
    void* p = aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (fread(p, 1, bytes, in) != bytes) exit(2);
    return p;
}
";

/// A group with random inputs, its kernel, and what its ops give.
struct Case {
    what: String,
    text: String,
    grid: u32,
    numbers: Vec<i64>,
    inputs: Vec<Vec<u8>>,
    wanted: Vec<Tensor>,
}

fn random(rng: &mut Rng, ty: &Type) -> Tensor {
    let shape = ty.shape.as_const().expect("numbers");
    match ty.dtype {
        dtype if dtype.is_float() => rng.normal(dtype, &shape),
        DType::Bool => rng.integers(DType::Bool, &shape, 0, 1),
        DType::U8 => rng.integers(DType::U8, &shape, 0, 7),
        dtype => rng.integers(dtype, &shape, -2, 7),
    }
}

/// The fused groups of `graph`, lowered.
fn groups(graph: &Graph, what: &str, rng: &mut Rng, seen: &mut HashSet<String>) -> Vec<Case> {
    let outputs = graph.main().outputs.iter().filter(|o| o.role == Role::Data);
    let outputs: Vec<&str> = outputs.map(|o| &*o.name).collect();
    let lowered = lower(graph, &outputs, &CudaKernelRegistry::builtin().claims()).expect("lowers");
    let nodes = lowered.functions.iter().flat_map(|f| &f.nodes);
    let bodies = nodes.filter_map(|node| match &node.op {
        Op::Group(group) if group.kind == GroupKind::Fused => Some(group.body.clone()),
        _ => None,
    });
    bodies.filter_map(|body| of_body(body, what, rng, seen)).collect()
}

fn of_body(mut body: Function, what: &str, rng: &mut Rng, seen: &mut HashSet<String>) -> Option<Case> {
    let bindings = Bindings::new();
    let operand = |ty: &Type| CudaOperand::new(ty, &bindings).expect("numbers");
    let spec = CudaKernelSpec {
        body: &body.clone(),
        inputs: body.args.iter().map(|arg| operand(&arg.ty)).collect(),
        outputs: body.outputs.iter().map(|o| operand(body.ty(o.var))).collect(),
        bindings: &bindings,
        deterministic: false,
        int8_attention: false,
    };
    let kernel = make(&spec).unwrap_or_else(|why| panic!("{what}: {why}"));
    let DeviceAction::Launch { source, grid, args, .. } = kernel.actions.first()? else { return None };
    let text =
        source.text[source.text.find("template <class D, int N> struct __align__").expect("a body")..].to_owned();
    if !seen.insert(text.clone()) {
        return None;
    }
    let Some(LaunchArg::Numbers(numbers)) = args.last() else { return None };
    body.name = "main".into();
    let tensors: Vec<Tensor> = body.args.iter().map(|arg| random(rng, &arg.ty)).collect();
    let graph = Graph { main: FuncId(0), functions: vec![body] };
    let value =
        |arg: &ridge_graph::Arg| Some(Value::from(tensors[arg.name.parse::<usize>().expect("a number")].clone()));
    let wanted = evaluate(&graph, &value, &bindings, Precision::Rounded).unwrap_or_else(|e| panic!("{what}: {e}"));
    Some(Case {
        what: format!("{what}\n{graph}"),
        text,
        grid: grid[0],
        numbers: numbers.clone(),
        inputs: tensors.iter().map(Tensor::to_bytes).collect(),
        wanted: wanted.into_iter().map(|(_, value)| value.tensor().clone()).collect(),
    })
}

fn host_text(headers: &str, cases: &[Case]) -> String {
    let mut text = HOST.to_owned();
    let asm = [
        ("u16 r; asm(\"cvt.rn.bf16.f32 %0, %1;\" : \"=h\"(r) : \"f\"(x)); return r;", "return host_bf16(x);"),
        ("float r; asm(\"cvt.f32.f16 %0, %1;\" : \"=f\"(r) : \"h\"(x)); return r;", "return host_half(x);"),
        ("u16 r; asm(\"cvt.rn.f16.f32 %0, %1;\" : \"=h\"(r) : \"f\"(x)); return r;", "return host_to_half(x);"),
    ];
    text += &asm.iter().fold(headers.to_owned(), |text, (from, to)| text.replace(from, to));
    text += "template <class D, int N> struct __align__(N * sizeof(typename D::Raw)) Pack { typename D::Raw x[N]; };\n";
    let mut run = "static void run(FILE* in, FILE* out) {\n".to_owned();
    for (i, case) in cases.iter().enumerate() {
        let body = &case.text[case.text.find("extern \"C\"").expect("an entry")..];
        text += &body
            .replace("extern \"C\" __global__", "static")
            .replace(" fused(", &format!(" fused{i}("))
            .replace("block_reduce<", "alone<")
            .replace("__shared__ union", "union");
        let _ = writeln!(run, "{{ gridDim.x = {};", case.grid);
        let mut args: Vec<String> = Vec::new();
        for (k, input) in case.inputs.iter().enumerate() {
            let _ = writeln!(run, "void* i{k} = input(in, {});", input.len());
            args.push(format!("i{k}"));
        }
        for (k, output) in case.wanted.iter().enumerate() {
            let bytes = output.to_bytes().len();
            let _ = writeln!(
                run,
                "void* o{k} = aligned_alloc(64, {}); memset(o{k}, 0xa5, {bytes});",
                bytes / 64 * 64 + 128
            );
            args.push(format!("o{k}"));
        }
        let numbers: Vec<String> = case.numbers.iter().map(|n| format!("(i64){n}ll")).collect();
        let _ = writeln!(run, "Numbers<{}> n = {{{{{}}}}};", numbers.len(), numbers.join(", "));
        args.push("n".into());
        let _ =
            writeln!(run, "for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) fused{i}({});", args.join(", "));
        for (k, output) in case.wanted.iter().enumerate() {
            let _ = writeln!(run, "fwrite(o{k}, 1, {}, out);", output.to_bytes().len());
        }
        run += "}\n";
    }
    let (main, input) = MAIN.split_at(MAIN.find("static void* input").expect("there"));
    text + input + &run + "}\n" + main
}

/// Are values equal, but for the last places of functions that the host's library computes?
fn near(dtype: DType, got: f64, wanted: f64) -> bool {
    let tolerance = match dtype {
        DType::F32 => 1e-4,
        DType::BF16 => 2e-2,
        DType::F16 => 4e-3,
        DType::F8E4M3 | DType::F8E5M2 => 0.3,
        _ => 0.0,
    };
    (got.is_nan() && wanted.is_nan()) || got == wanted || (got - wanted).abs() <= tolerance * (wanted.abs() + 1.0)
}

/// Compiles a program that ends where memory is not aligned as its types ask for.
fn compile(source: &Path, to: &Path) -> Result<(), String> {
    let options = ["-O0", "-w", "-std=c++17", "-ffp-contract=off"];
    let aligned = ["-fsanitize=alignment", "-fno-sanitize-recover=alignment", "-o"];
    let built = Command::new("c++").args(options).args(aligned).arg(to).arg(source).output();
    let built = built.map_err(|e| e.to_string())?;
    if built.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&built.stderr).into_owned()) }
}

fn check(folder: &Path, headers: &str, cases: &[Case]) -> Vec<String> {
    let path = |name: &str| folder.join(name);
    std::fs::write(path("fused.cpp"), host_text(headers, cases)).expect("is writable");
    std::fs::write(path("in"), cases.iter().flat_map(|c| c.inputs.concat()).collect::<Vec<u8>>()).expect("is writable");
    compile(&path("fused.cpp"), &path("fused")).unwrap_or_else(|why| panic!("{why:.3000}"));
    let ran = Command::new(path("fused")).arg(path("in")).arg(path("out")).status().expect("runs");
    assert!(ran.success(), "{ran}");
    let bytes = std::fs::read(path("out")).expect("was written");
    let (mut at, mut failures) = (0, Vec::new());
    for case in cases {
        for (output, wanted) in case.wanted.iter().enumerate() {
            let size = wanted.to_bytes().len();
            let got = Tensor::from_bytes(wanted.dtype, &wanted.shape, &bytes[at..at + size]);
            at += size;
            let (got, wanted_numbers) = (got.numbers(), wanted.numbers());
            let wrong = got.iter().zip(&wanted_numbers).position(|(g, w)| !near(wanted.dtype, *g, *w));
            if let Some(i) = wrong {
                let (got, wanted) = (got[i], wanted_numbers[i]);
                failures.push(format!("output {output} at {i}: {got}, not {wanted}, in {}\n{}", case.what, case.text));
            }
        }
    }
    failures
}

#[test]
fn generated_kernels_compute_what_their_groups_mean() {
    let folder = tempfile::tempdir().expect("a folder");
    let probe = folder.path().join("probe.cpp");
    std::fs::write(&probe, "int main() { return 0; }").expect("is writable");
    if compile(&probe, &folder.path().join("probe")).is_err() {
        ridge_testing::skip!("there is no C++ compiler `c++` that checks alignment");
    }
    let (mut rng, mut seen) = (Rng::new(5), HashSet::new());
    let mut cases: Vec<Case> = Vec::new();
    for graph in views::graphs().expect("builds") {
        cases.extend(groups(&graph, "views", &mut rng, &mut seen));
    }
    for dtype in [DType::F32, DType::BF16, DType::F8E4M3] {
        for (name, sample) in all_samples(dtype, 11) {
            let graph = sample.graph().expect("builds");
            cases.extend(groups(&graph, &format!("{name} in {dtype}"), &mut rng, &mut seen));
        }
    }
    let headers = include_str!("../../kernels/ridge.cuh");
    let failures: Vec<String> = cases.chunks(150).flat_map(|cases| check(folder.path(), headers, cases)).collect();
    println!("{} of {} kernels are right", cases.len() - failures.len(), cases.len());
    let shown: String = failures.iter().take(4).map(|why| format!("{why:.6000}\n\n")).collect();
    assert!(failures.is_empty(), "{} of {} kernels are wrong:\n{shown}", failures.len(), cases.len());
}

/// The launch of the only fused group of `graph` under these bindings: its text, blocks and threads.
fn launch(graph: &Graph, bindings: &Bindings) -> (String, u32, u32) {
    let outputs: Vec<&str> = graph.main().outputs.iter().map(|o| &*o.name).collect();
    let lowered = lower(graph, &outputs, &CudaKernelRegistry::builtin().claims()).expect("lowers");
    let groups = lowered.main().nodes.iter().filter_map(|node| match &node.op {
        Op::Group(group) if group.kind == GroupKind::Fused => Some(&group.body),
        _ => None,
    });
    let [body] = groups.collect::<Vec<_>>()[..] else { panic!("not one group:\n{lowered}") };
    let operand = |ty: &Type| CudaOperand::new(ty, bindings).expect("is bound");
    let spec = CudaKernelSpec {
        body,
        inputs: body.args.iter().map(|arg| operand(&arg.ty)).collect(),
        outputs: body.outputs.iter().map(|o| operand(body.ty(o.var))).collect(),
        bindings,
        deterministic: false,
        int8_attention: false,
    };
    match make(&spec).expect("a kernel").actions.pop() {
        Some(DeviceAction::Launch { source, grid, threads, .. }) => (source.own_text(), grid[0], threads),
        other => panic!("{other:?}"),
    }
}

/// A norm along `width`, beside a value of another shape.
fn norm_beside_rows(width: impl Into<Dim>) -> Graph {
    let mut g = Builder::new();
    let x = g.step_input("x", Type::tensor(DType::F32, Shape(vec![3.into(), width.into()]))).expect("fresh");
    let other = g.step_input("y", Type::tensor(DType::F32, Shape(vec![Dim::sym("tokens"), 4.into()]))).expect("fresh");
    let mut build = || {
        let sum = g.reduce_sum(x, 1)?;
        let n = g.div(x, sum)?;
        Ok::<_, ridge_graph::GraphError>(vec![("n".to_owned(), n), ("e".to_owned(), g.exp(other)?)])
    };
    let outputs = build().expect("builds");
    g.finish(outputs).expect("finishes")
}

#[test]
fn one_text_serves_empty_and_filled_parts() {
    let bindings = |tokens: usize| Bindings::new().with("tokens", tokens);
    let graph = norm_beside_rows(64);
    let ((empty, few, _), (filled, more, _)) = (launch(&graph, &bindings(0)), launch(&graph, &bindings(5)));
    assert_eq!(empty, filled);
    assert!(few == 3 && more > few, "{few} and {more} blocks");
}

#[test]
fn a_kernel_is_bound_to_the_threads_that_it_is_launched_with_at_most() {
    let bound = |threads: u32| format!("__launch_bounds__({threads})");
    let bindings = |width: usize| Bindings::new().with("tokens", 5usize).with("width", width);
    let (text, _, threads) = launch(&norm_beside_rows(1024), &bindings(0));
    assert!(threads == 512 && text.contains(&bound(512)), "{threads} threads of\n{text}");
    let (text, _, threads) = launch(&norm_beside_rows(64), &bindings(0));
    assert!(threads == 256 && text.contains(&bound(256)), "{threads} threads of\n{text}");
    // Rows of any length have one text.
    let graph = norm_beside_rows(Dim::sym("width"));
    let (short, long) = (launch(&graph, &bindings(20)), launch(&graph, &bindings(2000)));
    assert_eq!(short.0, long.0);
    assert!(short.0.contains(&bound(512)) && long.2 == 512, "{} threads of\n{}", long.2, long.0);
}

#[test]
fn vectors_of_all_operands_of_a_part_fit_the_registers_of_a_thread() {
    let graph = views::products_beside_a_norm(&views::MANY).expect("builds");
    let (text, ..) = launch(&graph, &Bindings::new());
    let parts = text.split("for (u32 i = ").skip(1);
    let vectors: Vec<usize> = parts.map(|part| part.matches("\nconst Pack<").count()).collect();
    assert_eq!(vectors, [12, 12, 12], "{text}");
}
