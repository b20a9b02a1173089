//! What Llama 3.1 costs, told by its graph, against closed forms of its configuration: exactly.

use std::path::Path;

use ridge_graph::{Bindings, DType, Graph, passes};
use ridge_models::{BuildOptions, HISTORY, LlamaConfig, Model, WeightSource, llama, symbols};

/// Name, and the parameters that "The Llama 3 Herd of Models", table 3, rounds.
const MODELS: [(&str, u64); 3] = [("8B", 8_030_261_248), ("70B", 70_553_706_496), ("405B", 405_853_388_800)];

fn model(size: &str) -> (LlamaConfig, Model) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/configs/Meta-Llama-3.1-{size}.json"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let config = LlamaConfig::from_json("config.json", &text).expect("is supported");
    let options = BuildOptions { activations: DType::BF16, cache: DType::BF16, ..BuildOptions::default() };
    let mut model = llama(&config, &options).expect("builds");
    model.graph = WeightSource::Random(DType::BF16).retype(&model.graph, None).expect("retypes");
    (config, model)
}

fn pruned(model: &Model, outputs: &[&str]) -> Graph {
    let mut graph = model.graph.clone();
    passes::prune(&mut graph, outputs).expect("has them");
    graph
}

/// Parameters of one layer's matrices.
fn layer_matrices(c: &LlamaConfig) -> i128 {
    let (heads, kv_heads) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
    (c.hidden_size * (2 * heads + 2 * kv_heads) + 3 * c.hidden_size * c.intermediate_size) as i128
}

#[test]
fn parameters_and_bytes_are_those_of_the_published_models() {
    for (size, count) in MODELS {
        let (c, model) = model(size);
        let (layers, hidden) = (c.num_hidden_layers as i128, c.hidden_size as i128);
        let closed = layers * (layer_matrices(&c) + 2 * hidden) + hidden + 2 * c.vocab_size as i128 * hidden;
        assert_eq!(i128::from(model.parameter_count()), closed, "{size}");
        assert_eq!(model.parameter_count(), count, "{size}");
        assert_eq!(model.weight_bytes(), 2 * count, "{size}");
    }
}

#[test]
fn matrix_flops_are_two_a_parameter_and_token_and_four_a_pair_and_head_element() {
    for (size, _) in MODELS {
        let (c, model) = model(size);
        let (layers, vocab) = (c.num_hidden_layers as i128, (c.vocab_size * c.hidden_size) as i128);
        let width = (c.num_attention_heads * c.head_dim) as i128;
        // A prompt of 1000 tokens, one token of a cache of 5000, 64 of caches of 3000.
        for (tokens, seqs, pairs) in [(1000, 1, 1000 * 1001 / 2), (1, 1, 5001), (64, 64, 64 * 3001)] {
            let bindings = Bindings::new()
                .with(symbols::TOKENS, tokens)
                .with(symbols::SEQS, seqs)
                .with(symbols::PAIRS, pairs)
                .with(symbols::CACHED, pairs)
                .with(symbols::TABLE, 512)
                .with(symbols::BLOCKS, 1 << 16);
            let layer_flops = 2 * tokens as i128 * layer_matrices(&c) + 4 * width * pairs as i128;
            let flops = |outputs: &[&str]| pruned(&model, outputs).cost().matrix_flops.eval(&bindings).expect("bound");
            assert_eq!(flops(&["all_logits"]), layers * layer_flops + 2 * tokens as i128 * vocab, "{size}");
            assert_eq!(flops(&["logits"]), layers * layer_flops + 2 * seqs as i128 * vocab, "{size}");
            assert_eq!(flops(&["next"]), flops(&["logits"]), "{size}: sampling multiplies no matrices");
            // Filling the cache alone runs the last layer whole too: all layers are one function.
            assert_eq!(flops(&[]), layers * layer_flops, "{size}");
        }
    }
}

#[test]
fn cache_bytes_of_a_token_are_two_vectors_a_layer() {
    for (size, _) in MODELS {
        let (c, model) = model(size);
        let wanted = 2 * 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim;
        let [group] = &model.state_groups[..] else { panic!("one group") };
        assert_eq!((group.bytes_per_token, group.states.len()), (wanted, c.num_hidden_layers), "{size}");
        let states: i128 = model
            .graph
            .args(ridge_graph::Role::State)
            .filter(|a| &*a.name != HISTORY)
            .map(|a| a.ty.bytes().eval(&Bindings::new().with(symbols::BLOCKS, 3)).expect("bound"))
            .sum();
        assert_eq!(states, (3 * model.block_size * wanted) as i128, "{size}");
    }
}

#[test]
fn decoding_one_token_reads_every_weight_once() {
    for (size, _) in MODELS {
        let (c, model) = model(size);
        let bindings = Bindings::new()
            .with(symbols::TOKENS, 1)
            .with(symbols::SEQS, 1)
            .with(symbols::PAIRS, 0)
            .with(symbols::CACHED, 0)
            .with(symbols::TABLE, 1)
            .with(symbols::BLOCKS, 1);
        let bytes = pruned(&model, &["logits"]).cost().bytes_read.eval(&bindings).expect("bound");
        // Of the embedding one row.
        let weights = i128::from(model.weight_bytes()) - 2 * ((c.vocab_size - 1) * c.hidden_size) as i128;
        let activations = bytes - weights;
        assert!(activations > 0 && activations < weights / 100, "{size}: {bytes} bytes for {weights} of weights");
    }
}
