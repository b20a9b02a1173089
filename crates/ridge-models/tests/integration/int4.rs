//! Checkpoints of integers of 4 bits: as compressed-tensors, GPTQ and AWQ write them (`fixtures/int4.py`).

use std::path::Path;
use std::sync::Arc;

use ridge_files::Checkpoint;
use ridge_files::checkpoint::{Int4Layout, Int4Scheme};
use ridge_graph::DType;
use ridge_models::gguf::to_folder;
use ridge_models::summary::ModuleSummary;
use ridge_models::{BuildOptions, ModelFiles, WeightSource};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use crate::common::{Expected, fixtures};

/// A tensor: name, dtype, shape and bytes.
type Named = (String, Dtype, Vec<usize>, Vec<u8>);

const FILE: &str = "int4.safetensors";
const COLUMNS: usize = 320;
/// Symmetric codes of GPTQ's first format.
const FIRST: Int4Scheme = Int4Scheme { one_above: true, ..Int4Scheme::new(Int4Layout::Gptq, true) };
const PACKED: Int4Scheme = Int4Scheme::new(Int4Layout::Compressed, true);
const AWQ: Int4Scheme = Int4Scheme { group: Some(64), ..Int4Scheme::new(Int4Layout::Awq, false) };
/// Which rows the fixture has values of.
fn shown() -> impl Iterator<Item = usize> {
    (0..5).chain(125..133).chain([159])
}

fn dtype_of(dtype: DType) -> Dtype {
    match dtype {
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
        DType::BF16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        _ => Dtype::F32,
    }
}

/// The tensors of one layout of the fixture, those of a module `layer`.
fn tensors(layout: &str) -> Vec<Named> {
    let all = Checkpoint::from_bytes(FILE, std::fs::read(fixtures().join(FILE)).expect("reads")).expect("opens");
    let of_layout = |tensor: ridge_files::TensorView<'_>| {
        let name = tensor.name.strip_prefix(layout)?.strip_prefix('.')?;
        Some((format!("layer.{name}"), dtype_of(tensor.dtype), tensor.shape.to_vec(), tensor.data.to_vec()))
    };
    let found: Vec<Named> = all.tensors().filter_map(of_layout).collect();
    assert!(found.len() >= 3, "{layout}");
    found
}

fn write(folder: &Path, tensors: &[Named]) {
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).expect("fits")));
    let bytes = safetensors::serialize(views, None).expect("serialises");
    std::fs::write(folder.join("model.safetensors"), bytes).expect("writes");
}

fn read(tensors: &[Named], scheme: Int4Scheme) -> Result<Checkpoint, String> {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), tensors);
    Checkpoint::open(folder.path()).and_then(|c| c.in_int4(scheme)).map_err(|e| e.to_string())
}

fn values(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let shape = checkpoint.shape(name).expect("is there").to_vec();
    let parts = checkpoint.components(name).expect("is there");
    let format = checkpoint.format(name).unwrap_or_else(|| panic!("{name} is in a format"));
    format.values(&parts.iter().map(AsRef::as_ref).collect::<Vec<_>>(), &shape)
}

#[test]
fn codes_of_four_bits_mean_what_their_libraries_take_them_for() {
    let layouts = [
        ("compressed", Int4Scheme { group: Some(32), ..PACKED }, "q4_0"),
        ("compressed_zeros", Int4Scheme { symmetric: false, group: Some(0), ..PACKED }, "q4_1"),
        ("gptq", FIRST, "q4_0"),
        ("gptq_zeros", Int4Scheme { symmetric: false, ..FIRST }, "q4_1"),
        ("gptq_v2", Int4Scheme::new(Int4Layout::Gptq, false), "q4_1"),
        ("awq", AWQ, "q4_1"),
    ];
    let expected = Expected::open(FILE);
    for (layout, zeros, format) in layouts {
        let checkpoint = read(&tensors(layout), zeros).expect("reads");
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["layer.weight"], "{layout}");
        assert_eq!(checkpoint.format("layer.weight").map(|f| f.name()), Some(format), "{layout}");
        assert_eq!(checkpoint.shape("layer.weight").expect("is there"), [160, COLUMNS], "{layout}");
        let got = values(&checkpoint, "layer.weight");
        let want = expected.tensor(&format!("expected.{layout}"));
        let steps = expected.tensor(&format!("expected.{layout}.step"));
        for (nth, row) in shown().enumerate() {
            for column in 0..COLUMNS {
                let at = nth * COLUMNS + column;
                let (got, want, step) = (f64::from(got[row * COLUMNS + column]), want.floats()[at], steps.floats()[at]);
                // Libraries round to 16 bits, and minima are rounded here.
                let tolerance = if layout.starts_with("compressed") { 0.04 } else { 0.016 } * step;
                assert!((got - want).abs() <= tolerance, "{layout} at {row}, {column}: {got} for {want}");
            }
        }
    }
}

#[test]
fn what_does_not_fit_codes_of_four_bits_is_refused() {
    let refused = |layout: &str, zeros, change: &dyn Fn(&mut Vec<Named>), why: &str| {
        let mut all = tensors(layout);
        change(&mut all);
        let error = read(&all, zeros).expect_err(why);
        assert!(error.contains(why), "{error}");
    };
    let without = |end: &'static str| move |all: &mut Vec<Named>| all.retain(|tensor| !tensor.0.ends_with(end));
    refused("awq", AWQ, &without("scales"), "there is no tensor layer.scales for layer.qweight");
    refused("awq", AWQ, &without("qzeros"), "has no zero points");
    refused("gptq_zeros", FIRST, &|_| (), "has zero points, where the configuration says");
    // What the first format means by a number is another than what the second does.
    refused("gptq", Int4Scheme { one_above: false, ..FIRST }, &|_| (), "has zero points, where the configuration says");
    // Layouts and groups are those of the configuration.
    refused("gptq", AWQ, &|_| (), "do not fit as AWQ packs it");
    refused("awq", FIRST, &|_| (), "do not fit as GPTQ packs it");
    refused("awq", Int4Scheme { group: Some(128), ..AWQ }, &|_| (), "where 128 columns are said to share a scale");
    let moved = |all: &mut Vec<Named>| {
        let of = all.iter_mut().find(|tensor| tensor.0.ends_with("g_idx")).expect("is there");
        of.3.rotate_left(4);
    };
    refused("gptq", FIRST, &moved, "desc_act");
    let plain = |all: &mut Vec<Named>| all.push(("layer.weight".into(), Dtype::F32, vec![1], vec![0; 4]));
    refused("compressed", PACKED, &plain, "exists both plainly and as integers of 4 bits");
    let narrow = |all: &mut Vec<Named>| {
        let scales = all.iter_mut().find(|tensor| tensor.0.ends_with("scale")).expect("is there");
        scales.2 = vec![160, 5];
        scales.3.truncate(160 * 5 * 2);
    };
    let empty = |all: &mut Vec<Named>| {
        let codes = all.iter_mut().find(|tensor| tensor.0.ends_with("packed")).expect("is there");
        (codes.2, codes.3) = (vec![160, 0], Vec::new());
    };
    refused("compressed", PACKED, &empty, "which have no elements");
    let infinite = |all: &mut Vec<Named>| {
        let scales = all.iter_mut().find(|tensor| tensor.0.ends_with("scale")).expect("is there");
        scales.3[2..4].copy_from_slice(&0x7f80_u16.to_le_bytes());
    };
    refused("compressed", PACKED, &infinite, "has a scale of inf");
    assert!(
        read(
            &{
                let mut all = tensors("compressed");
                narrow(&mut all);
                all
            },
            PACKED
        )
        .is_ok(),
        "groups of 64"
    );
    let odd = |all: &mut Vec<Named>| {
        let scales = all.iter_mut().find(|tensor| tensor.0.ends_with("scale")).expect("is there");
        scales.2 = vec![160, 4];
        scales.3.truncate(160 * 4 * 2);
    };
    refused("compressed", PACKED, &odd, "a group must have a multiple of 32 columns");
}

/// The Qwen 3 of the fixtures with its projections as integers of 4 bits in groups of 32, as `quantization` says, and as what these stand
/// for. Codes are packed as compressed-tensors does it.
fn qwen3(quantization: &Value) -> [tempfile::TempDir; 2] {
    let from = fixtures().join("families/qwen3");
    let text = std::fs::read_to_string(from.join("config_v4.json")).expect("a configuration");
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    let (mut codes, mut plain): (Vec<Named>, Vec<Named>) = (Vec::new(), Vec::new());
    for tensor in Checkpoint::open(&from).expect("weights").tensors() {
        let (name, shape) = (tensor.name.to_owned(), tensor.shape.to_vec());
        let [rows, inner] = shape[..] else {
            for all in [&mut codes, &mut plain] {
                all.push((name.clone(), Dtype::F32, shape.clone(), tensor.data.to_vec()));
            }
            continue;
        };
        if !name.ends_with("_proj.weight") || inner % 32 != 0 {
            for all in [&mut codes, &mut plain] {
                all.push((name.clone(), Dtype::F32, shape.clone(), tensor.data.to_vec()));
            }
            continue;
        }
        let values = DType::F32.decode(tensor.data);
        let scale = |row: usize, group: usize| {
            let of_group = &values[row * inner + group * 32..][..32];
            let largest = of_group.iter().fold(0.0_f64, |most, v| most.max(v.abs()));
            DType::BF16.decode(&DType::BF16.encode([largest / 7.0]))[0]
        };
        let groups = inner / 32;
        let scales: Vec<f64> = (0..rows * groups).map(|at| scale(at / groups, at % groups)).collect();
        let code = |i: usize| ((values[i] / scales[i / 32]).round() + 8.0).clamp(0.0, 15.0);
        let number = |i: usize| ((code(i) - 8.0) * scales[i / 32]) as f32;
        plain.push((
            name.clone(),
            Dtype::F32,
            shape,
            (0..rows * inner).flat_map(|i| number(i).to_le_bytes()).collect(),
        ));
        let module = name.strip_suffix(".weight").expect("a weight");
        let packed = (0..rows * inner / 2).map(|i| code(2 * i) as u8 | (code(2 * i + 1) as u8) << 4).collect();
        codes.push((format!("{module}.weight_packed"), Dtype::I32, vec![rows, inner / 8], packed));
        codes.push((format!("{module}.weight_scale"), Dtype::BF16, vec![rows, groups], DType::BF16.encode(scales)));
        let shape = [rows as i64, inner as i64].into_iter().flat_map(i64::to_le_bytes).collect();
        codes.push((format!("{module}.weight_shape"), Dtype::I64, vec![2], shape));
    }
    let folder = |config: &Value, tensors: &[Named]| {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("config.json"), config.to_string()).expect("writes");
        write(folder.path(), tensors);
        folder
    };
    let plain = folder(&config, &plain);
    config["quantization_config"] = quantization.clone();
    [folder(&config, &codes), plain]
}

/// What RedHatAI publishes as Qwen3-8B-quantized.w4a16, in groups of 32.
fn w4a16() -> Value {
    json!({
        "config_groups": {"group_0": {
            "input_activations": null, "output_activations": null, "targets": ["Linear"],
            "weights": {"actorder": "weight", "block_structure": null, "dynamic": false, "group_size": 32, "num_bits": 4,
                        "observer": "mse", "observer_kwargs": {}, "strategy": "group", "symmetric": true, "type": "int"},
        }},
        "format": "pack-quantized", "global_compression_ratio": null, "ignore": ["lm_head"], "kv_cache_scheme": null,
        "quant_method": "compressed-tensors", "quantization_status": "compressed",
    })
}

#[test]
fn a_model_of_four_bits_has_the_weights_that_its_codes_stand_for() {
    let folders = qwen3(&w4a16());
    let open = |folder: &tempfile::TempDir| {
        let files = ModelFiles::open(Some(folder.path())).expect("opens");
        let config = files.config().expect("reads");
        (Arc::new(config.arrange(files.checkpoint().expect("opens")).expect("arranges")), config)
    };
    let ((codes, config), (plain, _)) = (open(&folders[0]), open(&folders[1]));
    let mut quantised = 0;
    for tensor in plain.tensors() {
        if codes.format(tensor.name).is_none() {
            continue;
        }
        quantised += 1;
        let want = DType::F32.decode(tensor.data);
        for (got, want) in values(&codes, tensor.name).into_iter().zip(want) {
            assert!((f64::from(got) - want).abs() <= 1e-6 * want.abs(), "{}: {got} for {want}", tensor.name);
        }
    }
    assert!(quantised == 12, "{quantised}");
    // The configuration alone says as much, if all columns of the published model fit blocks.
    let model = |source: &WeightSource| {
        let mut model = config.build(&BuildOptions::default()).expect("builds");
        model.store(source, None).expect("fits");
        ModuleSummary::new(&model).weight_bytes
    };
    let random = WeightSource::RandomAsPublished(Box::new(config.clone()));
    assert_eq!(model(&WeightSource::Checkpoint(codes)), model(&random));
}

#[test]
fn a_folder_of_codes_is_written_as_one_of_the_values_that_they_stand_for() {
    let [codes, plain] = qwen3(&w4a16());
    std::fs::write(codes.path().join("generation_config.json"), r#"{"eos_token_id": 7}"#).expect("writes");
    let convert = |from: &Path, to: &Path| {
        to_folder(&ModelFiles::open(Some(from)).expect("opens"), to, DType::F32, false, |_, _| Ok(()))
    };
    let to = codes.path().join("plain");
    convert(codes.path(), &to).expect("writes");
    let (is, was) = (Checkpoint::open(&to).expect("opens"), Checkpoint::open(plain.path()).expect("opens"));
    assert!(is.names().eq(was.names()));
    for tensor in is.tensors() {
        let (got, want) = (DType::F32.decode(tensor.data), was.tensor(tensor.name).expect("is there").data);
        for (got, want) in got.into_iter().zip(DType::F32.decode(want)) {
            assert!((got - want).abs() <= 1e-6 * want.abs(), "{}: {got} for {want}", tensor.name);
        }
    }
    let files = ModelFiles::open(Some(&to)).expect("opens");
    assert!(!files.config_text().expect("reads").contains("quantization_config"));
    assert_eq!(files.config().expect("reads").eos_token_ids, [7]);
    let again = codes.path().join("again");
    let refused = convert(&to, &again).expect_err("is plain").to_string();
    assert!(refused.contains("its weights are plain already") && !again.exists(), "{refused}");
}

#[test]
fn published_configurations_are_read_or_refused_by_key() {
    let config = |quantization: &Value| {
        let text = std::fs::read_to_string(fixtures().join("families/qwen3/config_v4.json")).expect("a configuration");
        let mut config: Value = serde_json::from_str(&text).expect("JSON");
        config["quantization_config"] = quantization.clone();
        ModelFiles::of_text("config.json", &config.to_string()).config().map(|_| ()).map_err(|e| e.to_string())
    };
    // Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4 and -AWQ.
    let gptq = json!({"bits": 4, "damp_percent": 0.01, "dataset": null, "desc_act": false, "group_size": 128, "model_file_base_name": null,
        "model_name_or_path": null, "quant_method": "gptq", "static_groups": false, "sym": true, "true_sequential": true});
    let awq = json!({"bits": 4, "group_size": 128, "modules_to_not_convert": null, "quant_method": "awq", "version": "gemm", "zero_point": true});
    // As transformers writes them.
    let mut of_gptq = json!({"quant_method": "gptq", "bits": 4, "tokenizer": null, "dataset": null, "group_size": 128, "damp_percent": 0.1,
        "desc_act": false, "act_group_aware": true, "sym": true, "true_sequential": true, "format": "gptq", "meta": null,
        "backend": "auto", "model_seqlen": null, "block_name_to_quantize": null, "module_name_preceding_first_block": null,
        "batch_size": 1, "pad_token_id": null, "max_input_length": null, "cache_block_outputs": true,
        "modules_in_block_to_quantize": null, "checkpoint_format": "gptq"});
    config(&of_gptq).expect("is read");
    let map = of_gptq.as_object_mut().expect("an object");
    map.remove("checkpoint_format");
    map.extend(json!({"quant_method": "awq", "format": "gemm", "version": "gemm", "zero_point": true, "modules_to_not_convert": null})
        .as_object().expect("an object").clone());
    config(&of_gptq).expect("is read");
    for published in [&gptq, &awq, &w4a16()] {
        config(published).expect("is read");
    }
    let refused = |published: &Value, pointer: &str, value: Value, key: &str| {
        let mut changed = published.clone();
        match changed.pointer_mut(pointer) {
            Some(at) => *at = value,
            None => changed[&pointer[1..]] = value,
        }
        let error = config(&changed).expect_err(pointer);
        assert!(error.contains(key), "{pointer}: {error}");
    };
    refused(&gptq, "/bits", json!(8), "bits");
    refused(&gptq, "/desc_act", json!(true), "desc_act");
    refused(&gptq, "/group_size", json!(16), "group_size");
    refused(&gptq, "/checkpoint_format", json!("marlin"), "checkpoint_format");
    refused(&gptq, "/lm_head", json!(true), "lm_head");
    refused(&gptq, "/dynamic", json!({"-:gate": {}}), "dynamic");
    refused(&awq, "/version", json!("gemv"), "version");
    refused(&awq, "/unknown", json!(1), "unknown");
    let weights = "/config_groups/group_0/weights";
    refused(&w4a16(), &format!("{weights}/num_bits"), json!(8), "num_bits");
    refused(&w4a16(), &format!("{weights}/actorder"), json!("group"), "actorder");
    refused(&w4a16(), &format!("{weights}/group_size"), json!(48), "group_size");
    refused(&w4a16(), "/config_groups/group_0/input_activations", json!({"num_bits": 8}), "input_activations");
}
