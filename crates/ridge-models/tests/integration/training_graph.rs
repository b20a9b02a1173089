//! The graph that a family is trained with, without a cache, beside the one that serves it.

use crate::common::{
    BLOCKS, Evaluated, FAMILIES, Fixture, SHUFFLED, Sequence, empty_state, find, relative, rows, step_of,
};
use ridge_graph::grad::{float_weights, gradient};
use ridge_graph::{Arg, Bindings, DType, Graph, Precision, Role, Tensor, Value, evaluate, passes};
use ridge_models::{BuildOptions, WeightSource, symbols, with_loss};
use std::sync::Arc;

/// Families whose attention has ALiBi slopes, sinks or chunked windows, or whose layers read a cache.
const WITHOUT_TRAINING: [&str; 9] =
    ["bloom", "deepseek_v32", "falcon_rw", "glm_moe_dsa", "gpt_oss", "gpt_oss_mxfp4", "hyena", "llama4", "mpt"];

/// The training graph of a fixture, its weights stored as the checkpoint has them.
fn training_graph(fixture: &Fixture, context: Option<usize>) -> Graph {
    let module = fixture.config.build_training(&BuildOptions { context, ..BuildOptions::default() }).expect("builds");
    let source = WeightSource::Checkpoint(Arc::clone(&fixture.checkpoint));
    source.retype(&module.graph, None).expect("has the weights")
}

/// Step inputs of whole texts, one after another, each token's target being the next one, then padding.
fn packed(texts: &[&[i64]], padding: usize) -> (Vec<(&'static str, Tensor)>, Bindings) {
    let (mut tokens, mut positions, mut ids, mut targets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (id, text) in texts.iter().enumerate() {
        tokens.extend_from_slice(text);
        positions.extend(0..text.len() as i64);
        ids.resize(ids.len() + text.len(), id as i64);
        targets.extend_from_slice(&text[1..]);
        targets.push(-1);
    }
    for column in [&mut tokens, &mut positions] {
        column.resize(column.len() + padding, 0);
    }
    for column in [&mut ids, &mut targets] {
        column.resize(column.len() + padding, -1);
    }
    let count = tokens.len();
    let column = |name, values| (name, Tensor::int(DType::I32, &[count], values));
    let inputs = vec![
        column("token_ids", tokens),
        column("positions", positions),
        column("seq_ids", ids),
        column("targets", targets),
    ];
    (inputs, Bindings::new().with(symbols::TOKENS, count))
}

fn run(fixture: &Fixture, graph: &Graph, texts: &[&[i64]], padding: usize) -> Vec<(String, Tensor)> {
    let (inputs, bindings) = packed(texts, padding);
    let value = |arg: &Arg| match arg.role {
        Role::Weight => fixture.weight(&arg.name),
        _ => inputs.iter().find(|(name, _)| **name == *arg.name).map(|(_, tensor)| tensor.clone().into()),
    };
    let outputs = evaluate(graph, &value, &bindings, Precision::Exact).expect("evaluates");
    outputs.into_iter().map(|(name, value)| (name, value.tensor().clone())).collect()
}

#[test]
fn a_training_graph_has_the_logits_of_the_one_that_serves() {
    for &(name, context) in FAMILIES {
        let fixture = Fixture::family(name, context);
        if WITHOUT_TRAINING.contains(&name) {
            let built = fixture.config.build_training(&BuildOptions::default());
            let why = built.err().map(|e| e.to_string()).unwrap_or_default();
            assert!(why.contains("cannot be trained yet"), "{name}: {why}");
            continue;
        }
        let mut graph = training_graph(&fixture, context);
        passes::prune(&mut graph, &["all_logits"]).expect("has them");
        assert_eq!(graph.args(Role::State).count(), 0, "{name} has a cache");
        let text = fixture.prompt();
        let mut cached = Evaluated::new(&fixture, Precision::Exact);
        let want = cached.run(&mut [Sequence::new(&text, &SHUFFLED[0])], &[text.len()]);
        // Alone, and packed between others and padding.
        let others = [&text[3..12], &text[..5]];
        let alone = run(&fixture, &graph, &[&text], 0);
        let between = run(&fixture, &graph, &[others[0], &text, others[1]], 2);
        let [alone, between] =
            [alone, between].map(|outputs| find(&outputs, "all_logits").cloned().expect("asked for"));
        let between = rows(&between, others[0].len()..others[0].len() + text.len());
        for (what, got) in [("alone", alone), ("packed", between)] {
            let off = relative(got.floats(), want.floats());
            assert!(off < 1e-12, "{name}, {what}: off by {off:e}");
        }
    }
}

/// In f32 too, where exponentials of these keys do not fit.
#[test]
fn the_average_of_rwkv4_is_right_for_large_keys() {
    let fixture = Fixture::family("rwkv4", None);
    let mut graph = training_graph(&fixture, None);
    passes::prune(&mut graph, &["all_logits"]).expect("has them");
    let text = fixture.prompt();
    for factor in [1.0, 20.0, 45.0] {
        let value = |arg: &Arg| {
            let weight = fixture.weight(&arg.name)?;
            if !arg.name.ends_with("time_mixer.key.weight") {
                return Some(weight);
            }
            let keys: Vec<f64> = weight.tensor().floats().iter().map(|x| x * factor).collect();
            Some(Tensor::float(DType::F32, &weight.tensor().shape, keys).into())
        };
        let by = |graph: &Graph, inputs: &[(String, Tensor)], bindings: &Bindings, precision| {
            let value = |arg: &Arg| match arg.role {
                Role::Weight => value(arg),
                Role::State => Some(empty_state(arg, bindings)),
                _ => find(inputs, &arg.name).cloned().map(Value::from),
            };
            evaluate(graph, &value, bindings, precision).expect("evaluates")[0].1.tensor().clone()
        };
        let served = fixture.graph(&["all_logits"]);
        let (inputs, bindings) = step_of(&served, &mut [Sequence::new(&text, &SHUFFLED[0])], &[text.len()]);
        let [exact, plain, other] = [Precision::Exact, Precision::Rounded, Precision::Reordered(1)]
            .map(|precision| by(&served, &inputs, &bindings, precision));
        let (inputs, bindings) = packed(&[&text], 0);
        let inputs: Vec<_> = inputs.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect();
        let off = relative(by(&graph, &inputs, &bindings, Precision::Exact).floats(), exact.floats());
        assert!(off < 1e-9, "keys times {factor}: off by {off:e}");
        let got = by(&graph, &inputs, &bindings, Precision::Rounded);
        assert!(got.floats().iter().all(|x| x.is_finite()), "keys times {factor}");
        let off = |x: &Tensor| relative(x.floats(), exact.floats());
        let (ours, theirs) = (off(&got), off(&plain).max(off(&other)));
        println!("keys times {factor}: off by {ours:.1e}, as served by {theirs:.1e}");
        assert!(ours <= 4.0 * theirs, "keys times {factor}: off by {ours:e}, as served by {theirs:e}");
    }
}

#[test]
fn a_training_graph_has_the_loss_and_gradients_of_the_one_that_serves() {
    // A window, caps of scores and of logits, tied embeddings; biases with learned positions; and recurrences with a decay of a
    // head, of a channel, and with a part of low rank.
    for name in ["gemma2", "gpt2", "mamba2", "mamba", "qwen3_next"] {
        let fixture = Fixture::family(name, None);
        let text = fixture.prompt();
        let differentiated = |mut graph: Graph| {
            passes::prune(&mut graph, &["loss"]).expect("has it");
            let weights = float_weights(&graph);
            gradient(&graph, "loss", &weights).expect("has a gradient")
        };
        let served = differentiated(with_loss(&fixture.model.graph).expect("has logits"));
        let (mut inputs, bindings) = step_of(&served, &mut [Sequence::new(&text, &SHUFFLED[0])], &[text.len()]);
        let (ours, _) = packed(&[&text], 0);
        inputs.extend(ours.into_iter().filter(|(name, _)| *name == "targets").map(|(name, t)| (name.to_owned(), t)));
        let value = |arg: &Arg| match arg.role {
            Role::Weight => fixture.weight(&arg.name),
            Role::State => Some(empty_state(arg, &bindings)),
            _ => find(&inputs, &arg.name).cloned().map(Value::from),
        };
        let want = evaluate(&served, &value, &bindings, Precision::Exact).expect("evaluates");
        let got = run(&fixture, &differentiated(training_graph(&fixture, None)), &[&text], 0);
        assert!(got.len() > 10 && BLOCKS > 0, "{name} has weights");
        for (output, got) in &got {
            let want = find(&want, output).unwrap_or_else(|| panic!("{name} has no {output}")).tensor();
            let norm = want.floats().iter().map(|x| x * x).sum::<f64>().sqrt();
            let off = got.floats().iter().zip(want.floats()).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
            assert!(off <= 1e-11 * norm + 1e-13, "{name}: {output} is off by {off:e} of {norm:e}");
        }
    }
}

#[test]
fn routing_that_drops_no_token_changes_nothing_and_padding_goes_to_no_expert() {
    use passes::{Dispatch, EXPERT_DROPPED, EXPERT_LOAD, RoutingTerms, routed_layers, with_routing};
    for name in ["mixtral", "minimax_m2", "qwen3_next"] {
        let fixture = Fixture::family(name, None);
        let graph = training_graph(&fixture, None);
        let layers = routed_layers(&graph).expect("has experts");
        let text = fixture.prompt();
        let texts = [&text[..], &text[..7]];
        let tokens = texts.iter().map(|text| text.len()).sum::<usize>();
        let routed = |dispatch, balance, padding| {
            let terms = RoutingTerms { balance, z: balance, dispatch };
            let mut graph = with_routing(&graph, &terms).expect("has experts");
            passes::prune(&mut graph, &["hidden", "loss_sum", EXPERT_LOAD, EXPERT_DROPPED]).expect("has them");
            let outputs = run(&fixture, &graph, &texts, padding);
            let floats = |name: &str| find(&outputs, name).expect("asked for").floats().to_vec();
            let hidden = rows(find(&outputs, "hidden").expect("asked for"), 0..tokens).floats().to_vec();
            (hidden, floats(EXPERT_LOAD), floats(EXPERT_DROPPED), floats("loss_sum"))
        };
        let want = routed(Dispatch::Dropless, 0.0, 0);
        for (load, layer) in want.1.chunks(layers[0].experts).zip(&layers) {
            assert_eq!(load.iter().sum::<f64>(), (tokens * layer.top_k) as f64, "{name}");
        }
        for dispatch in [Dispatch::Dropless, Dispatch::Capacity(tokens), Dispatch::Padded(tokens)] {
            let got = routed(dispatch, 0.0, 3);
            let off = relative(&got.0, &want.0);
            assert!(off < 1e-12, "{name}, {dispatch:?}: off by {off:e}");
            assert_eq!((&got.1, &got.2), (&want.1, &vec![0.0; layers.len()]), "{name}, {dispatch:?}");
        }
        // Less than the largest load: what is beyond it is dropped, alike by both.
        let largest = want.1.iter().copied().fold(0.0, f64::max) as usize;
        let [kept, padded] =
            [Dispatch::Capacity(largest - 1), Dispatch::Padded(largest - 1)].map(|dispatch| routed(dispatch, 0.0, 3));
        assert!(kept.2.iter().sum::<f64>() >= 1.0 && kept.2 == padded.2, "{name}: {:?} {:?}", kept.2, padded.2);
        assert!(relative(&padded.0, &kept.0) < 1e-12 && relative(&kept.0, &want.0) > 1e-6, "{name}");
        // Losses do not see padding either.
        let [without, with] = [0, 3].map(|padding| routed(Dispatch::Dropless, 0.1, padding).3[0]);
        assert!((with - without).abs() < 1e-12 * without && without > want.3[0], "{name}: {with} and {without}");
    }
}
