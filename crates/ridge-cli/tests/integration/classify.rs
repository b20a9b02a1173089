//! `ridge classify`, as a user types it, beside what transformers makes of the same files.

use safetensors::SafeTensors;
use serde_json::Value;

use crate::common::{Folder, json, repository, ridge, stdout};

fn model() -> String {
    repository().join("fixtures/families/vit").display().to_string()
}

fn image(name: &str) -> String {
    format!("{}/{name}", model())
}

/// The probabilities that transformers gives the image file.
fn expected(name: &str) -> Vec<f64> {
    let bytes = std::fs::read(image("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let logits = tensors.tensor(&format!("{name}_logits")).unwrap();
    let logits: Vec<f64> = logits.data().as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect();
    let sum: f64 = logits.iter().map(|x| x.exp()).sum();
    logits.iter().map(|x| x.exp() / sum).collect()
}

/// The probability of each class, in the order of the classes.
fn probabilities(of: &Value) -> Vec<f64> {
    let classes = of["classes"].as_array().unwrap();
    let number = |value: &Value| value.as_f64().unwrap();
    assert!(classes.windows(2).all(|pair| number(&pair[0]["probability"]) >= number(&pair[1]["probability"])));
    let mut all = vec![f64::NAN; classes.len()];
    for class in classes {
        all[class["class"].as_u64().unwrap() as usize] = number(&class["probability"]);
    }
    all
}

fn near(got: &[f64], want: &[f64], within: f64) -> bool {
    got.len() == want.len() && got.iter().zip(want).all(|(a, b)| (a - b).abs() < within)
}

/// Resizing may round a level of 256 otherwise than Pillow, which this small random model feels in the second digit.
#[test]
fn images_show_what_transformers_says() {
    let names = ["gradient.png", "palette.png", "gray.png", "gradient.jpg", "turned.jpg"];
    let paths = names.map(image);
    let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
    let many = json(&[&["classify", "--json", "--model", &model(), "--batch", "2"], &paths[..]].concat());
    for ((name, path), shown) in names.iter().zip(&paths).zip(many["images"].as_array().unwrap()) {
        assert_eq!(shown["image"], *path);
        assert!(near(&probabilities(shown), &expected(name), 0.015), "{name}: {shown} {:?}", expected(name));
        let alone = json(&["classify", "--json", "--model", &model(), path]);
        assert_eq!(alone["images"][0], *shown, "{name} alone");
    }
    // Wherever it runs, and in half the bits.
    for more in [["--device", "auto"], ["--dtype", "bf16"], ["--format", "q8_0"]] {
        let shown = json(&[&["classify", "--json", "--model", &model(), paths[0]], &more[..]].concat());
        assert!(near(&probabilities(&shown["images"][0]), &expected(names[0]), 0.03), "{more:?}: {shown}");
    }
}

#[test]
fn the_likeliest_classes_are_a_table() {
    let text = stdout(&["classify", "--model", &model(), "--top", "2", &image("gray.png"), &image("gradient.png")]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!((lines.len(), lines[0], lines[3]), (6, &*image("gray.png"), &*image("gradient.png")));
    for (line, label) in [(lines[1], "ridge"), (lines[2], "summit"), (lines[4], "ridge"), (lines[5], "summit")] {
        let (probability, name) = line.trim().split_once("  ").unwrap();
        assert!(probability.parse::<f64>().is_ok_and(|p| (0.0..1.0).contains(&p)) && name == label, "{line}");
    }
}

#[test]
fn mistakes_name_the_file_and_what_to_do() {
    let folder = Folder::of_config("{}");
    let [cut, text] = ["cut.png", "text.png"].map(|name| folder.file(name).display().to_string());
    folder.write("cut.png", &std::fs::read(image("gradient.png")).unwrap()[..900]);
    folder.write("text.png", "no image");
    for (args, expected) in [
        (vec!["--model", &*model(), &cut], "cut.png: cannot be decoded"),
        (vec!["--model", &*model(), &text], "text.png: is neither a PNG nor a JPEG file; convert it"),
        (vec!["--model", &*model(), "nothing.png"], "cannot read nothing.png"),
        (
            vec!["--model", &*repository().join("fixtures/families/bert").display().to_string(), &cut],
            "does not classify images",
        ),
    ] {
        let ran = ridge(&[&["classify"], &args[..]].concat());
        assert!(ran.code != 0 && ran.stderr.contains(expected), "{args:?}: {}", ran.stderr);
        assert_eq!(ran.stdout, "", "{args:?}");
    }
    let ran = ridge(&["embed", "--model", &model(), "a text"]);
    assert!(ran.code != 0 && ran.stderr.contains("ridge classify"), "{}", ran.stderr);
}
