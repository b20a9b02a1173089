//! What a step launches, without a GPU: the actions of each node of the plan, with the alternatives that an architecture takes.

use ridge_graph::{Function, GroupKind, Node, Op, Prim};
use ridge_runtime::PlannedLaunch;

use crate::kernel::{CudaKernel, DeviceAction};

/// One launch of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepLaunch {
    /// The op that it computes: of a fused group, the names of its primitives.
    pub op: String,
    /// The function of the graph whose op it is.
    pub function: String,
    /// Where the op is in the model, such as `model.layers.3.self_attn`.
    pub path: String,
    /// The kernel, or `copy`, `constant` or `collective`.
    pub kernel: String,
}

/// The launches of `launch`, whose node is `node` and whose kernel is `kernel`, on `architecture`.
pub(crate) fn of_node(
    function: &Function,
    node: &Node,
    launch: &PlannedLaunch,
    kernel: &CudaKernel,
    architecture: &str,
) -> Vec<StepLaunch> {
    let mut kernels = Vec::new();
    kernel.actions.iter().for_each(|action| add(action, architecture, &mut kernels));
    let path: Vec<&str> = launch.path.iter().map(|p| &**p).chain([&*node.scope]).filter(|p| !p.is_empty()).collect();
    let of = |kernel| StepLaunch { op: op(node), function: function.name.to_string(), path: path.join("."), kernel };
    kernels.into_iter().map(of).collect()
}

/// The names of what an action launches.
fn add(action: &DeviceAction, architecture: &str, to: &mut Vec<String>) {
    match action {
        DeviceAction::Launch { source, .. } => to.push(source.entry.to_string()),
        DeviceAction::Product { .. } => to.push("cublaslt".to_owned()),
        DeviceAction::Autotuned { candidates, .. } => {
            let runs = candidates.iter().find(|c| c.arch.is_none_or(|arch| arch == architecture));
            runs.into_iter().flat_map(|c| &c.actions).for_each(|action| add(action, architecture, to));
        }
        DeviceAction::ByArch { arch, actions, otherwise } => {
            let taken = if *arch == architecture { actions } else { otherwise };
            taken.iter().for_each(|action| add(action, architecture, to));
        }
        DeviceAction::Copy { .. } => to.push("copy".to_owned()),
        DeviceAction::Constant { .. } => to.push("constant".to_owned()),
        DeviceAction::Collective(_) => to.push("collective".to_owned()),
    }
}

/// What a node computes, as text.
fn op(node: &Node) -> String {
    match &node.op {
        Op::Group(group) if group.kind == GroupKind::Fused => {
            let computes = |n: &&Node| !matches!(n.op, Op::Arg(_) | Op::Prim(Prim::Const(_)));
            let names: Vec<&str> = group.body.nodes.iter().filter(computes).map(Node::op_name).collect();
            format!("fused({})", names.join(" "))
        }
        _ => node.op_name().to_owned(),
    }
}
