//! Compiles the kernels of every op of the registry for the architectures given, without a GPU, and prints what each
//! needs. Exit code 1 when one does not compile, spills, or lacks in its machine code what it claims; 3 when there is no NVRTC.
//!
//! `cargo run -p ridge-cuda --example kernels -- sm_80 sm_89 sm_90a`, or with names of kernels behind the architectures for those alone

#[path = "../../tests/common/cache.rs"]
#[allow(dead_code)] // tests ask for more of a case
mod cache;
#[path = "../../tests/common/cases.rs"]
mod cases;
#[path = "../../tests/common/codes.rs"]
mod codes;
#[path = "../../tests/common/convolution.rs"]
mod convolution;
#[path = "../../tests/common/few.rs"]
mod few;
#[path = "../../tests/common/latents.rs"]
mod latents;
#[path = "../../tests/common/mixer.rs"]
mod mixer;
#[path = "../../tests/common/one_row.rs"]
mod one_row;
mod sass;
#[path = "../../tests/common/training.rs"]
mod training;
#[path = "../../tests/common/views.rs"]
mod views;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use ridge_cuda::{CudaKernelRegistry, CudaSource, Nvrtc, sources};
use ridge_graph::conformance::all_samples;
use ridge_graph::{Bindings, Builder, DType, Graph, Role, Type, Var};
use ridge_hw::gpu::Nvidia;

/// What the instances of one kernel need at most.
#[derive(Clone, Copy, Default)]
struct Needs {
    instances: usize,
    registers: u32,
    spills: u32,
    shared: u32,
}

fn main() -> ExitCode {
    let (archs, only): (Vec<String>, Vec<String>) = std::env::args().skip(1).partition(|arg| arg.starts_with("sm_"));
    let nvrtc = match Nvrtc::find(&Nvidia::detect()) {
        Ok(nvrtc) => nvrtc,
        Err(why) => {
            println!("{why}");
            return ExitCode::from(3);
        }
    };
    let instances = match instances() {
        Ok(mut instances) => {
            instances.retain(|source| only.is_empty() || only.iter().any(|name| **name == *source.entry));
            instances
        }
        Err(why) => {
            println!("{why}");
            return ExitCode::from(1);
        }
    };
    let disassembler = sass::disassembler();
    let (needs, failures) = compile_all(&nvrtc, disassembler.as_deref(), &instances, &archs);
    println!(
        "{:<8}  {:<10}  {:>9}  {:>9}  {:>11}  {:>12}",
        "arch", "kernel", "instances", "registers", "spill bytes", "shared bytes"
    );
    for ((arch, entry), n) in &needs {
        println!("{arch:<8}  {entry:<10}  {:>9}  {:>9}  {:>11}  {:>12}", n.instances, n.registers, n.spills, n.shared);
    }
    match &disassembler {
        Some(path) => println!("machine code read by {}", path.display()),
        None => println!("machine code not read: there is no nvdisasm (pip install nvidia-cuda-nvcc)"),
    }
    failures.iter().take(8).for_each(|why| println!("{why:.2000}"));
    ExitCode::from(u8::from(!failures.is_empty()))
}

/// The kernels of every sample of every op, and of the sizes that tests hold kernels to, once each.
fn instances() -> Result<Vec<Arc<CudaSource>>, String> {
    let mut seen = HashSet::new();
    let builtin = CudaKernelRegistry::builtin;
    for registry in [builtin(), builtin().deterministic(), builtin().with_int8_attention()] {
        add_instances(&registry, &mut seen)?;
    }
    Ok(seen.into_iter().collect())
}

/// Those that this registry chooses.
fn add_instances(registry: &CudaKernelRegistry, seen: &mut HashSet<Arc<CudaSource>>) -> Result<(), String> {
    for dtype in DType::ALL.into_iter().filter(|d| d.is_float()) {
        for (name, sample) in all_samples(dtype, 11) {
            let graph = sample.graph().map_err(|e| format!("{name}: {e}"))?;
            let outputs = graph.main().outputs.iter().filter(|o| o.role == Role::Data);
            let outputs: Vec<&str> = outputs.map(|o| &*o.name).collect();
            let lowered =
                ridge_runtime::lower(&graph, &outputs, &registry.claims()).map_err(|e| format!("{name}: {e}"))?;
            seen.extend(sources(registry, &lowered, &Bindings::new()).map_err(|e| format!("{name} in {dtype}: {e}"))?);
        }
    }
    let cases = [
        cases::linears(),
        cases::norms(),
        codes::quantised(),
        codes::linears_of_codes(),
        codes::attentions_over_codes(),
        cases::blocks(),
        cases::experts(),
        few::routers(),
        few::gates_of_few(),
        few::sums_of_experts(),
        few::products_of_heads(),
        one_row::several_tiles(),
        one_row::few_rows(),
        one_row::rows_of_groups(),
        one_row::biased_experts(),
        cases::cache_writes(),
        cases::table_writes(),
        cache::projections().iter().map(|projections| projections.case(false)).collect(),
        convolution::convolutions(),
        mixer::mixers(),
        cases::attentions(),
        latents::queries(),
        latents::keys(),
        latents::values(),
    ];
    let training = [
        training::attentions(),
        training::attentions_in_blocks(),
        training::activations(),
        training::gradients(),
        training::whole_gradients(),
    ];
    for case in cases.into_iter().chain(training).flatten() {
        let outputs = case.graph.main().outputs.iter().filter(|o| o.role == Role::Data);
        let outputs: Vec<&str> = outputs.map(|o| &*o.name).collect();
        let lowered = ridge_runtime::lower(&case.graph, &outputs, &registry.claims());
        let lowered = lowered.map_err(|e| format!("{}, {}: {e}", case.kernel, case.what))?;
        seen.extend(sources(registry, &lowered, &Bindings::new()).map_err(|e| format!("{}: {e}", case.kernel))?);
    }
    for graph in views::graphs().map_err(|e| e.to_string())? {
        let outputs: Vec<&str> = graph.main().outputs.iter().map(|o| &*o.name).collect();
        let lowered = ridge_runtime::lower(&graph, &outputs, &registry.claims()).map_err(|e| e.to_string())?;
        seen.extend(sources(registry, &lowered, &Bindings::new()).map_err(|e| format!("views: {e}"))?);
    }
    for dtype in [DType::BF16, DType::F16] {
        for graph in large_products(dtype).map_err(|e| e.to_string())? {
            let lowered = ridge_runtime::lower(&graph, &["y"], &registry.claims()).map_err(|e| e.to_string())?;
            seen.extend(
                sources(registry, &lowered, &Bindings::new()).map_err(|e| format!("a product in {dtype}: {e}"))?,
            );
        }
    }
    Ok(())
}

/// Products beyond what samples have, alone and with what follows them.
fn large_products(dtype: DType) -> ridge_graph::Result<Vec<Graph>> {
    let product = |build: fn(&mut Builder, [Var; 4]) -> ridge_graph::Result<Var>| {
        let mut g = Builder::new();
        let x = g.step_input("x", Type::tensor(dtype, [64, 512]))?;
        let r = g.step_input("r", Type::tensor(dtype, [64, 512]))?;
        let w = g.weight("w", Type::tensor(dtype, [512, 512]))?;
        let up = g.weight("up", Type::tensor(dtype, [512, 512]))?;
        let y = build(&mut g, [x, r, w, up])?;
        g.finish(vec![("y".into(), y)])
    };
    Ok(vec![
        product(|g, [x, _, w, _]| g.linear(x, w))?,
        product(|g, [x, _, w, _]| g.matmul(x, w, false, true, DType::F32))?,
        product(|g, [x, r, w, _]| {
            let y = g.linear(x, w)?;
            g.add(r, y)
        })?,
        product(|g, [x, _, w, up]| {
            let (gate, up) = (g.linear(x, w)?, g.linear(x, up)?);
            g.swiglu(gate, up)
        })?,
    ])
}

type All = BTreeMap<(String, Arc<str>), Needs>;

fn compile_all(
    nvrtc: &Nvrtc,
    disassembler: Option<&Path>,
    instances: &[Arc<CudaSource>],
    archs: &[String],
) -> (All, Vec<String>) {
    let work: Vec<(&Arc<CudaSource>, &String)> =
        archs.iter().flat_map(|a| instances.iter().map(move |i| (i, a))).collect();
    let (next, results) = (AtomicUsize::new(0), Mutex::new((All::new(), Vec::new())));
    let worker = || {
        loop {
            let nth = next.fetch_add(1, Ordering::Relaxed);
            let Some((instance, arch)) = work.get(nth) else { return };
            let outcome = nvrtc.compile(&instance.entry, &instance.text, arch);
            let read_code = |cubin: &[u8]| sass::check(disassembler?, instance, arch, nth, cubin).err();
            let unlike = outcome.as_ref().ok().and_then(|compiled| read_code(&compiled.cubin));
            let Ok(mut results) = results.lock() else { return };
            match outcome {
                Ok(compiled) => {
                    let of = results.0.entry(((*arch).clone(), Arc::clone(&instance.entry))).or_default();
                    let said = read(&compiled.log);
                    let get = |key: &str| said.get(key).copied().unwrap_or(0);
                    of.instances += 1;
                    of.registers = of.registers.max(get("registers"));
                    of.spills = of.spills.max(get("spills"));
                    of.shared = of.shared.max(get("smem"));
                    results.1.extend(unlike);
                    if get("spills") > 0 {
                        let text = instance.text.lines().filter(|l| l.starts_with("#define"));
                        let defines = text.collect::<Vec<_>>().join(" ");
                        results.1.push(format!("{} spills for {arch}: {defines}", instance.entry));
                    }
                }
                Err(why) => results.1.push(format!("{why}\n{}", body(&instance.text))),
            }
        }
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        (0..threads).for_each(|_| drop(scope.spawn(worker)));
    });
    results.into_inner().unwrap_or_default()
}

/// A kernel's own text, without the header.
fn body(text: &str) -> &str {
    text.find("extern \"C\"").map_or(text, |at| &text[at..])
}

/// What ptxas says of a kernel: `Used 24 registers, 128 bytes smem` and `0 bytes spill stores, 0 bytes spill loads`.
fn read(log: &str) -> HashMap<&'static str, u32> {
    let mut said: HashMap<&'static str, u32> = HashMap::new();
    let words: Vec<&str> = log.split([' ', ',', '\n']).filter(|w| !w.is_empty()).collect();
    for (i, word) in words.iter().enumerate() {
        let number = |back: usize| i.checked_sub(back).and_then(|at| words[at].parse::<u32>().ok()).unwrap_or(0);
        match *word {
            "registers" => *said.entry("registers").or_default() += number(1),
            "smem" => *said.entry("smem").or_default() += number(2),
            "spill" => *said.entry("spills").or_default() += number(2),
            _ => {}
        }
    }
    said
}
