//! From the nodes of a lowered graph to kernels, on any machine.

use std::collections::HashSet;
use std::sync::Arc;

use ridge_graph::{Bindings, Function, Graph, GroupKind, Node, Op};
use ridge_runtime::{Plan, Result, RuntimeError, plan};

use crate::kernel::{Action, Kernel, Operand, Source, Spec};
use crate::{fused, kernels, prims};

/// The kernel of a node of the plan.
pub(crate) fn kernel(graph: &Graph, of: &ridge_runtime::Kernel, bindings: &Bindings) -> Result<Kernel> {
    let function = graph.function(of.func);
    let node = &function.nodes[of.node];
    make(function, node, bindings).map_err(|why| RuntimeError::Unsupported {
        backend: "cuda",
        op: node.op_name().into(),
        at: if node.scope.is_empty() { function.name.to_string() } else { node.scope.to_string() },
        why,
    })
}

fn make(function: &Function, node: &Node, bindings: &Bindings) -> Result<Kernel, String> {
    let single = Function::default();
    let spec = Spec {
        body: if let Op::Group(group) = &node.op { &group.body } else { &single },
        inputs: node.inputs.iter().map(|v| Operand::new(function.ty(*v), bindings)).collect::<Result<_, _>>()?,
        outputs: node.outputs.iter().map(|ty| Operand::new(ty, bindings)).collect::<Result<_, _>>()?,
        bindings,
    };
    match &node.op {
        Op::Prim(prim) => prims::make(prim, &spec),
        Op::Group(group) => match &group.kind {
            GroupKind::Fused => fused::make(&spec),
            GroupKind::Kernel(name) => kernels::make(name, &spec),
        },
        Op::Arg(_) | Op::Composite(_) | Op::Call(_) => Err("the graph is not lowered".into()),
    }
}

/// The kernels of a plan, in its order.
pub(crate) fn kernels(graph: &Graph, plan: &Plan, bindings: &Bindings) -> Result<Vec<Kernel>> {
    plan.kernels.iter().map(|k| kernel(graph, k, bindings)).collect()
}

/// The sources of an action, whichever way it goes.
fn sources_of(action: &Action) -> Vec<&Arc<Source>> {
    match action {
        Action::Launch { source, .. } => vec![source],
        Action::Product { otherwise, .. } => otherwise.iter().flat_map(sources_of).collect(),
        Action::Fastest { ways, .. } => ways.iter().flat_map(|w| &w.actions).flat_map(sources_of).collect(),
        Action::Copy { .. } | Action::Constant { .. } => Vec::new(),
    }
}

/// The distinct sources of some kernels.
pub(crate) fn distinct<'a>(kernels: impl IntoIterator<Item = &'a Kernel>) -> Vec<Arc<Source>> {
    let mut seen = HashSet::new();
    let sources = kernels.into_iter().flat_map(|k| &k.actions).flat_map(sources_of);
    sources.filter(|s| seen.insert(Arc::clone(s))).cloned().collect()
}

/// A kernel's text, for checks that need no GPU.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KernelSource {
    /// The name of the kernel in the text.
    pub entry: &'static str,
    /// CUDA C++, whole.
    pub text: String,
}

/// The distinct kernels that a lowered graph runs under these bindings. Needs no GPU.
///
/// # Errors
/// When a symbol is unbound, or there is no kernel for an op.
pub fn sources(lowered: &Graph, bindings: &Bindings) -> Result<Vec<KernelSource>> {
    let plan = plan(lowered, bindings)?;
    let kernels = kernels(lowered, &plan, bindings)?;
    let source = |s: Arc<Source>| KernelSource { entry: s.entry, text: s.text.clone() };
    Ok(distinct(&kernels).into_iter().map(source).collect())
}
