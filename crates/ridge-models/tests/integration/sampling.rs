//! Biases, penalties and the limits of sampling beside transformers' logits processors (fixtures/sampling.json): what
//! every decoder does behind its logits, with the logits given.

use ridge_cpu::{Cpu, CpuOptions};
use ridge_graph::ops::SampleToken;
use ridge_graph::{Arg, Bindings, Builder, DType, Dim, Graph, Precision, Tensor, Type, Value, evaluate, uniform};
use ridge_runtime::Session;
use serde_json::Value as Json;
use std::sync::Arc;

/// Draws of a case, each a row.
const DRAWS: usize = 300;
const BLOCK: usize = 8;
const SEED: i64 = 77;

fn cases() -> Vec<Json> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/sampling.json");
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{path}: {e}"));
    serde_json::from_str(&text).expect("is JSON")
}

fn numbers(json: &Json) -> Vec<f64> {
    json.as_array().expect("a list").iter().map(|x| x.as_f64().expect("a number")).collect()
}

fn ids(json: &Json) -> Vec<i64> {
    json.as_array().expect("a list").iter().map(|x| x.as_i64().expect("an id")).collect()
}

/// Logits after adjustment, and the token drawn from them.
fn graph(vocab: usize, blocks: usize, lists: [usize; 2]) -> Graph {
    let mut g = Builder::new();
    let rows = Dim::sym("rows");
    let row = |dtype| Type::tensor(dtype, [&rows]);
    let wide = |dtype, n: usize| Type::tensor(dtype, [rows.clone(), n.into()]);
    let mut ask = |name: &str, ty| g.step_input(name, ty).expect("a fresh name");
    let logits = ask("logits", wide(DType::F32, vocab));
    let table = ask("block_table", wide(DType::I32, blocks));
    let [lengths, prompts] = ["lengths", "prompt_lengths"].map(|name| ask(name, row(DType::I32)));
    let penalties =
        ["repetition_penalty", "frequency_penalty", "presence_penalty"].map(|name| ask(name, row(DType::F32)));
    let [multiplier, base] = ["dry_multiplier", "dry_base"].map(|name| ask(name, row(DType::F32)));
    let [allowed, range] = ["dry_allowed_length", "dry_range"].map(|name| ask(name, row(DType::I32)));
    let breakers = ask("dry_breakers", wide(DType::I32, lists[0]));
    let bias = [ask("bias_ids", wide(DType::I32, lists[1])), ask("bias_values", wide(DType::F32, lists[1]))];
    let keys = SampleToken::KEYS.map(|(name, dtype)| ask(name, row(dtype)));
    let said = ask("said", Type::tensor(DType::I32, [blocks * BLOCK]));
    let slots = ask("slots", Type::tensor(DType::I32, [blocks * BLOCK]));
    let history = g.state("history", Type::state(DType::I32, [blocks, BLOCK])).expect("a fresh name");
    let history = g.history_write(history, said, slots).expect("fits");
    let logits = g.logit_bias(logits, bias[0], bias[1]).expect("fits");
    let logits = g.penalties(logits, [history, table, lengths, prompts], penalties).expect("fits");
    let logits = g.dry(logits, [history, table, lengths], [multiplier, base, allowed, range], breakers).expect("fits");
    let token = g.sample_token(logits, keys).expect("fits");
    g.finish(vec![("adjusted".into(), logits), ("token".into(), token)]).expect("finishes")
}

/// Adjusted logits and tokens of a case, exactly and on the CPU.
fn results(case: &Json) -> [(Vec<f64>, Vec<i64>); 2] {
    let settings = &case["settings"];
    let logits = numbers(&case["logits"]);
    let vocab = logits.len();
    let (prompt, answer) = (ids(&case["prompt"]), ids(&case["answer"]));
    let mut said: Vec<i64> = [&prompt[..], &answer[..]].concat();
    let length = said.len();
    let blocks = length.div_ceil(BLOCK);
    said.resize(blocks * BLOCK, 5);
    let breakers = ids(&settings["dry_breakers"]);
    let bias: Vec<Vec<f64>> = settings["bias"].as_array().expect("a list").iter().map(numbers).collect();
    let graph = graph(vocab, blocks, [breakers.len(), bias.len()]);
    let value = |arg: &Arg| {
        let float = |wide: bool, x: &[f64]| Tensor::float(DType::F32, &shape(wide, x), x.repeat(DRAWS)).rounded();
        let int = |dtype, wide: bool, x: &[i64]| Tensor::int(dtype, &shape(wide, x), x.repeat(DRAWS));
        let number = |name: &str| settings[name].as_f64().expect("a number");
        // Blocks in another order than they are told in.
        let order: Vec<i64> = (0..blocks as i64).rev().collect();
        match &*arg.name {
            "history" => Tensor::zeros(DType::I32, &[blocks, BLOCK]),
            "said" => Tensor::int(DType::I32, &[said.len()], said.clone()),
            "slots" => {
                let slot = |i: usize| order[i / BLOCK] * BLOCK as i64 + (i % BLOCK) as i64;
                Tensor::int(DType::I32, &[said.len()], (0..said.len()).map(slot).collect())
            }
            "logits" => float(true, &logits),
            "block_table" => int(DType::I32, true, &order),
            "lengths" => int(DType::I32, false, &[length as i64]),
            "prompt_lengths" => int(DType::I32, false, &[prompt.len() as i64]),
            "dry_breakers" => int(DType::I32, true, &breakers),
            "bias_ids" => int(DType::I32, true, &bias.iter().map(|b| b[0] as i64).collect::<Vec<_>>()),
            "bias_values" => float(true, &bias.iter().map(|b| b[1]).collect::<Vec<_>>()),
            "seed" => int(DType::I64, false, &[SEED]),
            "sequence" => int(DType::I64, false, &[0]),
            "position" => Tensor::int(DType::I64, &[DRAWS], (0..DRAWS as i64).collect()),
            name if arg.ty.dtype == DType::I32 => int(DType::I32, false, &[number(name) as i64]),
            name => float(false, &[number(name)]),
        }
    };
    let bindings = Bindings::new().with("rows", DRAWS);
    let exact =
        evaluate(&graph, &|arg| Some(Value::Plain(value(arg))), &bindings, Precision::Exact).expect("evaluates");
    let exact = |name: &str| exact.iter().find(|(n, _)| n == name).expect("asked for").1.tensor().clone();

    let mut session = Session::new(Arc::new(Cpu::new(CpuOptions::default()).expect("starts")));
    session.allocate_states(&graph, &bindings).expect("allocates");
    let compiled = session.compile(&graph, &["adjusted", "token"]).expect("compiles");
    let mut bucket = compiled.bucket(&bindings).expect("binds");
    for arg in graph.args(ridge_graph::Role::StepInput) {
        bucket.set(&arg.name, &value(arg)).expect("fits");
    }
    bucket.submit().and_then(|()| bucket.wait()).expect("runs");
    let adjusted = bucket.tensor("adjusted").expect("asked for");
    let token = bucket.tensor("token").expect("asked for");
    [(exact("adjusted"), exact("token")), (adjusted, token)]
        .map(|(adjusted, token)| (adjusted.floats()[..vocab].to_vec(), token.ints().to_vec()))
}

/// Of a number a row, or of a list a row.
fn shape<T>(wide: bool, x: &[T]) -> Vec<usize> {
    if wide { vec![DRAWS, x.len()] } else { vec![DRAWS] }
}

#[test]
fn tokens_are_drawn_as_transformers_would() {
    let mut adjusted = 0;
    for (i, case) in cases().iter().enumerate() {
        let (wanted, probabilities) = (numbers(&case["adjusted"]), numbers(&case["probabilities"]));
        adjusted += usize::from(wanted != numbers(&case["logits"]));
        // Likeliest first, equals by id.
        let mut order: Vec<usize> = (0..probabilities.len()).collect();
        order.sort_by(|a, b| wanted[*b].total_cmp(&wanted[*a]).then(a.cmp(b)));
        let token = |draw: usize| {
            let u = f64::from(uniform(SEED, SampleToken::STREAM, 0, draw as i64, 0));
            let mut sum = 0.0;
            let passed = |id: &&usize| {
                sum += probabilities[**id];
                sum <= u || probabilities[**id] == 0.0
            };
            order[order.iter().take_while(passed).count()] as i64
        };
        let tokens: Vec<i64> = (0..DRAWS).map(token).collect();
        for (how, (got, drawn)) in ["exactly", "on the CPU"].iter().zip(results(case)) {
            for (id, (got, want)) in got.iter().zip(&wanted).enumerate() {
                // Settings are rounded to f32 in both.
                assert!(
                    (got - want).abs() <= 2e-6 * want.abs().max(1.0),
                    "case {i} {how}: logit {id} is {got}, not {want}"
                );
            }
            assert_eq!(drawn, tokens, "case {i} {how}: {}", case["settings"]);
        }
    }
    assert!(adjusted >= 12, "{adjusted} cases change a logit");
}
