//! Kernels of other crates: registered with a backend when it is made, they claim and compute like built-in ones.

use std::ops::Range;
use std::sync::Arc;

use ridge_cpu::{Cpu, CpuKernel, CpuOptions, KernelEntry, KernelIo, KernelSpec, Scratch};
use ridge_graph::{Arg, Bindings, Builder, DType, Function, Graph, Op, Tensor, Type, Value};
use ridge_runtime::{Backend, lower};

use crate::common::run;

/// `a + b`, but for a mark that tells it from other sums: one more.
struct MarkedSum(usize);

impl CpuKernel for MarkedSum {
    fn pieces(&self) -> usize {
        self.0
    }

    fn nanos_per_piece(&self) -> f64 {
        1.0
    }

    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, _scratch: &mut Scratch) {
        let (a, b) = (io.input::<f32>(0), io.input::<f32>(1));
        // SAFETY: a piece is an element, and these are this call's alone.
        #[allow(unsafe_code)]
        let out = unsafe { io.output::<f32>(0).part(pieces.clone()) };
        for (i, out) in pieces.zip(out) {
            *out = a[i] + b[i] + 1.0;
        }
    }
}

fn supports(body: &Function) -> bool {
    body.args.iter().all(|arg| arg.ty.dtype == DType::F32 && arg.ty.shape == body.args[0].ty.shape)
}

fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    Ok(Box::new(MarkedSum(spec.outputs[0].shape.iter().product())))
}

fn cpu(kernels: Vec<KernelEntry>) -> ridge_runtime::Result<Cpu> {
    Cpu::new(CpuOptions { threads: Some(2), kernels, ..CpuOptions::default() })
}

fn sum(dtype: DType) -> Graph {
    let mut g = Builder::new();
    let a = g.step_input("a", Type::tensor(dtype, [5])).unwrap();
    let b = g.step_input("b", Type::tensor(dtype, [5])).unwrap();
    let c = g.add(a, b).unwrap();
    g.finish(vec![("c".into(), c)]).unwrap()
}

fn value(arg: &Arg) -> Value {
    Value::Plain(Tensor::float(arg.ty.dtype, &[5], (0..5).map(f64::from).collect()))
}

#[test]
fn a_registered_kernel_claims_and_computes() {
    let backend: Arc<dyn Backend> =
        Arc::new(cpu(vec![KernelEntry::new("marked_sum", "add(a, b)", supports, make)]).unwrap());
    let lowered = lower(&sum(DType::F32), &["c"], backend.kernels()).unwrap();
    let names: Vec<String> =
        lowered.main().nodes.iter().filter(|n| matches!(n.op, Op::Group(_))).map(|n| n.op_name().to_owned()).collect();
    assert_eq!(names, ["marked_sum"]);
    let got = run(&backend, &sum(DType::F32), &Bindings::new(), &value).unwrap();
    assert_eq!(got[0].floats(), [1.0, 3.0, 5.0, 7.0, 9.0]);
    // What it does not support is computed as before.
    let got = run(&backend, &sum(DType::BF16), &Bindings::new(), &value).unwrap();
    assert_eq!(got[0].floats(), [0.0, 2.0, 4.0, 6.0, 8.0]);
}

#[test]
fn two_kernels_of_one_name_are_refused() {
    let why = cpu(vec![KernelEntry::new("rms_norm", "add(a, b)", supports, make)]).err().expect("is refused");
    assert!(why.to_string().contains("two kernels are called `rms_norm`"), "{why}");
}
