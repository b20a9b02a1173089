//! Logits of small random Llamas against transformers and against a plain double-precision forward pass
//! (`fixtures/llama.py`): by evaluation, and on the CPU by the rule of tolerance.

use crate::common::{
    ALL, Evaluated, Fixture, OnCpu, SHUFFLED, Sequence, fixtures, judge, plain_logits, relative, rows, stack,
};
use ridge_cpu::{Cpu, CpuOptions};
use ridge_graph::{DType, Precision, Tensor};
use ridge_models::{BuildOptions, LlamaConfig, llama};
use ridge_runtime::Backend;

/// Tokens of the prompt that precedes single tokens in `decode_logits_f32`.
const PROMPT: usize = 16;

fn one_shot(fixture: &Fixture, threads: usize) -> Tensor {
    let tokens = fixture.prompt();
    OnCpu::new(fixture, threads).run(&mut [Sequence::new(&tokens, &SHUFFLED[0])], &[tokens.len()])
}

/// All logits when the prompt is run in steps of these lengths.
fn in_chunks(cpu: &mut OnCpu, tokens: &[i64], chunks: &[usize]) -> Tensor {
    assert_eq!(chunks.iter().sum::<usize>(), tokens.len());
    let mut sequence = [Sequence::new(tokens, &SHUFFLED[0])];
    stack(&chunks.iter().map(|n| cpu.run(&mut sequence, &[*n])).collect::<Vec<_>>())
}

#[test]
fn the_graph_means_what_the_forward_pass_in_doubles_computes() {
    for name in ALL {
        let fixture = Fixture::open(name);
        let tokens = fixture.prompt();
        let mut exact = Evaluated::new(&fixture, Precision::Exact);
        let got = exact.run(&mut [Sequence::new(&tokens, &SHUFFLED[0])], &[tokens.len()]);
        let off = relative(got.floats(), fixture.expected.tensor("logits_f64").floats());
        assert!(off < 1e-12, "{name}: off by {off:e}");
    }
}

#[test]
fn lowering_for_a_backend_keeps_the_meaning() {
    let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).expect("starts");
    for name in ALL {
        let fixture = Fixture::open(name);
        let tokens = fixture.prompt();
        for kernels in [&[], cpu.kernels()] {
            let mut lowered = Evaluated::lowered(&fixture, kernels);
            let got = lowered.run(&mut [Sequence::new(&tokens, &SHUFFLED[0])], &[tokens.len()]);
            let off = relative(got.floats(), fixture.expected.tensor("logits_f64").floats());
            assert!(off < 1e-12, "{name} with {} kernels: off by {off:e}", kernels.len());
        }
    }
}

#[test]
fn in_doubles_a_cached_step_gives_what_the_whole_prompt_gives() {
    for name in ["gqa2_tied", "gqa8_llama3_rope"] {
        let fixture = Fixture::open(name);
        let tokens = fixture.prompt();
        let mut exact = Evaluated::new(&fixture, Precision::Exact);
        // Another sequence in the same steps, in between blocks of this one.
        let other: Vec<i64> = tokens.iter().rev().copied().collect();
        let mut sequences = [Sequence::new(&tokens, &SHUFFLED[0]), Sequence::new(&other, &SHUFFLED[1])];
        let mut parts = Vec::new();
        for counts in [[9, 1], [0, 7], [1, 0], [14, 3]] {
            let logits = exact.run(&mut sequences, &counts);
            parts.push(rows(&logits, 0..counts[0]));
        }
        let off = relative(stack(&parts).floats(), fixture.expected.tensor("logits_f64").floats());
        assert!(off < 1e-12, "{name}: off by {off:e}");
    }
}

#[test]
fn prompt_logits_are_as_near_to_exact_as_those_of_transformers() {
    for name in ALL {
        let fixture = Fixture::open(name);
        let expected = &fixture.expected;
        let got = one_shot(&fixture, 2);
        let (torch, exact) = (expected.tensor("logits_f32"), expected.tensor("logits_f64"));
        let used = judge(name, &got, &torch, &plain_logits(&fixture), &exact);
        println!("{name}: {used:.2} of what is allowed");
    }
}

#[test]
fn decoded_logits_are_as_near_to_exact_as_those_of_transformers_with_its_cache() {
    for name in ALL {
        let fixture = Fixture::open(name);
        let tokens = fixture.prompt();
        let mut chunks = vec![PROMPT];
        chunks.resize(1 + tokens.len() - PROMPT, 1);
        let all = in_chunks(&mut OnCpu::new(&fixture, 2), &tokens, &chunks);
        let got = rows(&all, PROMPT - 1..tokens.len());
        let exact = rows(&fixture.expected.tensor("logits_f64"), PROMPT - 1..tokens.len());
        let others: Vec<Tensor> = plain_logits(&fixture).iter().map(|t| rows(t, PROMPT - 1..tokens.len())).collect();
        judge(name, &got, &fixture.expected.tensor("decode_logits_f32"), &others, &exact);
    }
}

#[test]
fn chunks_of_a_prompt_give_the_bits_of_the_whole() {
    for name in ALL {
        let fixture = Fixture::open(name);
        let tokens = fixture.prompt();
        let whole = one_shot(&fixture, 1);
        let mut cpu = OnCpu::new(&fixture, 1);
        for chunks in [vec![1; 24], vec![5, 5, 5, 5, 4], vec![16, 1, 1, 1, 1, 1, 1, 1, 1], vec![23, 1], vec![24]] {
            assert_eq!(in_chunks(&mut cpu, &tokens, &chunks), whole, "{name} in steps of {chunks:?}");
        }
    }
}

#[test]
fn who_shares_the_batch_changes_no_bit() {
    for name in ALL {
        let fixture = Fixture::open(name);
        let tokens = fixture.prompt();
        let whole = one_shot(&fixture, 1);
        let other: Vec<i64> = tokens.iter().rev().copied().collect();
        for first in [0, 1] {
            let mut cpu = OnCpu::new(&fixture, 2);
            let mut sequences = [Sequence::new(&other, &SHUFFLED[0]), Sequence::new(&other, &SHUFFLED[1])];
            sequences[first].tokens.clone_from(&tokens);
            let mut parts = Vec::new();
            for (mine, others) in [(16, 3), (1, 12), (1, 0), (0, 1), (6, 8)] {
                let counts = if first == 0 { [mine, others] } else { [others, mine] };
                let logits = cpu.run(&mut sequences, &counts);
                let start = if first == 0 { 0 } else { others };
                parts.push(rows(&logits, start..start + mine));
            }
            assert_eq!(stack(&parts), whole, "{name} as row {first}");
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    for name in ALL {
        let fixture = Fixture::open(name);
        let whole = one_shot(&fixture, 1);
        for threads in [2, 3] {
            assert_eq!(one_shot(&fixture, threads), whole, "{name} on {threads} threads");
        }
    }
}

#[test]
fn bfloat16_logits_are_as_near_to_exact_as_those_of_transformers() {
    let fixture = Fixture::with("bf16_sharded", DType::BF16);
    // The logits are bfloat16 numbers in f32.
    let narrow = |t: Tensor| Tensor { dtype: DType::BF16, ..t };
    let got = one_shot(&fixture, 2);
    assert_eq!(narrow(got.clone()).rounded().floats(), got.floats());
    let (plain, exact) = (fixture.expected.tensor("logits_bf16"), fixture.expected.tensor("logits_f64"));
    let others: Vec<Tensor> = plain_logits(&fixture).into_iter().map(narrow).collect();
    let used = judge("bf16_sharded", &narrow(got), &narrow(plain), &others, &narrow(exact));
    println!("{used:.2} of what is allowed");
}

#[test]
fn an_older_spelling_of_a_configuration_gives_the_same_graph() {
    let path = fixtures().join("llama/gqa8_llama3_rope/config.json");
    let text = std::fs::read_to_string(path).expect("a configuration");
    let config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let graph = |config: &serde_json::Value| {
        let config = LlamaConfig::from_json("config.json", &config.to_string()).expect("is supported");
        llama(&config, &BuildOptions::default()).expect("builds").module.graph
    };
    let new = graph(&config);
    for type_key in ["rope_type", "type"] {
        let mut old = config.clone();
        let keys = old.as_object_mut().expect("an object");
        let mut rope = keys.remove("rope_parameters").expect("the new spelling");
        let parameters = rope.as_object_mut().expect("an object");
        keys.insert("rope_theta".into(), parameters.remove("rope_theta").expect("there"));
        let kind = parameters.remove("rope_type").expect("there");
        parameters.insert(type_key.into(), kind);
        keys.insert("rope_scaling".into(), rope);
        assert_eq!(graph(&old).to_string(), new.to_string(), "{type_key}");
        assert_eq!(graph(&old), new, "{type_key}");
    }
    let mut unscaled = config;
    unscaled["rope_parameters"]["rope_type"] = "default".into();
    for key in ["factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"] {
        unscaled["rope_parameters"].as_object_mut().expect("an object").remove(key);
    }
    assert_ne!(graph(&unscaled).to_string(), new.to_string(), "scaling shows in the text form");
}
