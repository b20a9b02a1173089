//! `ridge convert` and `ridge quantize`, as a user types them.

use crate::common::{Folder, json, repository, ridge, stdout};

/// The model that is compiled in, as a file in `folder`.
fn stories(folder: &Folder, name: &str) -> String {
    let path = folder.file(name).display().to_string();
    let model = repository().join("models/stories260K").display().to_string();
    stdout(&["convert", &model, &path, "-q"]);
    path
}

const GREEDY: [&str; 5] = ["generate", "--greedy", "-q", "-n", "40"];

fn text(model: &[&str]) -> String {
    stdout(&[&GREEDY[..], model, &["Once upon a time"]].concat())
}

#[test]
fn a_model_says_the_same_as_a_file_and_as_a_folder_of_that() {
    let folder = Folder::of_config("{}");
    let file = stories(&folder, "x.gguf");
    let back = folder.file("back").display().to_string();
    stdout(&["convert", &file, &back, "-q"]);
    let said = text(&[]);
    assert!(said.contains("Lily"), "{said}");
    assert_eq!(text(&["--model", &file]), said);
    assert_eq!(text(&["--model", &back]), said);
}

#[test]
fn an_encoder_embeds_from_a_file_as_from_its_folder() {
    let folder = Folder::copy_of(repository().join("fixtures/families/bert"));
    let kind = std::fs::read_to_string(repository().join("fixtures/tokenizers/kinds/word_piece.json")).unwrap();
    let kind: serde_json::Value = serde_json::from_str(&kind).unwrap();
    folder.write("tokenizer.json", kind["tokenizer"].to_string());
    let file = folder.file("x.gguf").display().to_string();
    stdout(&["convert", folder.path(), &file, "-q"]);
    let embed = |model: &str| json(&["embed", "--json", "--model", model, "the cat sat", "A runner is running there."]);
    let (from_folder, from_file) = (embed(folder.path()), embed(&file));
    assert_eq!(from_folder["embeddings"].as_array().map(Vec::len), Some(2));
    assert_eq!(from_folder["embeddings"], from_file["embeddings"]);
    let refused = ridge(&["generate", "--model", &file, "x"]);
    assert!(refused.code != 0 && refused.stderr.contains("ridge embed"), "{}", refused.stderr);
}

#[test]
fn a_model_is_quantised_with_an_importance_matrix_and_in_a_mix() {
    let folder = Folder::of_config("{}");
    let (file, to) = (stories(&folder, "x.gguf"), folder.file("y.gguf").display().to_string());
    let imatrix = repository().join("fixtures/gguf_files/imatrix.dat").display().to_string();
    let ran = ridge(&["quantize", &file, &to, "--format", "q4_0", "--imatrix", &imatrix]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("in q4_0") && ran.stderr.contains("has no entry for 1 matrix"), "{}", ran.stderr);
    assert!(!text(&["--model", &to]).is_empty());
    let ran = ridge(&["quantize", &file, &to, "--format", "q4_k_m", "--force"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    // Rows of 64 take what holds them.
    assert!(
        ran.stderr.contains("in q8_0") && ran.stderr.contains("with a row length that does not fit q4_k"),
        "{}",
        ran.stderr
    );
    // Were in a format already, all but the vectors.
    let again = folder.file("z.gguf").display().to_string();
    let ran = ridge(&["quantize", &to, &again, "--format", "q4_0"]);
    assert!(ran.stderr.contains("matrices were already quantised, so errors accumulate"), "{}", ran.stderr);
    assert!(!text(&["--model", &to]).is_empty());
}

#[test]
fn matrices_are_counted_by_the_format_that_cannot_hold_them() {
    let folder = Folder::of_config("{}");
    let (file, to) = (stories(&folder, "x.gguf"), folder.file("y.gguf").display().to_string());
    let ran = ridge(&["quantize", &file, &to, "--format", "q4_0"]);
    // The embedding is in q8_0 for another reason: q6_k is the default of --outer.
    for says in [
        "5 matrices with a row length that does not fit q4_0, such as blk.0.ffn_down.weight, stored as f16",
        "1 matrix with a row length that does not fit q6_k, such as token_embd.weight, stored as q8_0",
    ] {
        assert!(ran.stderr.contains(says), "{}", ran.stderr);
    }
    assert!(!ran.stderr.contains("second time"), "{}", ran.stderr);
}

#[test]
fn no_part_of_what_is_read_is_written_over() {
    let folder = Folder::of_config("{}");
    let part = |i: usize| folder.file(&format!("model-0000{i}-of-00003.gguf"));
    for i in 1..=3 {
        let name = part(i).file_name().unwrap().to_owned();
        std::fs::copy(repository().join("fixtures/gguf_files").join(name), part(i)).unwrap();
    }
    let before = std::fs::read(part(2)).unwrap();
    let (first, second) = (part(1).display().to_string(), part(2).display().to_string());
    for args in [vec!["convert", &first, &second, "--force"], vec!["quantize", &first, &second, "--format", "q8_0"]] {
        let refused = ridge(&args);
        assert!(
            refused.stderr.contains("is an input of this command; give another name"),
            "{args:?}: {}",
            refused.stderr
        );
        assert!(std::fs::read(part(2)).unwrap() == before);
    }
}

#[test]
fn help_says_that_a_model_may_be_a_gguf_file() {
    for command in ["generate", "eval", "inspect", "chat", "serve", "bench", "embed", "tokenize"] {
        assert!(stdout(&[command, "--help"]).contains("GGUF file"), "{command}");
    }
}

#[test]
fn a_model_in_parts_runs_from_any_of_them() {
    let part = |i: usize| repository().join(format!("fixtures/gguf_files/model-0000{i}-of-00003.gguf"));
    let shown = |i: usize| stdout(&["inspect", &part(i).display().to_string()]);
    // The first line has the path.
    let rest = |text: String| text.split_once('\n').map(|(_, rest)| rest.to_owned());
    assert_eq!(rest(shown(1)), rest(shown(3)));
    let folder = Folder::of_config("{}");
    let alone = folder.file("model-00001-of-00003.gguf");
    std::fs::copy(part(1), &alone).unwrap();
    let refused = ridge(&["inspect", &alone.display().to_string()]);
    assert_eq!(refused.code, 1);
    assert!(refused.stderr.contains("model-00002-of-00003.gguf does not exist"), "{}", refused.stderr);
}

#[test]
fn what_cannot_be_written_is_refused_with_a_way_out() {
    let folder = Folder::of_config("{}");
    let file = stories(&folder, "x.gguf");
    let to = folder.file("y.gguf").display().to_string();
    let (within, made) =
        (folder.file("none/y.gguf").display().to_string(), folder.file("z.gguf").display().to_string());
    std::fs::create_dir(&made).unwrap();
    for (args, says) in [
        (vec!["quantize", &file, &file, "--format", "q8_0"], "is an input of this command; give another name"),
        (vec!["quantize", &file, "y.bin", "--format", "q8_0"], "must end in .gguf"),
        (vec!["quantize", &file, &to, "--format", "q9"], "q4_k_m"),
        (vec!["quantize", &file, &to, "--format", "q8_0", "--imatrix", &file], "says nothing of any matrix"),
        (vec!["convert", &file, folder.path()], "already exists; give another name, or --force"),
        (vec!["convert", "/no/such.gguf", &to], "there is no such file"),
        (vec!["convert", &file, &within], "is in a folder that does not exist; create it first"),
        (vec!["convert", &file, &made, "--force"], "is a folder; give a file name"),
    ] {
        let refused = ridge(&args);
        assert!(refused.code != 0 && refused.stderr.contains(says), "{args:?}: {}", refused.stderr);
        assert!(!std::path::Path::new(&to).exists(), "{args:?}");
    }
}

#[test]
fn rows_of_the_embedding_beyond_the_tokenizer_print_nothing() {
    // Behind each of the 512 rows of the embedding, which is the output projection too, follows one that scores higher.
    let folder = Folder::stories();
    let weights = std::fs::read(folder.file("model.safetensors")).unwrap();
    let weights = safetensors::SafeTensors::deserialize(&weights).unwrap();
    let longer = |view: &safetensors::tensor::TensorView<'_>| -> Vec<u8> {
        let values = view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
        view.data().iter().copied().chain(values.flat_map(|v| (30.0 * v).to_le_bytes())).collect()
    };
    let owned: Vec<(String, Vec<usize>, Vec<u8>)> = weights
        .tensors()
        .into_iter()
        .map(|(name, view)| match view.shape() {
            [512, width] => (name, vec![1024, *width], longer(&view)),
            shape => (name, shape.to_vec(), view.data().to_vec()),
        })
        .collect();
    assert!(owned.iter().any(|(_, shape, _)| shape[0] == 1024));
    let mut views = Vec::new();
    for (name, shape, data) in &owned {
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), data).unwrap();
        views.push((name.clone(), view));
    }
    folder.write("model.safetensors", safetensors::serialize(views, None).unwrap());
    folder.edit("config.json", |text| text.replace("\"vocab_size\": 512", "\"vocab_size\": 1024"));
    let file = folder.file("x.gguf").display().to_string();
    stdout(&["convert", folder.path(), &file, "-q"]);
    let back = folder.file("back").display().to_string();
    stdout(&["convert", &file, &back, "-q"]);
    for model in [folder.path(), &file, &back] {
        let answer = json(&["generate", "--greedy", "-n", "8", "--model", model, "--json", "Once upon a time"]);
        let tokens = answer["tokens"].as_array().unwrap_or_else(|| panic!("{answer}"));
        assert!(tokens.iter().any(|id| id.as_u64().unwrap() >= 512), "{model}: {answer}");
        assert!(!answer["text"].as_str().unwrap().contains("PAD"), "{model}: {answer}");
    }
}

#[test]
fn a_family_that_gguf_does_not_have_is_refused_with_one_reason() {
    let folder = Folder::of_config("{}");
    let file = folder.file("x.gguf").display().to_string();
    let refused = |family: &str| {
        let model = repository().join("fixtures/families").join(family).display().to_string();
        let ran = ridge(&["convert", &model, &file]);
        assert_ne!(ran.code, 0);
        ran.stderr.split_once(&format!("{model}: ")).expect("names the model").1.to_owned()
    };
    let of_family =
        "it cannot be written as GGUF: the format has no name for its family; run the model from its folder\n";
    assert_eq!(refused("mamba"), of_family);
    assert_eq!(refused("bamba"), of_family);
    let of_layers = "it cannot be written as GGUF: its layers see a window only; run the model from its folder\n";
    assert_eq!(refused("starcoder2"), of_layers);
}

#[test]
fn a_folder_becomes_a_folder_of_another_dtype_or_is_plain_already() {
    let folder = Folder::of_config("{}");
    let model = repository().join("models/stories260K").display().to_string();
    let to = folder.file("plain").display().to_string();
    let refused = ridge(&["convert", &model, &to]);
    let says =
        "its weights are plain already; give a dtype that they shall have (--dtype), or an output that ends in .gguf";
    assert!(refused.code == 1 && refused.stderr.contains(says), "{}", refused.stderr);
    assert!(!folder.file("plain").exists());
    stdout(&["convert", &model, &to, "--dtype", "bf16", "-q"]);
    assert_eq!(json(&["inspect", &to, "--json"])["summary"]["storage"][0]["name"], "bf16");
    assert!(text(&["--model", &to]).contains("Lily"));
}
