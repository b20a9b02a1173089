//! From the nodes of a lowered graph to kernels. Needs no GPU.

use std::collections::HashSet;
use std::sync::Arc;

use ridge_graph::{Bindings, Function, Graph, GroupKind, Node, Op};
use ridge_runtime::{Plan, PlannedKernel, Result, RuntimeError, plan};

use crate::communicator::MeshRanks;
use crate::kernel::{CudaKernel, CudaKernelSpec, CudaOperand, CudaSource, DeviceAction};
use crate::kernels::CudaKernelRegistry;
use crate::{fused, prims};

/// The kernel of a node of the plan.
fn kernel(
    registry: &CudaKernelRegistry,
    graph: &Graph,
    of: &PlannedKernel,
    bindings: &Bindings,
    mesh: &MeshRanks,
) -> Result<CudaKernel> {
    let function = graph.function(of.func);
    let node = &function.nodes[of.node];
    make(registry, function, node, bindings, mesh).map_err(|why| RuntimeError::Unsupported {
        backend: "cuda",
        op: node.op_name().into(),
        at: if node.scope.is_empty() { function.name.to_string() } else { node.scope.to_string() },
        why,
    })
}

fn make(
    registry: &CudaKernelRegistry,
    function: &Function,
    node: &Node,
    bindings: &Bindings,
    mesh: &MeshRanks,
) -> Result<CudaKernel, String> {
    let single = Function::default();
    let spec = CudaKernelSpec {
        body: if let Op::Group(group) = &node.op { &group.body } else { &single },
        inputs: node.inputs.iter().map(|v| CudaOperand::new(function.ty(*v), bindings)).collect::<Result<_, _>>()?,
        outputs: node.outputs.iter().map(|ty| CudaOperand::new(ty, bindings)).collect::<Result<_, _>>()?,
        bindings,
        deterministic: registry.is_deterministic(),
        int8_attention: registry.has_int8_attention(),
    };
    match &node.op {
        Op::Prim(prim) => prims::make(prim, &spec, mesh),
        Op::Group(group) => match &group.kind {
            GroupKind::Fused => fused::make(&spec),
            GroupKind::Kernel(name) => registry.make(name, &spec),
        },
        Op::Arg(_) | Op::Composite(_) | Op::Call(_) => Err("the graph is not lowered".into()),
    }
}

/// The kernels of a plan, in its order, on a rank of `mesh`.
pub(crate) fn kernels(
    registry: &CudaKernelRegistry,
    graph: &Graph,
    plan: &Plan,
    bindings: &Bindings,
    mesh: &MeshRanks,
) -> Result<Vec<CudaKernel>> {
    plan.kernels.iter().map(|k| kernel(registry, graph, k, bindings, mesh)).collect()
}

/// The sources of an action and of its alternatives, for this architecture or for all.
fn sources_of<'a>(action: &'a DeviceAction, arch: Option<&str>) -> Vec<&'a Arc<CudaSource>> {
    let of = |actions: &'a [DeviceAction]| actions.iter().flat_map(|a| sources_of(a, arch)).collect();
    match action {
        DeviceAction::Launch { source, .. } => vec![source],
        DeviceAction::Product { otherwise, .. } => of(otherwise),
        DeviceAction::Autotuned { candidates, .. } => {
            let runs = |only: Option<&str>| arch.is_none_or(|arch| only.is_none_or(|only| only == arch));
            candidates.iter().filter(|c| runs(c.arch)).flat_map(|c| of(&c.actions)).collect()
        }
        DeviceAction::ByArch { arch: only, actions, otherwise } => match arch {
            None => of(actions).into_iter().chain(of(otherwise)).collect(),
            Some(arch) => of(if *only == arch { actions } else { otherwise }),
        },
        DeviceAction::Copy { .. } | DeviceAction::Constant { .. } | DeviceAction::Collective(_) => Vec::new(),
    }
}

/// The distinct sources of some kernels, for this architecture or for all.
pub(crate) fn distinct<'a>(
    kernels: impl IntoIterator<Item = &'a CudaKernel>,
    arch: Option<&str>,
) -> Vec<Arc<CudaSource>> {
    let mut seen = HashSet::new();
    let sources = kernels.into_iter().flat_map(|k| &k.actions).flat_map(|action| sources_of(action, arch));
    sources.filter(|s| seen.insert(Arc::clone(s))).cloned().collect()
}

/// The distinct kernels that a graph, lowered for the kernels of `registry`, runs under these bindings. Needs no GPU.
///
/// # Errors
/// When a symbol is unbound, or there is no kernel for an op.
pub fn sources(registry: &CudaKernelRegistry, lowered: &Graph, bindings: &Bindings) -> Result<Vec<Arc<CudaSource>>> {
    let plan = plan(lowered, bindings)?;
    let kernels = kernels(registry, lowered, &plan, bindings, &MeshRanks::new())?;
    Ok(distinct(&kernels, None))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use ridge_graph::conformance::all_samples;
    use ridge_graph::{Builder, DType, Role, Type};

    use super::*;
    use crate::device::RANDOM;
    use crate::kernel::{KernelText, grid};
    use crate::kernels::CudaKernelEntry;
    use crate::{gemm, kernels};

    /// Does the text call what an early launch must call?
    fn calls(text: &str) -> (bool, bool) {
        (text.contains("after_others()"), text.contains("others_may_begin()"))
    }

    #[test]
    fn texts_declare_an_early_launch_where_they_wait_for_earlier_launches() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
        let mut undeclared = BTreeSet::new();
        let mut files = Vec::new();
        let Ok(entries) = std::fs::read_dir(folder) else {
            ridge_testing::skip!("the crate's folder is not on this machine");
        };
        for entry in entries {
            let path = entry.expect("reads").path();
            if path.extension().is_some_and(|e| e == "cu") {
                let name = path.file_name().expect("a file").to_string_lossy().into_owned();
                undeclared.insert(name.clone());
                files.push((name, std::fs::read_to_string(&path).expect("reads")));
            }
        }
        for text in kernels::TEXTS.iter().chain(&prims::TEXTS).chain([&gemm::TEXT, &RANDOM]) {
            let (body, early) = text.declared();
            let (name, _) = files.iter().find(|(_, file)| body.ends_with(&**file)).expect("a file of the folder");
            assert_eq!(calls(body), (early, early), "{name}: calls of (after_others, others_may_begin)");
            undeclared.remove(name);
        }
        assert!(undeclared.is_empty(), "no `TEXTS` has {undeclared:?}");
    }

    #[test]
    fn a_kernel_that_was_added_claims_its_pattern() {
        let mut registry = CudaKernelRegistry::builtin();
        registry.add(CudaKernelEntry::new(
            "triple",
            "add(x, add(y, z))",
            |_| true,
            |spec| {
                let text = KernelText::new("extern \"C\" __global__ void triple() {}\n");
                grid(CudaSource::new("triple", &[], &text), [spec.outputs[0].len(), 1, 1], 32, Vec::new())
            },
        ));
        let mut g = Builder::new();
        let [x, y, z] = ["x", "y", "z"].map(|name| g.step_input(name, Type::tensor(DType::F32, [5])).expect("fresh"));
        let sum = g.add(y, z).expect("types");
        let sum = g.add(x, sum).expect("types");
        let graph = g.finish(vec![("sum".into(), sum)]).expect("finishes");
        let entries = |registry: &CudaKernelRegistry| -> Vec<Arc<str>> {
            let lowered = ridge_runtime::lower(&graph, &["sum"], &registry.claims()).expect("lowers");
            let sources = sources(registry, &lowered, &Bindings::new()).expect("are supported");
            sources.iter().map(|s| Arc::clone(&s.entry)).collect()
        };
        assert_eq!(entries(&CudaKernelRegistry::builtin()), [Arc::from("fused")]);
        assert_eq!(entries(&registry), [Arc::from("triple")]);
    }

    #[test]
    fn sources_of_every_op_declare_an_early_launch_where_they_wait_for_earlier_launches() {
        let registry = CudaKernelRegistry::builtin();
        let mut seen = [0; 2];
        for (name, sample) in all_samples(DType::BF16, 11) {
            let graph = sample.graph().expect("builds");
            let outputs: Vec<&str> =
                graph.main().outputs.iter().filter(|o| o.role == Role::Data).map(|o| &*o.name).collect();
            let lowered = ridge_runtime::lower(&graph, &outputs, &registry.claims()).expect("lowers");
            let plan = plan(&lowered, &Bindings::new()).expect("plans");
            let kernels =
                kernels(&registry, &lowered, &plan, &Bindings::new(), &MeshRanks::new()).expect("are supported");
            for source in distinct(&kernels, None) {
                let early = source.early_launch;
                assert_eq!(calls(&source.own_text()), (early, early), "{name}: {}", source.entry);
                seen[usize::from(early)] += 1;
            }
        }
        assert!(seen[0] > 10 && seen[1] > 10, "{seen:?} sources without and with an early launch");
    }
}
