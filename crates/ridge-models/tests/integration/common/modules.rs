//! Fixtures of networks without a cache, which are run in one step.

use std::sync::Arc;

use super::{Expected, cpu, fixtures};
use ridge_graph::{Arg, Bindings, DType, Graph, Precision, Role, Tensor, Value, conformance, evaluate};
use ridge_models::{BuildOptions, ModelFiles, Network, NetworkConfig, WeightSource};
use ridge_runtime::{Backend, Session};

/// What a step is given, and its extents.
pub(crate) type Step = (Vec<(&'static str, Tensor)>, Bindings);

pub(crate) struct ModuleFixture {
    pub(crate) network: Network,
    pub(crate) expected: Expected,
    source: WeightSource,
}

impl ModuleFixture {
    /// The fixture in this folder, with activations of this dtype.
    pub(crate) fn open(folder: &str, activations: DType) -> Self {
        let files = ModelFiles::open(Some(&fixtures().join(folder))).expect("a model");
        let config = files.network_config().expect("is supported");
        Self::of(&files, &config, &format!("{folder}/expected.safetensors"), activations)
    }

    /// The network of `config`, whose weights `files` have, with the results in the file `expected` of the fixtures.
    pub(crate) fn of(files: &ModelFiles, config: &NetworkConfig, expected: &str, activations: DType) -> Self {
        let options = BuildOptions { activations, ..BuildOptions::default() };
        let mut network = config.build(&options).expect("builds");
        let checkpoint = files.network_checkpoint(config).expect("its weights");
        let source = WeightSource::Checkpoint(Arc::new(checkpoint));
        network.module_mut().store(&source, None).expect("fits");
        Self { network, source, expected: Expected::open(expected) }
    }

    pub(crate) fn graph(&self) -> &Graph {
        &self.network.module().graph
    }

    /// What an evaluation of `graph` in this precision gives for `name`.
    pub(crate) fn evaluate(
        &self,
        graph: &Graph,
        (inputs, bindings): &Step,
        name: &str,
        precision: Precision,
    ) -> Tensor {
        let WeightSource::Checkpoint(checkpoint) = &self.source else { unreachable!("it has weights") };
        let value = |arg: &Arg| match arg.role {
            Role::Weight => {
                let tensor = checkpoint.tensor(&arg.name).expect("it has all");
                Some(Value::Plain(Tensor::from_bytes(DType::F32, tensor.shape, tensor.data)))
            }
            _ => inputs.iter().find(|(n, _)| *n == &*arg.name).map(|(_, t)| Value::Plain(t.clone())),
        };
        let all = evaluate(graph, &value, bindings, precision).expect("evaluates");
        all.into_iter().find(|(n, _)| n == name).expect("asked for").1.tensor().clone()
    }

    pub(crate) fn exact(&self, graph: &Graph, step: &Step, name: &str) -> Tensor {
        self.evaluate(graph, step, name, Precision::Exact)
    }

    pub(crate) fn on(&self, backend: Arc<dyn Backend>, (inputs, bindings): &Step, name: &str) -> Tensor {
        let mut session = Session::new(backend);
        self.source.load(&mut session, self.graph(), |_| ()).expect("loads");
        let mut bucket = session.compile(self.graph(), &[name]).and_then(|c| c.bucket(bindings)).expect("compiles");
        for (input, tensor) in inputs {
            if bucket.input_index(input).is_ok_and(|index| index.is_some()) {
                bucket.set(input, tensor).expect("fits");
            }
        }
        bucket.submit().and_then(|()| bucket.wait()).expect("runs");
        bucket.tensor(name).expect("asked for")
    }

    pub(crate) fn on_cpu(&self, step: &Step, name: &str, threads: usize) -> Tensor {
        self.on(cpu(threads), step, name)
    }

    /// Holds what `backend` gives for `output` to the rule of tolerance beside transformers and plain implementations.
    pub(crate) fn judge(&self, backend: Arc<dyn Backend>, step: &Step, output: &str, expected: &str) -> Tensor {
        let [torch, exact] = ["f32", "f64"].map(|kind| self.expected.tensor(&format!("{expected}_{kind}")));
        let plains = [Precision::Rounded, Precision::Reordered(1), Precision::Reordered(2)]
            .map(|precision| self.evaluate(self.graph(), step, output, precision));
        let got = self.on(backend, step, output);
        let plains: Vec<&Tensor> = [&torch].into_iter().chain(&plains).collect();
        conformance::near(&got, &plains, &exact).unwrap_or_else(|why| panic!("{output}: {why}"));
        got
    }
}
