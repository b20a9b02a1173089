//! Checkpoints of 8-bit codes: f8e4m3 with a scale for each block of 128 x 128, as DeepSeek V3 is published, and f8e4m3 or int8
//! with one for each channel or tensor.

use std::sync::Arc;

use ridge_files::Checkpoint;
use ridge_graph::format::{CodeType, Format, ScaleLayout, ScaledFormat};
use ridge_graph::ops::Quantize;
use ridge_graph::passes::{Activations, round_activations};
use ridge_graph::{Arg, DType, FormatRef, Graph, Op, Role};
use ridge_models::gguf::to_folder;
use ridge_models::{BuildOptions, ModelFiles, WeightSource};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use crate::common::fixtures;

/// A tensor: name, dtype, shape and bytes.
type Named = (String, Dtype, Vec<usize>, Vec<u8>);

/// Two copies of the DeepSeek V3 of the fixtures: its matrices as codes with scales of `scale_dtype`, and as what these
/// stand for. With a tensor of a layer that predicts further tokens.
fn copies(scale_dtype: DType) -> [tempfile::TempDir; 2] {
    let format = ScaledFormat::from_name("f8e4m3_b128").expect("a format");
    let from = fixtures().join("families/deepseek_v3");
    let text = std::fs::read_to_string(from.join("config_v4.json")).expect("a configuration");
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    let (mut codes, mut plain): (Vec<Named>, Vec<Named>) = (Vec::new(), Vec::new());
    for tensor in Checkpoint::open(&from).expect("weights").tensors() {
        let (name, shape) = (tensor.name.to_owned(), tensor.shape.to_vec());
        if !name.ends_with("_proj.weight") && !name.ends_with("with_mqa.weight") {
            codes.push((name.clone(), Dtype::F32, shape.clone(), tensor.data.to_vec()));
            plain.push((name, Dtype::F32, shape, tensor.data.to_vec()));
            continue;
        }
        let values: Vec<f32> = DType::F32.decode(tensor.data).into_iter().map(|v| v as f32).collect();
        let mut stored = format.encode(&values, &shape, None);
        let narrow = scale_dtype.encode(DType::F32.decode(&stored[1]));
        stored[1] = DType::F32.encode(scale_dtype.decode(&narrow));
        let values = format.values(&[&stored[0], &stored[1]], &shape);
        let blocks = shape.iter().map(|n| n.div_ceil(128)).collect();
        let dtype = if scale_dtype == DType::F32 { Dtype::F32 } else { Dtype::BF16 };
        codes.push((format!("{name}_scale_inv"), dtype, blocks, narrow));
        codes.push((name.clone(), Dtype::F8_E4M3, shape.clone(), stored[0].clone()));
        plain.push((name, Dtype::F32, shape, values.into_iter().flat_map(f32::to_le_bytes).collect()));
    }
    config["num_nextn_predict_layers"] = 1.into();
    for all in [&mut codes, &mut plain] {
        all.push(("model.layers.2.eh_proj.weight".into(), Dtype::F32, vec![1], vec![0; 4]));
    }
    let plain = write(&config, &plain);
    config["quantization_config"] =
        json!({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]});
    [write(&config, &codes), plain]
}

fn write(config: &Value, tensors: &[Named]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("config.json"), config.to_string()).expect("writes");
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).expect("fits")));
    let bytes = safetensors::serialize(views, None).expect("serialises");
    std::fs::write(folder.path().join("model.safetensors"), bytes).expect("writes");
    folder
}

/// A Qwen 3 of the fixtures as llm-compressor publishes it in `format`, of rows: codes with a bf16 scale for each channel or, if
/// `whole`, each tensor; and what these stand for. Of 8-bit floats with one scale, that of activations is fixed.
fn compressed(format: ScaledFormat, whole: bool) -> [tempfile::TempDir; 2] {
    let floats = format.codes == CodeType::F8E4M3;
    let fixed = whole && floats;
    let from = fixtures().join("families/qwen3");
    let text = std::fs::read_to_string(from.join("config_v4.json")).expect("a configuration");
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    let (mut codes, mut plain): (Vec<Named>, Vec<Named>) = (Vec::new(), Vec::new());
    for tensor in Checkpoint::open(&from).expect("weights").tensors() {
        let (name, shape) = (tensor.name.to_owned(), tensor.shape.to_vec());
        if !name.ends_with("_proj.weight") {
            codes.push((name.clone(), Dtype::F32, shape.clone(), tensor.data.to_vec()));
            plain.push((name, Dtype::F32, shape, tensor.data.to_vec()));
            continue;
        }
        let values: Vec<f32> = DType::F32.decode(tensor.data).into_iter().map(|v| v as f32).collect();
        let [rows, inner] = shape[..] else { panic!("{name} is a matrix") };
        let units = if whole { vec![1, rows * inner] } else { vec![rows, inner] };
        let mut stored = format.encode(&values, &units, None);
        if !floats {
            // The least code, which Ridge does not make, and the library does.
            stored[0][0] = 0x80;
        }
        let scales = DType::BF16.encode(DType::F32.decode(&stored[1]));
        let wide = DType::BF16.decode(&scales);
        let numbers = format.codes.dtype().decode(&stored[0]);
        let scale_of = |i: usize| wide[if whole { 0 } else { i / inner }] as f32;
        let values = numbers.into_iter().enumerate().map(|(i, code)| code as f32 * scale_of(i));
        plain.push((name.clone(), Dtype::F32, shape.clone(), values.flat_map(f32::to_le_bytes).collect()));
        codes.push((format!("{name}_scale"), Dtype::BF16, if whole { vec![1] } else { vec![rows, 1] }, scales));
        if fixed {
            codes.push((name.replace(".weight", ".input_scale"), Dtype::F32, vec![1], 0.5f32.to_le_bytes().to_vec()));
        }
        codes.push((name, if floats { Dtype::F8_E4M3 } else { Dtype::I8 }, shape, stored[0].clone()));
    }
    let plain = write(&config, &plain);
    let strategy = if whole { "tensor" } else { "channel" };
    let numbers = |strategy: &str, dynamic: bool| {
        json!({"actorder": null, "block_structure": null, "dynamic": dynamic, "group_size": null, "num_bits": 8,
               "observer": "minmax", "strategy": strategy, "symmetric": true, "type": if floats { "float" } else { "int" }})
    };
    config["quantization_config"] = json!({
        "config_groups": {"group_0": {
            "input_activations": numbers(if fixed { "tensor" } else { "token" }, !fixed),
            "output_activations": null, "targets": ["Linear"], "weights": numbers(strategy, false),
        }},
        "format": if floats { "float-quantized" } else { "int-quantized" },
        "global_compression_ratio": 1.5, "ignore": ["lm_head"], "kv_cache_scheme": null,
        "quant_method": "compressed-tensors", "quantization_status": "frozen",
    });
    [write(&config, &codes), plain]
}

#[test]
fn codes_with_a_scale_for_each_channel_or_tensor_mean_what_they_are_published_as() {
    for (format, whole) in [ScaledFormat::F8_ROWS, ScaledFormat::INT8_ROWS].map(|f| [(f, false), (f, true)]).concat() {
        let folders = compressed(format, whole);
        let [codes, plain] = [0, 1].map(|i| arranged(&folders[i]));
        let files = ModelFiles::open(Some(folders[0].path())).expect("opens");
        let graph = files.config().expect("reads").build(&BuildOptions::default()).expect("builds").module.graph;
        let typed = WeightSource::Checkpoint(Arc::clone(&codes)).retype(&graph, None).expect("fits the model");
        assert!(codes.unused().is_empty(), "{:?}", codes.unused());
        let mut quantised = 0;
        for arg in typed.args(Role::Weight) {
            let parts = codes.components(&arg.name).expect("is there");
            let Some(stored) = &arg.ty.format else { continue };
            assert_eq!(stored.name(), format.name(), "{}", arg.name);
            quantised += 1;
            let shape = arg.ty.shape.as_const().expect("numbers");
            let values = stored.values(&[parts[0].as_ref(), parts[1].as_ref()], &shape);
            let got: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
            assert!(got == plain.bytes(&arg.name).expect("is there").as_ref(), "{}", arg.name);
        }
        assert_planned_as_stored(&files, &typed);
        let matrices = typed.args(Role::Weight).filter(|a| a.name.ends_with("_proj.weight")).count();
        assert!(quantised > 0 && quantised == matrices, "{quantised} of {matrices}");
    }
}

#[test]
fn only_products_of_layers_are_stored_in_fp8_and_round_what_they_multiply() {
    let folder = fixtures().join("families/qwen3");
    let config = ModelFiles::open(Some(&folder)).expect("opens").config().expect("reads");
    let format = FormatRef::new(ScaledFormat::F8_ROWS);
    let stored = |activations| {
        let options = BuildOptions { activations, ..BuildOptions::default() };
        let graph = config.build(&options).expect("builds").module.graph;
        WeightSource::Random(DType::F32).retype(&graph, Some(&format)).expect("fits")
    };
    for arg in stored(DType::BF16).args(Role::Weight) {
        let wanted = arg.name.ends_with("_proj.weight").then_some(&format);
        assert_eq!(arg.ty.format.as_ref(), wanted, "{}", arg.name);
    }
    let quantised = |activations, dtype| {
        let mut graph = stored(dtype);
        round_activations(&mut graph, activations);
        let nodes = graph.functions.iter().flat_map(|function| &function.nodes);
        nodes.filter(|node| matches!(&node.op, Op::Composite(op) if op.downcast::<Quantize>().is_some())).count()
    };
    // In the function of a layer: what q, k and v share, o's, what gate and up share; down's has a width that is no multiple of 16.
    assert_eq!(quantised(Activations::Matched, DType::BF16), 3);
    assert_eq!(quantised(Activations::Matched, DType::F32), 0, "tensor cores take 16 bits");
    let others = [Activations::Int8, Activations::Exact].map(|activations| quantised(activations, DType::BF16));
    assert_eq!(others, [0, 0], "are for blocks");
}

/// Each weight is stored as the configuration alone says.
fn assert_planned_as_stored(files: &ModelFiles, stored: &Graph) {
    let config = files.config().expect("reads");
    let graph = config.build(&BuildOptions::default()).expect("builds").module.graph;
    let planned = WeightSource::RandomAsPublished(Box::new(config)).retype(&graph, None).expect("fits the model");
    for (planned, stored) in planned.args(Role::Weight).zip(stored.args(Role::Weight)) {
        let of =
            |arg: &Arg| (arg.name.to_string(), arg.ty.format.as_ref().map(|f| f.name()), arg.ty.bytes().as_const());
        assert_eq!(of(planned), of(stored));
    }
}

#[test]
fn an_object_without_keys_says_nothing_of_weights() {
    let [_, plain] = compressed(ScaledFormat::F8_ROWS, false);
    let path = plain.path().join("config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).expect("a file")).expect("JSON");
    let mut read = |quantization: Value| {
        config["quantization_config"] = quantization;
        std::fs::write(&path, config.to_string()).expect("writes");
        ModelFiles::open(Some(plain.path())).map(|files| (files.config(), files))
    };
    let (_, files) = read(json!({})).expect("opens");
    let graph = files.config().expect("reads").build(&BuildOptions::default()).expect("builds").module.graph;
    let stored = WeightSource::Checkpoint(arranged(&plain)).retype(&graph, None).expect("fits the model");
    assert_planned_as_stored(&files, &stored);
    for (wrong, key) in [
        (json!({"fmt": "e4m3"}), "quantization_config.quant_method = null"),
        (json!({"quant_method": "hqq", "bits": 4}), "quantization_config.quant_method = \"hqq\""),
    ] {
        let why = read(wrong).expect("opens").0.expect_err("is refused").to_string();
        assert!(why.contains(key) && why.contains("\"compressed-tensors\""), "{why}");
    }
}

/// What is said of a configuration of `compressed` in `format` in which `from` is `to`, each time it is there.
fn refusal(format: ScaledFormat, from: &str, to: &str) -> String {
    let [folder, _] = compressed(format, false);
    let path = folder.path().join("config.json");
    let text = std::fs::read_to_string(&path).expect("a configuration");
    assert!(text.contains(from), "{text}");
    std::fs::write(&path, text.replace(from, to)).expect("writes");
    ModelFiles::open(Some(folder.path())).and_then(|f| f.config()).expect_err("is refused").to_string()
}

#[test]
fn compressed_weights_of_other_kinds_are_refused() {
    let (f8, int8) = (ScaledFormat::F8_ROWS, ScaledFormat::INT8_ROWS);
    for (format, from, to, key) in [
        (f8, "\"num_bits\":8", "\"num_bits\":4", "group_0.weights.num_bits = 4"),
        (f8, "float-quantized", "marlin-24", "quantization_config.format"),
        (f8, "float-quantized", "pack-quantized", "group_0.weights.num_bits = 8"),
        (f8, "\"kv_cache_scheme\":null", "\"kv_cache_scheme\":{}", "quantization_config.kv_cache_scheme"),
        (f8, "float-quantized", "int-quantized", "group_0.weights.type = \"float\""),
        (int8, "\"strategy\":\"channel\"", "\"strategy\":\"group\"", "group_0.weights.strategy = \"group\""),
        (int8, "\"symmetric\":true", "\"symmetric\":false", "group_0.weights.symmetric = false"),
        (int8, "\"dynamic\":true", "\"dynamic\":false", "group_0.input_activations.dynamic = false"),
        (int8, "\"strategy\":\"token\"", "\"strategy\":\"tensor\"", "group_0.input_activations.strategy = \"tensor\""),
        (int8, "\"input_activations\":{", "\"other\":{", "group_0.input_activations.num_bits = null"),
    ] {
        let why = refusal(format, from, to);
        assert!(why.contains(key), "{why}");
    }
}

fn arranged(folder: &tempfile::TempDir) -> Arc<Checkpoint> {
    let files = ModelFiles::open(Some(folder.path())).expect("opens");
    let config = files.config().expect("reads");
    Arc::new(config.arrange(files.checkpoint().expect("weights")).expect("arranges"))
}

#[test]
fn codes_and_scales_are_one_weight_and_mean_what_they_are_published_as() {
    for scale_dtype in [DType::F32, DType::BF16] {
        let folders = copies(scale_dtype);
        let [codes, plain] = [0, 1].map(|i| arranged(&folders[i]));
        assert_eq!(codes.unused(), ["model.layers.2.eh_proj.weight"]);
        let files = ModelFiles::open(Some(folders[0].path())).expect("opens");
        let graph = files.config().expect("reads").build(&BuildOptions::default()).expect("builds").module.graph;
        let typed = WeightSource::Checkpoint(Arc::clone(&codes)).retype(&graph, None).expect("fits the model");
        let mut quantised = 0;
        for arg in typed.args(Role::Weight) {
            let wanted = plain.bytes(&arg.name).expect("is there");
            let parts = codes.components(&arg.name).expect("is there");
            let shape = arg.ty.shape.as_const().expect("numbers");
            let got = match &arg.ty.format {
                None => parts[0].as_ref().to_vec(),
                Some(format) => {
                    assert_eq!(format.name(), "f8e4m3_b128", "{}", arg.name);
                    quantised += 1;
                    let values = format.values(&[parts[0].as_ref(), parts[1].as_ref()], &shape);
                    values.into_iter().flat_map(f32::to_le_bytes).collect()
                }
            };
            assert!(got == wanted.as_ref(), "{}", arg.name);
        }
        assert_planned_as_stored(&files, &typed);
        // Five projections of attention and three of the MLP; of experts and of the shared one three each.
        assert_eq!(quantised, 5 + 3 + 5 + 6, "{scale_dtype}");
    }
}

#[test]
fn scales_without_codes_or_of_another_shape_are_refused() {
    let [folder, _] = copies(DType::F32);
    let path = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&path).expect("a file");
    let said = |from: &str, to: &str| {
        let text = String::from_utf8_lossy(&bytes[8..]).into_owned();
        let header = text.split("}}").next().expect("a header").to_owned();
        assert!(header.contains(from), "{header}");
        let mut changed = bytes.clone();
        let at = 8 + header.find(from).expect("is there");
        changed[at..at + from.len()].copy_from_slice(to.as_bytes());
        std::fs::write(&path, changed).expect("writes");
        let files = ModelFiles::open(Some(folder.path())).expect("opens");
        let arranged = files.checkpoint().and_then(|c| files.config().expect("reads").arrange(c));
        arranged.map(|_| ()).expect_err("is refused").to_string()
    };
    let why = said("layers.0.self_attn.o_proj.weight_scale_inv", "layers.0.self_attn.x_proj.weight_scale_inv");
    assert!(why.contains("there is no tensor model.layers.0.self_attn.x_proj.weight of f8e4m3 codes"), "{why}");
}

#[test]
fn a_folder_of_codes_with_scales_is_written_as_one_of_the_values_that_they_stand_for() {
    // Experts of DeepSeek V3 are stacks of codes and of scales.
    for [codes, plain] in [copies(DType::BF16), compressed(ScaledFormat::new(CodeType::Int8, ScaleLayout::Row), false)]
    {
        let to = codes.path().join("plain");
        let files = ModelFiles::open(Some(codes.path())).expect("opens");
        to_folder(&files, &to, DType::F32, false, |_, _| Ok(())).expect("writes");
        let (is, was) = (Checkpoint::open(&to).expect("opens"), Checkpoint::open(plain.path()).expect("opens"));
        assert!(is.len() > 20);
        for tensor in is.tensors() {
            assert_eq!(tensor.dtype, DType::F32, "{}", tensor.name);
            assert!(tensor.data == was.tensor(tensor.name).expect("is there").data, "{}", tensor.name);
        }
        let missing: Vec<&str> = was.names().filter(|name| !is.contains(name)).collect();
        assert!(missing.iter().all(|name| name.ends_with("eh_proj.weight")), "{missing:?}");
    }
}
