//! Modules that predict further tokens, beside those that `fixtures/prediction.py` writes out: their logits follow from the model's
//! hidden states, whether the steps before knew which tokens follow or the drafting graph added them.

use std::sync::Arc;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_graph::ops::SampleToken;
use ridge_graph::{Arg, Bindings, DType, Graph, Precision, Role, Tensor, Value, conformance, evaluate, passes};
use ridge_models::{BuildOptions, FOLLOWERS, LAST_HIDDEN, ModelFiles, WeightSource, with_blocks};
use ridge_runtime::Session;

use crate::common::{
    BLOCKS, Fixture, SHUFFLED, Sequence, TABLE, empty_state, find, fixtures, options, relative, stack, step_of,
};

const FAMILIES: [&str; 3] = ["glm4_moe", "deepseek_v3", "deepseek_v32"];
const DRAFTS: usize = 3;

/// What runs a graph for its only output, with states that later runs see.
trait Runs {
    fn run(&mut self, graph: &Graph, output: &str, inputs: &[(String, Tensor)], bindings: &Bindings) -> Tensor;
}

struct Evaluated<'a> {
    fixture: &'a Fixture,
    precision: Precision,
    states: Vec<(String, Value)>,
}

impl Runs for Evaluated<'_> {
    fn run(&mut self, graph: &Graph, output: &str, inputs: &[(String, Tensor)], bindings: &Bindings) -> Tensor {
        let mut graph = graph.clone();
        passes::prune(&mut graph, &[output]).expect("has it");
        let value = |arg: &Arg| match arg.role {
            Role::Weight => self.fixture.weight(&arg.name),
            Role::State => Some(find(&self.states, &arg.name).cloned().unwrap_or_else(|| empty_state(arg, bindings))),
            _ => find(inputs, &arg.name).cloned().map(Value::from),
        };
        let mut outputs = evaluate(&graph, &value, bindings, self.precision).expect("evaluates");
        for (name, value) in outputs.split_off(1) {
            self.states.retain(|(known, _)| *known != name);
            self.states.push((name, value));
        }
        outputs[0].1.tensor().clone()
    }
}

struct OnCpu(Session);

impl OnCpu {
    fn new(fixture: &Fixture) -> Self {
        let cpu = Cpu::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).expect("starts");
        let mut session = Session::new(Arc::new(cpu));
        let source = WeightSource::Checkpoint(Arc::clone(&fixture.checkpoint));
        source.load(&mut session, &fixture.model.graph, |_| ()).expect("loads");
        let blocks = with_blocks(&fixture.model.graph, Bindings::new(), BLOCKS);
        session.allocate_states(&fixture.model.graph, &blocks).expect("fits");
        Self(session)
    }
}

impl Runs for OnCpu {
    fn run(&mut self, graph: &Graph, output: &str, inputs: &[(String, Tensor)], bindings: &Bindings) -> Tensor {
        let compiled = self.0.compile(graph, &[output]).expect("compiles");
        let mut bucket = compiled.bucket(bindings).unwrap_or_else(|e| panic!("{e}"));
        let names: Vec<String> = bucket.input_names().map(str::to_owned).collect();
        for (name, tensor) in inputs.iter().filter(|(name, _)| names.contains(name)) {
            bucket.set(name, tensor).expect("fits");
        }
        bucket.submit().expect("runs");
        bucket.wait().expect("completes");
        bucket.tensor(output).expect("asked for")
    }
}

/// A sequence that a model continues and its module drafts behind.
struct Drafting<'a> {
    fixture: &'a Fixture,
    tokens: Vec<i64>,
    sequence: [Sequence; 1],
}

impl<'a> Drafting<'a> {
    fn new(fixture: &'a Fixture) -> Self {
        let tokens = fixture.prompt();
        Self { fixture, sequence: [Sequence::new(&tokens, &SHUFFLED[0])], tokens }
    }

    /// Runs the model on the next `count` tokens; of all but the last it knows what follows. Then drafts behind the one that follows:
    /// `[1, drafts, vocab]`.
    fn draft(&mut self, by: &mut dyn Runs, count: usize) -> Tensor {
        let model = &self.fixture.model;
        let from = self.sequence[0].cached;
        let (mut inputs, bindings) = step_of(&model.graph, &mut self.sequence, &[count]);
        let followers = self.tokens[from + 1..from + count].iter().copied().chain([-1]).collect();
        inputs.push((FOLLOWERS.into(), Tensor::int(DType::I32, &[count], followers)));
        let hidden = by.run(&model.graph, LAST_HIDDEN, &inputs, &bindings);

        let graph = model.drafts.as_ref().expect("was asked for");
        let mut behind = self.sequence.clone();
        let (mut inputs, bindings) = step_of(graph, &mut behind, &[1]);
        inputs.retain(|(name, _)| name != "block_table");
        let table = self.sequence[0].blocks.clone();
        inputs.push(("block_table".into(), Tensor::int(DType::I32, &[1, TABLE], table)));
        inputs.push((LAST_HIDDEN.into(), hidden));
        let greedy = SampleToken::KEYS.into_iter().filter(|(name, _)| *name != "position");
        inputs.extend(greedy.map(|(name, dtype)| (name.to_owned(), Tensor::zeros(dtype, &[1]))));
        by.run(graph, "draft_logits", &inputs, &bindings)
    }
}

/// `[1, drafts, vocab]` each as rows of one matrix.
fn matrix(parts: &[Tensor]) -> Tensor {
    let flat = |t: &Tensor| Tensor { shape: vec![t.shape[0] * t.shape[1], t.shape[2]], ..t.clone() };
    stack(&parts.iter().map(flat).collect::<Vec<_>>())
}

/// The logits behind each token but the last two, which the model is given one by one.
fn one_by_one(fixture: &Fixture, by: &mut dyn Runs) -> Tensor {
    let mut drafting = Drafting::new(fixture);
    matrix(&(0..drafting.tokens.len() - 2).map(|_| drafting.draft(by, 1)).collect::<Vec<_>>())
}

fn evaluated(fixture: &Fixture, precision: Precision) -> Evaluated<'_> {
    Evaluated { fixture, precision, states: Vec::new() }
}

#[test]
fn drafts_mean_what_the_module_computes_in_doubles() {
    for name in FAMILIES {
        let fixture = Fixture::predicting(name, DRAFTS);
        let got = one_by_one(&fixture, &mut evaluated(&fixture, Precision::Exact));
        let want = matrix(&[fixture.expected.tensor("draft_logits_f64")]);
        let off = relative(got.floats(), want.floats());
        assert!(off < 1e-12, "{name}: off by {off:e}");
    }
}

#[test]
fn drafts_behind_chunks_are_those_behind_single_tokens() {
    for name in FAMILIES {
        let fixture = Fixture::predicting(name, DRAFTS);
        let want = matrix(&[fixture.expected.tensor("draft_logits_f64")]);
        let rows = DRAFTS * want.shape[1];
        let (mut drafting, mut by) = (Drafting::new(&fixture), evaluated(&fixture, Precision::Exact));
        for count in [7, 1, 2, 12] {
            let got = drafting.draft(&mut by, count);
            let last = drafting.sequence[0].cached - 1;
            let off = relative(got.floats(), &want.floats()[last * rows..][..rows]);
            assert!(off < 1e-12, "{name}: off by {off:e} behind {count} tokens up to {last}");
        }
    }
}

#[test]
fn drafts_on_the_cpu_are_as_near_to_exact_as_those_of_torch() {
    for name in FAMILIES {
        let fixture = Fixture::predicting(name, DRAFTS);
        let got = one_by_one(&fixture, &mut OnCpu::new(&fixture));
        let by = |precision| one_by_one(&fixture, &mut evaluated(&fixture, precision));
        let others = [Precision::Rounded, Precision::Reordered(1), Precision::Reordered(2)].map(by);
        let [torch, exact] = ["f32", "f64"].map(|of| matrix(&[fixture.expected.tensor(&format!("draft_logits_{of}"))]));
        let plains: Vec<&Tensor> = [&torch].into_iter().chain(&others).collect();
        conformance::near(&got, &plains, &exact).unwrap_or_else(|why| panic!("{name}{why}"));
    }
}

/// DeepSeek-V3's README counts 671 billion parameters of the model and 685 of the checkpoint, which has the embedding and the output
/// projection twice, and a scale for each block of 128 x 128 weights.
#[test]
fn the_module_of_deepseek_v3_has_as_many_parameters_as_published() {
    let files = ModelFiles::from_config(&fixtures().join("configs/DeepSeek-V3.json")).expect("opens");
    let config = files.config().unwrap_or_else(|e| panic!("{e}"));
    let module = config.prediction_parameters().expect("builds").expect("has one");
    assert_eq!(module, 11_610_068_224);
    let model = config.build(&options()).expect("builds").parameter_count();
    let copies = 2 * (config.vocab_size * config.hidden_size) as u64;
    let scales = (model + module) / (128 * 128);
    let billions = |n: u64| (n + 500_000_000) / 1_000_000_000;
    assert_eq!([billions(model), billions(model + module + copies + scales)], [671, 685]);
}

#[test]
fn a_model_without_a_module_drafts_nothing() {
    let config = ModelFiles::open(None).expect("embedded").config().expect("is supported");
    assert!(!config.predicts() && config.prediction_parameters().expect("builds").is_none());
    let refused = config.build(&BuildOptions { drafts: 1, ..options() }).expect_err("refused").to_string();
    assert!(refused.contains("no module that predicts further tokens"), "{refused}");
}

/// Without drafts a checkpoint's module is left out, and with drafts what it shares with the model.
#[test]
fn tensors_that_a_model_does_without_are_left_out() {
    for name in FAMILIES {
        let (with, without) = (Fixture::predicting(name, 1), Fixture::predicting(name, 0));
        let unused = |fixture: &Fixture| fixture.checkpoint.unused().len();
        assert_eq!(unused(&with), 2, "{name}");
        assert!(unused(&without) > 12, "{name}");
        let more = with.model.parameter_count() - without.model.parameter_count();
        assert_eq!(with.config.prediction_parameters(), Ok(Some(more)), "{name}");
        let drafts = with.model.drafts.as_ref().expect("was asked for");
        let known = |arg: &Arg| with.model.parameters().any(|known| known.name == arg.name);
        assert!(drafts.args(Role::Weight).all(known), "{name}: the graph lacks weights of its drafts");
    }
}
