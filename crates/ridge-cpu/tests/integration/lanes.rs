//! Collectives beside computation: what is gathered for a layer is on its way while the layer before it is computed.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ridge_cpu::{Cpu, CpuKernel, CpuOptions, KernelEntry, KernelIo, KernelSpec, Scratch};
use ridge_graph::conformance::near;
use ridge_graph::sample::Rng;
use ridge_graph::shard::{MeshAxis, gather_again, gather_weights};
use ridge_graph::{Arg, Bindings, Builder, DType, Graph, Precision, Tensor, Type, Value, evaluate_mesh};
use ridge_runtime::{Backend, CollectiveError, Collectives, RuntimeError};

use crate::common::run;

const LAYERS: usize = 5;
const WIDTH: usize = 32;

/// Layers that are computed so far, as their last kernel counts them.
static COMPUTED: AtomicUsize = AtomicUsize::new(0);

/// The sum at the end of a layer.
struct LayerEnd(usize);

impl CpuKernel for LayerEnd {
    fn pieces(&self) -> usize {
        1
    }

    fn nanos_per_piece(&self) -> f64 {
        1.0
    }

    fn run(&self, io: &KernelIo<'_>, _pieces: Range<usize>, _scratch: &mut Scratch) {
        let (a, b) = (&io.input::<f32>(0)[..self.0], &io.input::<f32>(1)[..self.0]);
        // SAFETY: the only piece.
        #[allow(unsafe_code)]
        let to = unsafe { io.output::<f32>(0).part(0..self.0) };
        to.iter_mut().zip(a.iter().zip(b)).for_each(|(to, (a, b))| *to = a + b);
        COMPUTED.fetch_add(1, Ordering::SeqCst);
    }
}

/// A group of two of which the other rank has what this one has, and whose exchanges are slow: exchange `k` is over only
/// when layer `k - 1` is computed, or after a long time with an error.
struct Slow {
    exchanges: AtomicUsize,
    /// Which exchange fails.
    fails: Option<usize>,
}

impl Collectives for Slow {
    fn ranks(&self) -> usize {
        2
    }

    fn rank(&self) -> usize {
        0
    }

    fn exchange(&self, what: &str, send: &[&[u8]], receive: &mut [&mut [u8]]) -> Result<(), CollectiveError> {
        let number = self.exchanges.fetch_add(1, Ordering::SeqCst);
        let start = Instant::now();
        while COMPUTED.load(Ordering::SeqCst) < number {
            if start.elapsed() > Duration::from_secs(10) {
                let why = format!("{what}: exchange {number} and layer {} wait for each other", number - 1);
                return Err(CollectiveError::Aborted { why });
            }
            std::thread::yield_now();
        }
        if self.fails == Some(number) {
            return Err(CollectiveError::Lost { rank: 1, why: "its machine is gone".into() });
        }
        receive.iter_mut().for_each(|to| to.copy_from_slice(send[0]));
        Ok(())
    }

    fn abort(&self, _why: &str) {}
}

fn layers() -> Graph {
    let ty = || Type::tensor(DType::F32, [4, WIDTH]);
    let mut g = Builder::new();
    let layer = g
        .function("layer", |g| {
            let x = g.arg("x", ty());
            let w = g.weight("w", Type::tensor(DType::F32, [WIDTH, WIDTH]))?;
            let h = g.linear(x, w)?;
            let h = g.tanh(h)?;
            Ok(vec![g.add(x, h)?])
        })
        .expect("types");
    let mut x = g.step_input("x", ty()).expect("fresh");
    for i in 0..LAYERS {
        x = g.scoped(&format!("layers.{i}"), |g| g.call(layer, &[x])).expect("types")[0];
    }
    let graph = g.finish(vec![("y".into(), x)]).expect("finishes");
    gather_again(&gather_weights(&graph, &MeshAxis::new("dp", 2)).expect("divides")).expect("is consistent")
}

fn value(arg: &Arg) -> Value {
    let seed = arg.name.bytes().map(u64::from).sum();
    let mut t = Rng::new(seed).normal(DType::F32, &arg.ty.shape.as_const().expect("constant"));
    if let ridge_graph::Data::Float(data) = &mut t.data {
        data.iter_mut().for_each(|x| *x = f64::from((*x * 0.1) as f32));
    }
    t.into()
}

fn backend(threads: usize, own_threads: bool, fails: Option<usize>) -> Arc<dyn Backend> {
    COMPUTED.store(0, Ordering::SeqCst);
    let slow: Arc<dyn Collectives> = Arc::new(Slow { exchanges: AtomicUsize::new(0), fails });
    let make = |spec: &KernelSpec<'_>| -> Result<Box<dyn CpuKernel>, String> {
        Ok(Box::new(LayerEnd(spec.outputs[0].shape.iter().product())))
    };
    let options = CpuOptions {
        threads: Some(threads),
        own_threads,
        mesh: HashMap::from([("dp".to_owned(), slow)]),
        poison: true,
        kernels: vec![KernelEntry::new("layer_end", "add(x, h)", |_| true, make)],
    };
    Arc::new(Cpu::new(options).expect("starts"))
}

/// Both in one test, for they count the same layers.
#[test]
fn gathering_goes_on_while_the_layer_before_is_computed_and_fails_the_step_where_it_fails() {
    let graph = layers();
    let evaluated = |precision| {
        let given = |_: usize, arg: &Arg| Some(value(arg));
        let ranks = evaluate_mesh(&graph, &[("dp", 2)], &given, &Bindings::new(), precision).expect("evaluates");
        ranks[0][0].1.tensor().clone()
    };
    let (exact, plain): (Tensor, Tensor) = (evaluated(Precision::Exact), evaluated(Precision::Rounded));
    for (threads, own) in [(1, false), (2, false), (1, true), (3, false)] {
        let got = run(&backend(threads, own, None), &graph, &Bindings::new(), &value).expect("runs");
        near(&got[0], &[&plain], &exact).unwrap_or_else(|why| panic!("{threads} threads{why}"));
        assert_eq!(COMPUTED.load(Ordering::SeqCst), LAYERS);
    }
    for threads in [1, 2] {
        let error = run(&backend(threads, false, Some(2)), &graph, &Bindings::new(), &value).expect_err("fails");
        assert!(matches!(&error, RuntimeError::Device { why, .. } if why.contains("its machine is gone")), "{error}");
        // Layers 0 and 1 were computed; what follows was not.
        assert_eq!(COMPUTED.load(Ordering::SeqCst), 2);
    }
}
