//! The figures of published models against closed forms, and how repeated scopes fold.

use ridge_graph::{DType, FormatRef};
use ridge_models::summary::{Scope, Summary};
use ridge_models::{BuildOptions, LlamaConfig, ModelFiles, WeightSource, llama};

const LLAMA_8B: &str = include_str!("../data/configs/Meta-Llama-3.1-8B.json");
const LLAMA_70B: &str = include_str!("../data/configs/Meta-Llama-3.1-70B.json");
const LLAMA_405B: &str = include_str!("../data/configs/Meta-Llama-3.1-405B.json");

fn config(text: &str) -> LlamaConfig {
    LlamaConfig::from_json("config.json", text).unwrap()
}

fn summary(config: &LlamaConfig, format: Option<&str>, context: usize) -> Summary {
    let options = BuildOptions { cache: DType::BF16, ..BuildOptions::default() };
    let mut model = llama(config, &options).unwrap();
    let format = format.map(|name| FormatRef::from_name(name).unwrap());
    let source = WeightSource::Random(config.torch_dtype.unwrap_or(DType::F32));
    model.graph = source.retype(&model.graph, format.as_ref()).unwrap();
    Summary::new(&model, context).unwrap()
}

#[test]
fn parameters_are_those_that_were_published() {
    for (text, parameters) in [(LLAMA_8B, 8_030_261_248), (LLAMA_70B, 70_553_706_496), (LLAMA_405B, 405_853_388_800)] {
        let s = summary(&config(text), None, 4096);
        assert_eq!((s.module.parameters, s.module.weight_bytes), (parameters, 2 * parameters));
        assert_eq!(s.module.storage.len(), 1);
        assert_eq!(s.module.tree.iter().map(|t| t.parameters).sum::<u64>(), parameters);
        assert_eq!(s.module.tree.iter().map(|t| t.bytes).sum::<u64>(), 2 * parameters);
    }
}

/// Every matrix once at 2 FLOPs an element, and attention at 4 FLOPs a (query, key) pair and head element.
#[test]
fn matrix_flops_of_a_token_have_their_closed_form() {
    for text in [LLAMA_8B, LLAMA_70B, LLAMA_405B] {
        let c = config(text);
        for context in [1, 4096, 131_072] {
            let (q, kv) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
            let layer = 2 * c.hidden_size * (q + kv) + 3 * c.hidden_size * c.intermediate_size;
            let matmul = c.num_hidden_layers * layer + c.vocab_size * c.hidden_size;
            let attention = 4 * c.num_hidden_layers * q * context;
            assert_eq!(summary(&c, None, context).token.step.matrix_flops, (2 * matmul + attention) as u64);
        }
    }
}

#[test]
fn the_cache_of_8b_takes_131072_bytes_a_token_in_bf16() {
    let s = summary(&config(LLAMA_8B), None, 1000);
    assert_eq!((s.kv_bytes_per_token, s.token.kv_bytes), (131_072, 131_072_000));
}

/// What reading the weights alone takes, which decoding cannot go below; the embedding is read by one row.
#[test]
fn a_token_reads_every_matrix_once() {
    let c = config(LLAMA_8B);
    let s = summary(&c, None, 1);
    let embedding = (c.vocab_size * c.hidden_size * 2) as u64;
    let least = s.module.weight_bytes - embedding;
    assert!((least..least + least / 100).contains(&s.token.step.bytes_read), "{} of {least}", s.token.step.bytes_read);
}

#[test]
fn a_format_changes_storage_and_nothing_else() {
    let c = config(LLAMA_8B);
    let (plain, q8) = (summary(&c, None, 64), summary(&c, Some("q8_0"), 64));
    assert_eq!(
        (q8.module.parameters, q8.token.step.matrix_flops),
        (plain.module.parameters, plain.token.step.matrix_flops)
    );
    let names: Vec<&str> = q8.module.storage.iter().map(|s| s.name.as_str()).collect();
    assert_eq!(names, ["q8_0", "bf16"]);
    let norms = ((2 * c.num_hidden_layers + 1) * c.hidden_size) as u64;
    assert_eq!(q8.module.weight_bytes, (q8.module.parameters - norms) / 32 * 34 + 2 * norms);
}

fn outline(scopes: &[Scope], indent: usize, out: &mut String) {
    for s in scopes {
        *out +=
            &format!("{:indent$}{} x{} {} {}\n", "", s.name, s.repeats, s.parameters, s.ty.as_deref().unwrap_or("-"));
        outline(&s.children, indent + 2, out);
    }
}

#[test]
fn equal_layers_fold_into_one() {
    let mut text = String::new();
    outline(&summary(&config(LLAMA_8B), None, 1).module.tree, 0, &mut text);
    let expected = "\
model x1 7504924672 -
  embed_tokens.weight x1 525336576 bf16[128256, 4096]
  layers.0..31 x32 6979584000 -
    input_layernorm.weight x1 4096 bf16[4096]
    self_attn x1 41943040 -
      q_proj.weight x1 16777216 bf16[4096, 4096]
      k_proj.weight x1 4194304 bf16[1024, 4096]
      v_proj.weight x1 4194304 bf16[1024, 4096]
      o_proj.weight x1 16777216 bf16[4096, 4096]
    post_attention_layernorm.weight x1 4096 bf16[4096]
    mlp x1 176160768 -
      gate_proj.weight x1 58720256 bf16[14336, 4096]
      up_proj.weight x1 58720256 bf16[14336, 4096]
      down_proj.weight x1 58720256 bf16[4096, 14336]
  norm.weight x1 4096 bf16[4096]
lm_head.weight x1 525336576 bf16[128256, 4096]
";
    assert_eq!(text, expected);
}

#[test]
fn layers_that_are_stored_differently_do_not_fold() {
    let files = ModelFiles::open(None).unwrap();
    let mut model = llama(&files.llama_config().unwrap(), &BuildOptions::default()).unwrap();
    let storage = |name: &str, ty: &ridge_graph::Type| {
        let dtype = if name.contains("layers.2.") { DType::BF16 } else { DType::F32 };
        Some(ridge_graph::Type { dtype, ..ty.clone() })
    };
    model.graph = ridge_graph::passes::retype(&model.graph, &storage).unwrap();
    let s = Summary::new(&model, 512).unwrap();
    let layers = s.module.tree[0].children.iter().find(|c| c.name == "layers").unwrap();
    let names: Vec<(&str, usize)> = layers.children.iter().map(|c| (c.name.as_str(), c.repeats)).collect();
    assert_eq!(names, [("0..1", 2), ("2", 1), ("3..4", 2)]);
    assert_eq!(s.module.parameters, 260_032);
}
