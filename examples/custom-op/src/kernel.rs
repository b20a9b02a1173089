//! The op on the CPU, in f32: alone, and fused with the sum that its gate is.

use ridge_cpu::{CpuKernel, KernelEntry, KernelIo, KernelSpec, PartKernel, part_kernel};
use ridge_graph::passes::{Numerics, OfferRequest};
use ridge_graph::{DType, Function};

/// The kernels, for `CpuOptions::kernels`.
pub fn kernels() -> Vec<KernelEntry> {
    vec![
        KernelEntry::new("gated_squared_relu", "gated_squared_relu(gate, up)", supports, |spec| make(spec, false)),
        // An offer other than the default: some of the bandwidth is lost on a third input.
        KernelEntry::new("add_gated_squared_relu", "gated_squared_relu(add(x, r), up)", supports, |spec| {
            make(spec, true)
        })
        .offering(|request: &OfferRequest<'_>| {
            let class = Numerics::Class("elementwise".into());
            supports(request.body).then(|| request.at_efficiency(0.95, 1.0, class))
        }),
    ]
}

/// Operands of f32 and of one shape. What is refused is computed by Ridge from the op's decomposition.
fn supports(body: &Function) -> bool {
    body.args.iter().all(|arg| arg.ty.dtype == DType::F32 && arg.ty == body.args[0].ty)
}

fn make(spec: &KernelSpec<'_>, sum: bool) -> Result<Box<dyn CpuKernel>, String> {
    part_kernel(spec, Elementwise { sum })
}

struct Elementwise {
    /// Is the gate the sum of the first two inputs?
    sum: bool,
}

impl PartKernel for Elementwise {
    type Element = f32;

    fn part_len(&self) -> usize {
        4096
    }

    fn nanos_per_part(&self) -> f64 {
        4096.0 * 0.5
    }

    fn compute(&self, io: &KernelIo<'_>, first: usize, out: &mut [f32]) {
        let part = |input: usize| &io.input::<f32>(input)[first..first + out.len()];
        let squared = |gate: f32| gate.max(0.0) * gate.max(0.0);
        if self.sum {
            let (x, r, up) = (part(0), part(1), part(2));
            for (i, out) in out.iter_mut().enumerate() {
                *out = squared(x[i] + r[i]) * up[i];
            }
        } else {
            let (gate, up) = (part(0), part(1));
            for (i, out) in out.iter_mut().enumerate() {
                *out = squared(gate[i]) * up[i];
            }
        }
    }
}
