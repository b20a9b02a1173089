//! The coordinate check of muP (Yang et al. 2022, appendix D.1): with it, what a few steps change of activations is of one
//! size at every width.

use std::path::Path;
use std::sync::Arc;

use ridge_runtime::{Bucket, ProgramCache};
use ridge_train::{Prepared, Trainer};

use crate::common::{NEVER, cpu, folder, settings};

const WIDTHS: [usize; 4] = [64, 128, 256, 512];
const STEPS: usize = 3;

/// What a few small steps change in a model of this width, as root mean squares: of logits, and of the normalised activations
/// before the output projection.
fn changes(dir: &Path, width: usize, base: usize) -> [f64; 2] {
    let model = format!("w{width}.json");
    let json = format!(
        r#"{{"model_type": "llama", "hidden_size": {width}, "intermediate_size": {}, "num_hidden_layers": 2,
        "num_attention_heads": {}, "num_key_value_heads": {}, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": false}}"#,
        2 * width,
        width / 16,
        width / 16
    );
    std::fs::write(dir.join(&model), json).expect("writes");
    let base = base.to_string();
    let keys = [
        ("model.mup_base_width", &*base),
        // Small, so that the share of the first output projection, which falls with width, does not cover what is learned.
        ("model.initialization", "gpt2"),
        ("model.initialization_std", "0.05"),
        ("optimizer.schedule", "constant"),
        ("optimizer.warmup", "0"),
        ("optimizer.learning_rate", "2e-4"),
    ];
    let prepared = Prepared::new(settings(dir, &model, &keys), &NEVER).unwrap_or_else(|e| panic!("{e}"));
    let graph = prepared.step.graph.clone();
    let bindings = prepared.step.bindings().unwrap_or_else(|e| panic!("{e}"));
    let mut trainer =
        Trainer::new(prepared, Arc::new(ProgramCache::new(cpu(2))), None, &NEVER).unwrap_or_else(|e| panic!("{e}"));
    let outputs = ["hidden", "all_logits"];
    let mut bucket =
        trainer.session().compile(&graph, &outputs).and_then(|c| c.bucket(&bindings)).unwrap_or_else(|e| panic!("{e}"));
    let before = activations(&mut bucket);
    for _ in 0..STEPS {
        let result = trainer.step().unwrap_or_else(|e| panic!("{e}"));
        assert!(result.refusal.is_none());
    }
    let after = activations(&mut bucket);
    let rms = |values: &mut dyn Iterator<Item = f64>| {
        let (sum, count) = values.fold((0.0, 0), |(sum, count), x| (sum + x * x, count + 1));
        (sum / f64::from(count)).sqrt()
    };
    let changed = |i: usize| rms(&mut before[i].iter().zip(&after[i]).map(|(a, b)| b - a));
    [changed(1), changed(0)]
}

/// Both outputs for one batch.
fn activations(bucket: &mut Bucket) -> [Vec<f64>; 2] {
    type ValueAt = fn(usize) -> i32;
    let tokens = 4 * 32;
    let of: [(&str, ValueAt); 3] =
        [("token_ids", |i| (i * 7 % 20) as i32), ("positions", |i| (i % 32) as i32), ("seq_ids", |i| (i / 32) as i32)];
    for (name, value) in of {
        let bytes: Vec<u8> = (0..tokens).flat_map(|i| value(i).to_le_bytes()).collect();
        let index = bucket.input_index(name).expect("has inputs").expect("is one");
        bucket.input(index).copy_from_slice(&bytes);
    }
    bucket.submit().and_then(|()| bucket.wait()).unwrap_or_else(|e| panic!("{e}"));
    ["hidden", "all_logits"].map(|name| bucket.tensor(name).expect("is an output").floats().to_vec())
}

#[test]
fn activations_change_alike_at_every_width_with_mup_and_not_without() {
    let dir = folder();
    let spread = |base: usize| {
        let all = WIDTHS.map(|width| changes(dir.path(), width, base));
        println!("base width {base}: {all:.4?}");
        [0, 1].map(|of| {
            let [least, most] = [f64::min, f64::max].map(|pick| all.iter().map(|s| s[of]).reduce(pick).expect("some"));
            most / least
        })
    };
    let with = spread(64);
    assert!(with.iter().all(|spread| *spread < 2.0), "largest over smallest: {with:?}");
    let without = spread(0);
    assert!(without[0] > 2.5, "largest over smallest: {without:?}");
}

#[test]
fn what_mup_has_no_rule_for_is_refused() {
    let dir = folder();
    let error = |model: &str, keys: &[(&str, &str)]| {
        let keys = [&[("model.mup_base_width", "16")], keys].concat();
        Prepared::new(settings(dir.path(), model, &keys), &NEVER).err().expect("is refused").to_string()
    };
    let text = error("gpt2.json", &[]);
    assert!(text.contains("set tie_word_embeddings to false"), "{text}");
    let text = error("llama.json", &[("optimizer.name", "muon")]);
    assert!(text.contains("needs optimizer.name adamw, adamw8bit, lion or sgd"), "{text}");
}
