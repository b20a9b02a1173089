//! BERT beside transformers (fixtures/families/bert): hidden states and pooled vectors, exactly and on the CPU, of a text
//! alone and in a batch without padding.

use std::sync::Arc;

use crate::common::{Expected, fixtures, relative};
use ridge_cpu::{Cpu, CpuOptions};
use ridge_graph::{Arg, Bindings, DType, Graph, Precision, Role, Tensor, Value, conformance, evaluate};
use ridge_models::{BuildOptions, Encoder, ModelFiles, WeightSource, parameters, symbols};
use ridge_runtime::{Session, lower};

struct Fixture {
    encoder: Encoder,
    source: WeightSource,
    expected: Expected,
}

impl Fixture {
    fn open() -> Self {
        let files = ModelFiles::open(Some(&fixtures().join("families/bert"))).expect("a model");
        let config = files.encoder_config().expect("is supported").expect("is an encoder");
        let mut encoder = config.build(&BuildOptions::default()).expect("builds");
        let checkpoint = config.arrange(files.checkpoint().expect("its weights")).expect("arranges");
        let source = WeightSource::Checkpoint(Arc::new(checkpoint));
        encoder.graph = source.retype(&encoder.graph, None).expect("fits");
        Self { encoder, source, expected: Expected::open("families/bert/expected.safetensors") }
    }

    /// Texts that the fixture calls `prefix`, of these lengths: the step's inputs.
    fn step(&self, prefix: &str, lengths: &[usize]) -> (Vec<(&'static str, Tensor)>, Bindings) {
        let int = |values: Vec<i64>| Tensor::int(DType::I32, &[values.len()], values);
        let tokens = |name: &str| int(self.expected.tokens(&format!("{prefix}{name}")));
        let rows = lengths.iter().enumerate();
        let ids = rows.flat_map(|(i, n)| std::iter::repeat_n(i as i64, *n)).collect();
        let starts = (0..=lengths.len()).map(|i| lengths[..i].iter().sum::<usize>() as i64).collect();
        let (words, types) =
            if prefix.is_empty() { ("input_ids", "token_type_ids") } else { ("ids", "token_type_ids") };
        let inputs = vec![
            ("token_ids", tokens(words)),
            ("token_type_ids", tokens(types)),
            ("seq_ids", int(ids)),
            ("query_start", int(starts)),
        ];
        let total: usize = lengths.iter().sum();
        (inputs, Bindings::new().with(symbols::TOKENS, total).with(symbols::SEQS, lengths.len()))
    }

    fn exact(&self, graph: &Graph, (inputs, bindings): &(Vec<(&'static str, Tensor)>, Bindings), name: &str) -> Tensor {
        let WeightSource::Checkpoint(checkpoint) = &self.source else { unreachable!("it has weights") };
        let value = |arg: &Arg| match arg.role {
            Role::Weight => {
                let tensor = checkpoint.tensor(&arg.name).expect("it has all");
                Some(Value::Plain(Tensor::from_bytes(DType::F32, tensor.shape, tensor.data)))
            }
            _ => inputs.iter().find(|(n, _)| *n == &*arg.name).map(|(_, t)| Value::Plain(t.clone())),
        };
        let all = evaluate(graph, &value, bindings, Precision::Exact).expect("evaluates");
        all.into_iter().find(|(n, _)| n == name).expect("asked for").1.tensor().clone()
    }

    fn on_cpu(
        &self,
        (inputs, bindings): &(Vec<(&'static str, Tensor)>, Bindings),
        name: &str,
        threads: usize,
    ) -> Tensor {
        let cpu =
            Cpu::new(CpuOptions { threads: Some(threads), poison: true, ..CpuOptions::default() }).expect("starts");
        let mut session = Session::new(Arc::new(cpu));
        self.source.load(&mut session, &self.encoder.graph, |_| ()).expect("loads");
        let mut bucket =
            session.compile(&self.encoder.graph, &[name]).and_then(|c| c.bucket(bindings)).expect("compiles");
        for (input, tensor) in inputs {
            if bucket.input_index(input).is_ok_and(|index| index.is_some()) {
                bucket.set(input, tensor).expect("fits");
            }
        }
        bucket.submit().and_then(|()| bucket.wait()).expect("runs");
        bucket.tensor(name).expect("asked for")
    }
}

const ALONE: (&str, &[usize]) = ("", &[24]);
const BATCH: (&str, &[usize]) = ("batch_", &[13, 7]);

#[test]
fn the_graph_means_what_a_forward_pass_in_doubles_computes() {
    let fixture = Fixture::open();
    let lowered = lower(&fixture.encoder.graph, &["hidden"], &[]).expect("lowers");
    for (prefix, lengths) in [ALONE, BATCH] {
        let step = fixture.step(prefix, lengths);
        let want = fixture.expected.tensor(&format!("{prefix}hidden_f64"));
        for graph in [&fixture.encoder.graph, &lowered] {
            let off = relative(fixture.exact(graph, &step, "hidden").floats(), want.floats());
            assert!(off < 1e-12, "{prefix}: off by {off:e}");
        }
    }
}

#[test]
fn hidden_states_are_as_near_to_exact_as_those_of_transformers() {
    let fixture = Fixture::open();
    for (prefix, lengths) in [ALONE, BATCH] {
        let step = fixture.step(prefix, lengths);
        let [plain, exact] = ["f32", "f64"].map(|kind| fixture.expected.tensor(&format!("{prefix}hidden_{kind}")));
        let got = fixture.on_cpu(&step, "hidden", 1);
        conformance::near(&got, &[&plain], &exact).unwrap_or_else(|why| panic!("{prefix}: {why}"));
        assert_eq!(fixture.on_cpu(&step, "hidden", 3).to_bytes(), got.to_bytes(), "{prefix}: three threads");
    }
}

#[test]
fn a_text_has_the_same_bits_alone_and_in_a_batch() {
    let fixture = Fixture::open();
    let (inputs, bindings) = fixture.step(BATCH.0, BATCH.1);
    let together = fixture.on_cpu(&(inputs.clone(), bindings), "hidden", 2);
    let first = BATCH.1[0];
    let alone = inputs.iter().map(|(name, tensor)| {
        let values = match *name {
            "query_start" => vec![0, first as i64],
            _ => tensor.ints()[..first].to_vec(),
        };
        (*name, Tensor::int(DType::I32, &[values.len()], values))
    });
    let bindings = Bindings::new().with(symbols::TOKENS, first).with(symbols::SEQS, 1usize);
    let alone = fixture.on_cpu(&(alone.collect(), bindings), "hidden", 1);
    assert_eq!(alone.floats(), &together.floats()[..alone.len()]);
}

#[test]
fn pooled_vectors_are_those_of_torch() {
    let fixture = Fixture::open();
    for (output, name) in [
        ("mean", "pooled_mean_f64"),
        ("cls", "pooled_cls_f64"),
        ("mean_normalized", "pooled_mean_l2_f64"),
        ("cls_normalized", "pooled_cls_l2_f64"),
    ] {
        let want = fixture.expected.tensor(name);
        let rows = [ALONE, BATCH].map(|(prefix, lengths)| {
            let step = fixture.step(prefix, lengths);
            let exact = fixture.exact(&fixture.encoder.graph, &step, output);
            let off = relative(fixture.on_cpu(&step, output, 2).floats(), exact.floats());
            assert!(off < 1e-5, "{output} on the CPU is off by {off:e}");
            exact.floats().to_vec()
        });
        let off = relative(&rows.concat(), want.floats());
        assert!(off < 1e-12, "{output}: off by {off:e}");
    }
    // The last token's, and the largest of each element, by hand.
    let step = fixture.step(BATCH.0, BATCH.1);
    let hidden = fixture.exact(&fixture.encoder.graph, &step, "hidden");
    let width = hidden.shape[1];
    let row = |i: usize| &hidden.floats()[i * width..(i + 1) * width];
    assert_eq!(fixture.exact(&fixture.encoder.graph, &step, "last").floats(), [row(12), row(19)].concat());
    let largest = |rows: std::ops::Range<usize>| {
        (0..width).map(|i| rows.clone().map(|r| row(r)[i]).fold(f64::MIN, f64::max)).collect::<Vec<_>>()
    };
    assert_eq!(
        fixture.exact(&fixture.encoder.graph, &step, "max").floats(),
        [largest(0..13), largest(13..20)].concat()
    );
}

#[test]
fn parameters_are_counted() {
    // Of 96 words, 48 positions and 2 segments of 32, and two layers.
    let layer = 4 * (32 * 32 + 32) + 2 * 32 * 48 + 48 + 32 + 4 * 32;
    assert_eq!(parameters(&Fixture::open().encoder.graph), (96 + 48 + 2) * 32 + 2 * 32 + 2 * layer);
}
