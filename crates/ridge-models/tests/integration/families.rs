//! Logits of a small random model of each family against transformers and against its forward pass in doubles
//! (`fixtures/families.py`): by evaluation, and on the CPU by the rule of tolerance.

use crate::common::mesh::{on_mesh, sharded, tp};
use crate::common::{
    BLOCK_SIZE, Evaluated, FAMILIES, Fixture, OnCpu, SHUFFLED, Sequence, empty_state, find, fixtures, judge,
    plain_logits, relative, rows, stack, step_of,
};
use ridge_cpu::{Cpu, CpuOptions};
use ridge_graph::shard::MeshAxis;
use ridge_graph::{Arg, DType, Graph, Precision, Role, Tensor, Value, conformance, evaluate, passes};
use ridge_models::parallel::tensor_parallel;
use ridge_models::{BuildOptions, ModelConfig, has_fixed_state};
use ridge_runtime::Backend;

/// Tokens of the prompt that precedes single tokens in `decode_logits_f32`.
const PROMPT: usize = 16;

fn all() -> impl Iterator<Item = Fixture> {
    FAMILIES.iter().map(|(name, context)| Fixture::family(name, *context))
}

fn has_experts(fixture: &Fixture) -> bool {
    fixture.model.graph.args(Role::Weight).any(|arg| arg.name.contains(".experts."))
}

/// Does one rounding move all that follows: that of an expert's weight its row, that of a recurrent state the rows behind it, and
/// that of a key or value that several layers share all of them?
fn carries_roundings(fixture: &Fixture) -> bool {
    has_experts(fixture) || has_fixed_state(&fixture.model.graph) || shares_keys(fixture)
}

fn shares_keys(fixture: &Fixture) -> bool {
    let layers = fixture.model.state_groups.iter().map(|group| group.states.len()).sum::<usize>();
    layers < fixture.config.num_hidden_layers
}

fn whole(tokens: &[i64]) -> [Sequence; 1] {
    [Sequence::new(tokens, &SHUFFLED[0])]
}

fn within(what: &str, got: &Tensor, plain: &Tensor, exact: &Tensor) -> f64 {
    conformance::near(got, &[plain], exact).unwrap_or_else(|why| panic!("{what}: {why}"))
}

/// As [`within`], for what has experts beside other plain implementations too: a whole row moves with the rounding of one
/// weight of its experts, and torch's luck with that says little alone. `run` gives the rows by a plain one.
fn within_plain(
    fixture: &Fixture,
    got: &Tensor,
    torch: &Tensor,
    exact: &Tensor,
    run: impl Fn(&mut Evaluated<'_>) -> Tensor,
) {
    let mut others = Vec::new();
    if carries_roundings(fixture) {
        let precisions = [Precision::Rounded].into_iter().chain((1..4).map(Precision::Reordered));
        others.extend(precisions.map(|precision| run(&mut Evaluated::new(fixture, precision))));
    }
    let plains: Vec<&Tensor> = [torch].into_iter().chain(&others).collect();
    conformance::near(got, &plains, exact).unwrap_or_else(|why| panic!("{}: {why}", fixture.name));
}

fn in_chunks(cpu: &mut OnCpu, tokens: &[i64], chunks: &[usize]) -> Tensor {
    let mut sequence = whole(tokens);
    stack(&chunks.iter().map(|n| cpu.run(&mut sequence, &[*n])).collect::<Vec<_>>())
}

#[test]
fn every_graph_means_what_its_forward_pass_in_doubles_computes() {
    let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).expect("starts");
    for fixture in all() {
        let (tokens, want) = (fixture.prompt(), fixture.expected.tensor("logits_f64"));
        let mut exact = Evaluated::new(&fixture, Precision::Exact);
        let off = relative(exact.run(&mut whole(&tokens), &[tokens.len()]).floats(), want.floats());
        let mut lowered = Evaluated::lowered(&fixture, cpu.kernels());
        let lowered = relative(lowered.run(&mut whole(&tokens), &[tokens.len()]).floats(), want.floats());
        println!("{}: off by {off:.1e}, lowered by {lowered:.1e}", fixture.name);
        assert!(off < 1e-12 && lowered < 1e-12, "{}: off by {off:e}, lowered by {lowered:e}", fixture.name);
    }
}

#[test]
fn prompt_logits_are_as_near_to_exact_as_those_of_transformers() {
    for fixture in all() {
        let (tokens, expected) = (fixture.prompt(), &fixture.expected);
        let got = OnCpu::new(&fixture, 2).run(&mut whole(&tokens), &[tokens.len()]);
        let (torch, exact) = (expected.tensor("logits_f32"), expected.tensor("logits_f64"));
        let used = match carries_roundings(&fixture) {
            // A whole row moves with the rounding of one weight of its experts: torch's luck with that says little alone.
            true => judge(fixture.name, &got, &torch, &plain_logits(&fixture), &exact),
            false => within(fixture.name, &got, &torch, &exact),
        };
        let worst = got.floats().iter().zip(exact.floats()).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        println!("{}: {used:.2} of what is allowed, at most {worst:.1e}", fixture.name);
    }
}

#[test]
fn decoded_logits_are_as_near_to_exact_as_those_of_transformers_with_its_cache() {
    for fixture in all().filter(|f| f.name != "llama_dynamic") {
        let (tokens, expected) = (fixture.prompt(), &fixture.expected);
        let mut chunks = vec![PROMPT];
        chunks.resize(1 + tokens.len() - PROMPT, 1);
        let got = in_chunks(&mut OnCpu::new(&fixture, 2), &tokens, &chunks);
        let last = PROMPT - 1..tokens.len();
        let exact = rows(&expected.tensor("logits_f64"), last.clone());
        let plain =
            |evaluated: &mut Evaluated<'_>| rows(&evaluated.run(&mut whole(&tokens), &[tokens.len()]), last.clone());
        within_plain(&fixture, &rows(&got, last.clone()), &expected.tensor("decode_logits_f32"), &exact, plain);
    }
}

#[test]
fn ragged_sequences_share_steps_without_padding() {
    for fixture in all().filter(|f| f.expected.has("batch_ids")) {
        let expected = &fixture.expected;
        let (tokens, lens) = (expected.tokens("batch_ids"), expected.tokens("batch_lens"));
        let (long, short) = tokens.split_at(lens[0] as usize);
        let exact = expected.tensor("batch_logits_f64");
        let sequences = || [Sequence::new(long, &SHUFFLED[0]), Sequence::new(short, &SHUFFLED[1])];
        let got = Evaluated::new(&fixture, Precision::Exact).run(&mut sequences(), &[long.len(), short.len()]);
        assert!(relative(got.floats(), exact.floats()) < 1e-12, "{}", fixture.name);

        let mut cpu = OnCpu::new(&fixture, 2);
        let got = cpu.run(&mut sequences(), &[long.len(), short.len()]);
        let plain = |evaluated: &mut Evaluated<'_>| evaluated.run(&mut sequences(), &[long.len(), short.len()]);
        within_plain(&fixture, &got, &expected.tensor("batch_logits_f32"), &exact, plain);
        // And when they come in pieces that are not together.
        let (mut parts, mut running) = ([Vec::new(), Vec::new()], sequences());
        for counts in [[11, 2], [1, 0], [0, 6], [12, 1]] {
            let logits = cpu.run(&mut running, &counts);
            parts[0].push(rows(&logits, 0..counts[0]));
            parts[1].push(rows(&logits, counts[0]..counts[0] + counts[1]));
        }
        assert_eq!(stack(&[stack(&parts[0]), stack(&parts[1])]), got, "{}", fixture.name);
    }
}

#[test]
fn chunks_neighbours_and_threads_change_no_bit() {
    for fixture in all() {
        let tokens = fixture.prompt();
        let alone = OnCpu::new(&fixture, 1).run(&mut whole(&tokens), &[tokens.len()]);
        let mut cpu = OnCpu::new(&fixture, 3);
        for chunks in [vec![1; 24], vec![5, 5, 5, 5, 4], vec![9, 15], vec![24]] {
            assert_eq!(in_chunks(&mut cpu, &tokens, &chunks), alone, "{} in {chunks:?}", fixture.name);
        }
        let other: Vec<i64> = tokens.iter().rev().copied().collect();
        let mut sequences = [Sequence::new(&other, &SHUFFLED[1]), Sequence::new(&tokens, &SHUFFLED[0])];
        let mut parts = Vec::new();
        for counts in [[3, 16], [12, 1], [0, 1], [1, 0], [8, 6]] {
            parts.push(rows(&cpu.run(&mut sequences, &counts), counts[0]..counts[0] + counts[1]));
        }
        assert_eq!(stack(&parts), alone, "{} beside another", fixture.name);
    }
}

/// The cache manager may give away what no layer of a group will read: here every group has a window.
#[test]
fn blocks_before_the_window_are_not_read() {
    for fixture in all().filter(|f| f.model.state_groups.iter().all(|group| group.window.is_some())) {
        let windows: Vec<usize> = fixture.model.state_groups.iter().filter_map(|group| group.window).collect();
        let (tokens, window) = (fixture.prompt(), windows[0]);
        assert!(tokens.len() > window + BLOCK_SIZE, "{}: nothing to give away", fixture.name);
        let kept = OnCpu::new(&fixture, 1).run(&mut whole(&tokens), &[tokens.len()]);
        let mut cpu = OnCpu::new(&fixture, 1);
        let mut sequence = whole(&tokens);
        let mut last = cpu.run(&mut sequence, &[PROMPT]);
        for cached in PROMPT..tokens.len() {
            for block in &mut sequence[0].blocks[..(cached + 1 - window) / BLOCK_SIZE] {
                *block = -1;
            }
            last = cpu.run(&mut sequence, &[1]);
        }
        assert!(sequence[0].blocks.contains(&-1), "{}", fixture.name);
        assert_eq!(last, rows(&kept, tokens.len() - 1..tokens.len()), "{}", fixture.name);
    }
}

#[test]
fn local_and_global_layers_are_separate_groups_of_state() {
    let groups = |name: &'static str| {
        let groups = Fixture::family(name, None).model.module.state_groups;
        let group = |g: ridge_models::StateGroup| (g.states.join(" "), g.bytes_per_token, g.window);
        groups.into_iter().map(group).collect::<Vec<_>>()
    };
    let kv = |layers: &[usize]| {
        layers.iter().map(|i| format!("model.layers.{i}.self_attn.kv")).collect::<Vec<_>>().join(" ")
    };
    // 2 sides, 2 heads of 8, 4 bytes.
    assert_eq!(groups("gemma3"), [(kv(&[0, 1]), 2 * 128, Some(8)), (kv(&[2]), 128, None)]);
    // The last two layers have the caches of the second and the third.
    assert_eq!(groups("gemma3n"), [(kv(&[0, 1]), 2 * 128, Some(8)), (kv(&[2]), 128, None)]);
    // Heads of 12 where layers see everything.
    assert_eq!(groups("gemma4"), [(kv(&[0, 1]), 2 * 128, Some(8)), (kv(&[2]), 192, None)]);
    assert_eq!(groups("gemma2"), [(kv(&[0]), 128, Some(8)), (kv(&[1]), 128, None)]);
    assert_eq!(groups("mistral"), [(kv(&[0, 1, 2]), 3 * 128, Some(8))]);
    assert_eq!(groups("qwen2"), [(kv(&[0, 1]), 2 * 128, None)]);
}

/// Published code takes the longest position of a step; here the context that the model is built for decides, so that
/// each sequence of that length has the published values.
#[test]
fn frequencies_follow_the_context_that_the_model_is_built_for() {
    for (name, original) in [("phi3_longrope", 12), ("llama_dynamic", 16)] {
        let short = Fixture::family(name, Some(original));
        let want = short.expected.tensor("short_logits_f64");
        let tokens = &short.prompt()[..original];
        let got = Evaluated::new(&short, Precision::Exact).run(&mut whole(tokens), &[original]);
        assert!(relative(got.floats(), want.floats()) < 1e-12, "{name}");
        let got = OnCpu::new(&short, 1).run(&mut whole(tokens), &[original]);
        within(name, &got, &short.expected.tensor("short_logits_f32"), &want);
    }
    for context in PROMPT..=24 {
        let fixture = Fixture::family("llama_dynamic", Some(context));
        let tokens = &fixture.prompt()[..context];
        let got = Evaluated::new(&fixture, Precision::Exact).run(&mut whole(tokens), &[context]);
        let want = rows(&fixture.expected.tensor("recompute_logits_f64"), context - PROMPT..context - PROMPT + 1);
        let off = relative(rows(&got, context - 1..context).floats(), want.floats());
        assert!(off < 1e-12, "{context} tokens: off by {off:e}");
    }
    // Made for four times the context of pretraining; and LongRoPE's file tells the longer one.
    assert_eq!(Fixture::family("llama_dynamic", None).model.max_context, 64);
    assert_eq!(Fixture::family("phi3_longrope", None).model.max_context, 48);
}

#[test]
fn older_spellings_of_configurations_mean_the_same() {
    for (name, _) in FAMILIES {
        let read = |file: &str| {
            let text = std::fs::read_to_string(fixtures().join("families").join(name).join(file)).expect("a file");
            ModelConfig::from_json(file, &text).unwrap_or_else(|e| panic!("{name}: {e}"))
        };
        let (new, old) = (read("config.json"), read("config_v4.json"));
        assert_eq!(new, old, "{name}");
        let graph = |config: &ModelConfig| config.build(&BuildOptions::default()).expect("builds").module.graph;
        assert_eq!(graph(&new), graph(&old), "{name}");
    }
}

/// In bfloat16 no reference is at hand: the plain implementation is the graph itself, rounded at each step.
#[test]
fn bfloat16_logits_are_as_near_to_exact_as_those_of_a_plain_implementation() {
    for (name, context) in FAMILIES {
        let fixture = Fixture::family_in(name, *context, DType::BF16);
        let tokens = fixture.prompt();
        let exact = Evaluated::new(&fixture, Precision::Exact).run(&mut whole(&tokens), &[tokens.len()]);
        let plain = Evaluated::new(&fixture, Precision::Rounded).run(&mut whole(&tokens), &[tokens.len()]);
        let got = OnCpu::new(&fixture, 2).run(&mut whole(&tokens), &[tokens.len()]);
        let narrow = |t: Tensor| Tensor { dtype: DType::BF16, ..t };
        within(name, &narrow(got), &narrow(plain), &narrow(exact));
    }
}

#[test]
fn ranks_that_would_cut_heads_of_global_layers_are_refused() {
    // Four heads of keys in layers with a window, two in the others.
    let fixture = Fixture::family("gemma4_dense", None);
    let error = tensor_parallel(&fixture.config, &MeshAxis::new("tp", 4)).err().expect("cannot be cut").to_string();
    let key =
        "num_global_key_value_heads = 2 does not divide over 4 ranks of `tp`; the next number of ranks that works is 2";
    assert!(error.contains(key), "{error}");
    assert!(tensor_parallel(&fixture.config, &MeshAxis::new("tp", 2)).is_ok());
}

#[test]
fn two_ranks_compute_what_one_does() {
    for fixture in all() {
        if fixture.config.latent_attention {
            let error = tensor_parallel(&fixture.config, &tp()).err().expect("cannot be cut").to_string();
            let says = format!("one latent for all of its {} heads", fixture.config.num_attention_heads);
            assert!(error.contains(&says) && !error.contains("key_value"), "{error}");
            continue;
        }
        if fixture.config.num_key_value_heads == 1 {
            let error = tensor_parallel(&fixture.config, &tp()).err().expect("cannot be cut").to_string();
            assert!(error.contains("num_key_value_heads = 1 does not divide over 2 ranks"), "{error}");
            continue;
        }
        let graph = fixture.graph(&["all_logits"]);
        let local = sharded(&fixture, &graph);
        let tokens = fixture.prompt();
        let (inputs, bindings) = step_of(&graph, &mut whole(&tokens), &[tokens.len()]);
        let value = |arg: &Arg| match arg.role {
            Role::Weight => fixture.weight(&arg.name),
            Role::State => Some(empty_state(arg, &bindings)),
            _ => find(&inputs, &arg.name).cloned().map(Value::from),
        };
        for (output, got, want) in on_mesh(&graph, &local, &value, &bindings) {
            let off = relative(&got.numbers(), &want.numbers());
            assert!(off < 1e-12, "{}: {output} is off by {off:e}", fixture.name);
        }
        for (whole, part) in graph.main().args.iter().zip(&local.graph.main().args) {
            let in_layer = whole.name.split('.').any(|part| part.parse::<usize>().is_ok());
            // Every rank chooses experts for all tokens, opens those that all of them take, and has all streams of a residual.
            let router = [".gate.weight", "shared_expert_gate.weight"].iter().any(|end| whole.name.ends_with(end))
                || [".altup", ".router."].iter().any(|part| whole.name.contains(part));
            // A mixer with a state is whole on each rank.
            let mixer = ["mixer", "mamba", "linear_attn", "conv", "time_mixer", "channel_mixer", "adapters", "linear"]
                .iter()
                .any(|scope| {
                    let whole_mixer = |name: &str| name.split('.').any(|part| part == *scope);
                    let cut = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "kv"];
                    whole_mixer(&whole.name)
                        && !(*scope == "mixer" && whole.name.split('.').any(|part| cut.contains(&part)))
                });
            // What is added once to a sum over ranks is whole on each.
            let summand = whole.name.ends_with("experts.down_proj.bias");
            let matrix = whole.role == Role::Weight && whole.ty.shape.rank() >= 2 && !router && !summand;
            let state = whole.role == Role::State && !mixer;
            if in_layer && (state || (matrix && !mixer)) {
                assert_eq!(part.ty.bytes() * 2, whole.ty.bytes(), "{}: {}", fixture.name, whole.name);
            }
        }
    }
}

#[test]
fn logits_of_last_tokens_are_the_same_where_their_rows_are_taken_early() {
    let outputs = ["logits"];
    let mut moved = Vec::new();
    for fixture in all() {
        let before = fixture.graph(&outputs);
        let mut after = before.clone();
        passes::take_rows_early(&mut after);
        moved.extend((after != before).then_some(fixture.name));
        let tokens = fixture.prompt();
        // Chunks of two sequences beside a row without tokens, then single tokens.
        let steps = [[5, 0, 7], [3, 0, 1], [1, 0, 1]];
        let run = |graph: &Graph| {
            let mut sequences = [0, 1, 1].map(|of| Sequence::new(&tokens, &SHUFFLED[of]));
            let mut states: Vec<(String, Value)> = Vec::new();
            let mut logits = Vec::new();
            for counts in steps {
                let (inputs, bindings) = step_of(graph, &mut sequences, &counts);
                let value = |arg: &Arg| match arg.role {
                    Role::Weight => fixture.weight(&arg.name),
                    Role::State => {
                        Some(find(&states, &arg.name).cloned().unwrap_or_else(|| empty_state(arg, &bindings)))
                    }
                    _ => find(&inputs, &arg.name).cloned().map(Value::from),
                };
                let mut given = evaluate(graph, &value, &bindings, Precision::Exact).expect("evaluates");
                states = given.split_off(1);
                let of_step = given[0].1.tensor().clone();
                logits.extend([0, 2].map(|row| rows(&of_step, row..row + 1)));
            }
            (logits, states)
        };
        assert!(run(&after) == run(&before), "{}", fixture.name);
    }
    let stays: Vec<&str> = FAMILIES.iter().map(|(name, _)| *name).filter(|name| !moved.contains(name)).collect();
    assert!(stays.is_empty(), "{stays:?}");
}
