//! A classifier of images beside transformers (fixtures/families/vit): logits and hidden states, exactly and on the CPU, of an image
//! alone and of several.

use crate::common::modules::{ModuleFixture, Step};
use crate::common::{cpu, fixtures, relative};
use ridge_graph::{Bindings, DType, Precision, Tensor, conformance};
use ridge_image::{Image, Preprocessing, Resampling};
use ridge_models::{ModelFiles, Network, VitConfig, symbols};
use ridge_runtime::lower;

pub(crate) fn open(activations: DType) -> ModuleFixture {
    ModuleFixture::open("families/vit", activations)
}

/// The step of these images of the fixture.
pub(crate) fn step(fixture: &ModuleFixture, images: std::ops::Range<usize>) -> Step {
    let pixels = fixture.expected.tensor("pixel_values");
    let of_image: usize = pixels.shape[1..].iter().product();
    let values = pixels.floats()[images.start * of_image..images.end * of_image].to_vec();
    let shape = [&[images.len()], &pixels.shape[1..]].concat();
    let inputs = vec![("pixel_values", Tensor::float(DType::F32, &shape, values))];
    (inputs, Bindings::new().with(symbols::IMAGES, images.len()))
}

#[test]
fn the_graph_means_what_a_forward_pass_in_doubles_computes() {
    let fixture = open(DType::F32);
    let step = step(&fixture, 0..3);
    for output in ["logits", "hidden"] {
        let lowered = lower(fixture.graph(), &[output], &[]).expect("lowers");
        let want = fixture.expected.tensor(&format!("{output}_f64"));
        for graph in [fixture.graph(), &lowered] {
            let off = relative(fixture.exact(graph, &step, output).floats(), want.floats());
            assert!(off < 1e-12, "{output}: off by {off:e}");
        }
    }
}

#[test]
fn logits_and_hidden_states_are_as_near_to_exact_as_those_of_transformers() {
    let fixture = open(DType::F32);
    for output in ["logits", "hidden"] {
        let got = fixture.judge(cpu(1), &step(&fixture, 0..3), output, output);
        let threads = fixture.on_cpu(&step(&fixture, 0..3), output, 3);
        assert_eq!(threads.to_bytes(), got.to_bytes(), "{output}: three threads");
        let alone = fixture.on_cpu(&step(&fixture, 1..2), output, 2);
        assert_eq!(alone.floats(), &got.floats()[alone.len()..2 * alone.len()], "{output}: the second alone");
    }
}

#[test]
fn bfloat16_logits_are_as_near_to_exact_as_those_of_a_plain_implementation() {
    let fixture = open(DType::BF16);
    let step = step(&fixture, 0..3);
    let narrow = |t: Tensor| Tensor { dtype: DType::BF16, ..t };
    let [exact, plain] = [Precision::Exact, Precision::Rounded]
        .map(|precision| narrow(fixture.evaluate(fixture.graph(), &step, "logits", precision)));
    let got = narrow(fixture.on_cpu(&step, "logits", 2));
    conformance::near(&got, &[&plain], &exact).expect("is as near");
}

#[test]
fn a_module_says_what_it_takes_and_gives() {
    let fixture = open(DType::F32);
    let Network::ImageClassifier(classifier) = &fixture.network else { panic!("classifies images") };
    let inputs: Vec<String> = classifier.inputs().map(|arg| format!("{}: {}", arg.name, arg.ty)).collect();
    assert_eq!(inputs, ["pixel_values: f32[images, 3, 24, 24]"]);
    assert_eq!(classifier.outputs().collect::<Vec<_>>(), ["logits", "hidden"]);
    assert!(classifier.state_groups.is_empty() && classifier.state_bytes_per_token() == 0);
    assert_eq!((classifier.positions, classifier.labels.len()), (10, 5));
    // Patches of 192 numbers, 9 positions and the class token, two layers, the last norm and 5 classes.
    let layer = 4 * (32 * 32 + 32) + 2 * 32 * 48 + 48 + 32 + 4 * 32;
    assert_eq!(classifier.parameter_count(), 192 * 32 + 32 + 32 + 10 * 32 + 2 * layer + 2 * 32 + 5 * 32 + 5);
    assert_eq!(classifier.weight_bytes(), 4 * classifier.parameter_count());
}

#[test]
fn configurations_that_contradict_themselves_are_refused_by_name() {
    let files = ModelFiles::open(Some(&fixtures().join("families/vit"))).expect("a model");
    let text = files.config_text().expect("reads").into_owned();
    for (from, to, expected) in [
        ("\"patch_size\": 8", "\"patch_size\": 7", "patch_size = 7 does not divide image_size = 24 x 24"),
        ("\"patch_size\": 8", "\"patch_size\": [8]", "patch_size = [8] is not a height and a width"),
        ("\"num_attention_heads\": 4", "\"num_attention_heads\": 5", "num_attention_heads = 5 does not divide"),
        ("\"4\": \"meadow\"", "\"5\": \"meadow\"", "does not name classes 0, 1, 2"),
        ("ViTForImageClassification", "ViTModel", "choose a checkpoint with architectures"),
        ("\"gelu\"", "\"relu\"", "hidden_act = \"relu\" is not supported"),
    ] {
        let error = VitConfig::from_json("config.json", &text.replace(from, to)).expect_err("is wrong").to_string();
        assert!(error.contains(expected), "{error}");
    }
    let wide = text.replace("\"image_size\": 24", "\"image_size\": [24, 40]");
    assert_eq!(VitConfig::from_json("config.json", &wide).expect("reads").positions(), 1 + 3 * 5);
    let error = files.config().expect_err("writes no text").to_string();
    assert!(error.contains("`ridge classify`"), "{error}");
}

const IMAGES: [&str; 5] = ["gradient.png", "palette.png", "gray.png", "gradient.jpg", "turned.jpg"];

/// One of 256 levels, which rounding between the two directions of resizing may cost; two levels of JPEG, whose decoders
/// may differ in their transforms.
#[test]
fn images_are_prepared_as_pillow_and_transformers_do() {
    let folder = fixtures().join("families/vit");
    let files = ModelFiles::open(Some(&folder)).expect("a model");
    let fixture = open(DType::F32);
    let usual = files.image_preprocessing().expect("reads");
    assert_eq!(usual.size, Some(([24, 24], Resampling::Bilinear)));
    let cubic = Preprocessing { size: Some(([24, 24], Resampling::Bicubic)), ..usual.clone() };
    for name in IMAGES {
        let bytes = std::fs::read(folder.join(name)).expect("a file");
        let image = Image::decode(name, &bytes).expect("decodes");
        assert_eq!((image.width, image.height), (37, 29), "{name}");
        for (kind, preprocessing) in [("pixels", &usual), ("bicubic", &cubic)] {
            let want = fixture.expected.tensor(&format!("{name}_{kind}"));
            let got = preprocessing.apply(&image);
            assert_eq!(got.len(), want.len());
            let levels = if name.ends_with("png") { 1.01 } else { 2.01 };
            for (at, (got, want)) in got.iter().zip(want.floats()).enumerate() {
                let level = usual.scale / usual.std[at / (24 * 24)];
                let off = (f64::from(*got) - want).abs() / level;
                assert!(off <= levels, "{name}, {kind}: element {at} is off by {off} levels");
            }
        }
    }
}
