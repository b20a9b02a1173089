//! The layers of a model with experts, measured by themselves: how evenly a batch uses experts, and what products of groups of
//! rows gain over products of equal, padded shapes.

use std::time::Instant;

use ridge_graph::passes::{
    Dispatch, EXPERT_LOAD, RoutedLayer, RoutingTerms, round_activations, routed_layers, with_routing,
};
use ridge_graph::sample::Rng;
use ridge_graph::{Graph, Role};
use ridge_hw::units::Bytes;
use ridge_models::{ModelConfig, ModelFiles, training_bindings};
use ridge_runtime::Session;
use ridge_train::settings::ExpertsSettings;
use ridge_train::{ExpertLoads, LayerUse};

use crate::error::{Error, Result, Smaller};
use crate::load::{LoadObserver, rounding, weights};
use crate::placement::{OpenDevice, Placement};
use crate::settings::NumberSettings;

/// The output that is computed: hidden states behind the last layer and its norm.
const HIDDEN: &str = "hidden";

/// Where and how [`ExpertBench`] measures.
#[derive(Clone, Debug)]
pub struct ExpertBenchSettings {
    /// On which device.
    pub placement: Placement,
    /// Take random weights: only the configuration is read.
    pub random_weights: bool,
    /// Runs that are timed, after one that warms up.
    pub repeat: usize,
}

/// The layers of a model with experts, loaded.
pub struct ExpertBench {
    session: Session,
    graph: Graph,
    layers: Vec<RoutedLayer>,
    vocab_size: usize,
    repeat: usize,
    /// Name of the device.
    pub device: String,
    /// Threads that compute, of a CPU; `None` of a GPU.
    pub threads: Option<usize>,
    /// Elements of all weights.
    pub parameters: u64,
    /// Bytes of all weights.
    pub weight_bytes: u64,
}

/// One batch: a token each of so many sequences, which attends to itself.
#[derive(Clone, Debug)]
pub struct DispatchTime {
    /// How many.
    pub tokens: usize,
    /// How evenly each layer's experts were used.
    pub layers: Vec<LayerUse>,
    /// Experts of a layer that had tokens, the mean over layers.
    pub reached: f64,
    /// Rows that each expert is padded to: the largest load of any.
    pub padded_rows: usize,
    /// Rows that padded products have over those that grouped ones have.
    pub padding: f64,
    /// Seconds of each run with products of groups of rows.
    pub grouped: Vec<f64>,
    /// The same with padded products.
    pub padded: Vec<f64>,
}

impl ExpertBench {
    /// Loads the model.
    ///
    /// # Errors
    /// When it has no routed experts, or a family of it cannot run without a cache; when the device cannot be opened or has too
    /// little memory, or a file does not fit.
    pub fn load(
        files: &ModelFiles,
        config: &ModelConfig,
        numbers: &NumberSettings,
        settings: &ExpertBenchSettings,
        observer: &mut dyn LoadObserver,
    ) -> Result<Self> {
        let source = weights(files, config, settings.random_weights)?;
        let mut module = config.build_training(&numbers.options(config.torch_dtype))?;
        let layers = routed_layers(&module.graph)?;
        if layers.is_empty() {
            return Err(Error::Kind { model: files.to_string(), wanted: "model with routed experts" });
        }
        module.store(&source, numbers.format.as_ref())?;
        let device = OpenDevice::open(&settings.placement)?;
        let (rounded, _) = rounding(numbers, module.activations, device.is_cpu());
        round_activations(&mut module.graph, rounded);
        let weight_bytes = module.weight_bytes();
        if let Some(available) = device.available.filter(|available| available.0 < weight_bytes) {
            let (what, needed) = ("the weights", Bytes(weight_bytes));
            return Err(Error::Memory { what, needed, available, smaller: Smaller::Model, or_on_host: false });
        }
        let mut session = Session::new(device.backend);
        let graph = module.graph.clone();
        session.declare(&[(&routed(&graph, Dispatch::Dropless)?, &[HIDDEN, EXPERT_LOAD])])?;
        module.load(&source, &mut session, None, |done| observer.loading(done, weight_bytes))?;
        Ok(Self {
            session,
            layers,
            vocab_size: config.vocab_size,
            repeat: settings.repeat,
            device: device.name,
            threads: device.threads,
            parameters: module.parameter_count(),
            weight_bytes,
            graph,
        })
    }

    /// Measures a batch of this many random tokens.
    ///
    /// # Errors
    /// When memory runs out or the device fails.
    pub fn measure(&self, tokens: usize) -> Result<DispatchTime> {
        let (grouped, load) = self.time(Dispatch::Dropless, tokens)?;
        let padded_rows = load.iter().copied().fold(1.0, f32::max) as usize;
        let (padded, _) = self.time(Dispatch::Padded(padded_rows), tokens)?;
        let mut loads = ExpertLoads::new(&self.layers);
        loads.add(&load, &vec![0.0; self.layers.len()], tokens);
        let layers = loads.take(&ExpertsSettings::default());
        let experts: usize = self.layers.iter().map(|layer| layer.experts).sum();
        let reached = load.iter().filter(|load| **load > 0.0).count() as f64 / self.layers.len() as f64;
        let rows: f64 = load.iter().map(|load| f64::from(*load)).sum();
        let padding = (experts * padded_rows) as f64 / rows.max(1.0);
        Ok(DispatchTime { tokens, layers, reached, padded_rows, padding, grouped, padded })
    }

    /// Experts of a layer, and those that a token takes.
    pub fn experts(&self) -> (usize, usize) {
        self.layers.first().map_or((0, 0), |layer| (layer.experts, layer.top_k))
    }

    /// Layers with experts.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Seconds of each run, and the load.
    fn time(&self, dispatch: Dispatch, tokens: usize) -> Result<(Vec<f64>, Vec<f32>)> {
        let graph = routed(&self.graph, dispatch)?;
        let program = self.session.compile(&graph, &[HIDDEN, EXPERT_LOAD])?;
        // Each token is a sequence of its own.
        let mut bucket = program.bucket(&training_bindings(&graph, tokens, tokens))?;
        let mut rng = Rng::new(tokens as u64);
        for arg in graph.args(Role::StepInput) {
            let Some(index) = bucket.input_index(&arg.name)? else { continue };
            let values = (0..tokens).map(|i| match &*arg.name {
                "token_ids" => rng.below(self.vocab_size) as i32,
                "seq_ids" => i as i32,
                _ => 0,
            });
            let bytes: Vec<u8> = values.flat_map(i32::to_le_bytes).collect();
            bucket.input(index).copy_from_slice(&bytes);
        }
        let mut times = Vec::with_capacity(self.repeat);
        for run in 0..=self.repeat {
            let began = Instant::now();
            bucket.submit()?;
            bucket.wait()?;
            if run > 0 {
                times.push(began.elapsed().as_secs_f64());
            }
        }
        let load = bucket.tensor(EXPERT_LOAD)?.floats().iter().map(|load| *load as f32).collect();
        Ok((times, load))
    }
}

fn routed(graph: &Graph, dispatch: Dispatch) -> Result<Graph> {
    let terms = RoutingTerms { balance: 0.0, z: 0.0, dispatch };
    Ok(with_routing(graph, &terms)?)
}
