//! Twenty steps of every family that can be trained, beside torch and transformers (`fixtures/trajectories.py`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ridge_train::settings::{Settings, read_settings};
use serde::Deserialize;

use crate::common::run;

/// Losses before each of the steps.
#[derive(Deserialize)]
struct Trajectory {
    f64: Vec<f64>,
    f32: Vec<f64>,
    bf16: Vec<f64>,
}

const TEXT: &str = "how much wood would a woodchuck chuck";

pub(crate) fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

fn trajectories() -> BTreeMap<String, Trajectory> {
    let text = std::fs::read_to_string(fixtures().join("trajectories.json")).expect("is committed");
    serde_json::from_str(&text).expect("is JSON")
}

/// The run of the script: one sequence, which is all of the text.
pub(crate) fn family_settings(dir: &Path, family: &str, precision: &str, keys: &[(&str, &str)]) -> Settings {
    let text = dir.join("text.txt");
    std::fs::write(&text, TEXT).expect("writes");
    let toml = format!(
        "[model]\nfrom = {:?}\n[data]\ntrain = [{text:?}]\nvocabulary = \"characters\"\nsequence_length = {}\n\
         validation_fraction = 0\n[train]\nbatch_size = 1\nsteps = 20\nclip = 0\nprecision = {precision:?}\n\
         [optimizer]\nlearning_rate = 1e-3\nschedule = \"constant\"\n[validation]\nevery = 0\n\
         [checkpoint]\nfolder = {:?}\nevery = 0\nexport = false\n[log]\nevery = 1\n",
        fixtures().join("families").join(family),
        TEXT.len() - 1,
        dir.join("run")
    );
    let keys: Vec<_> = keys.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    read_settings("test.toml", &toml, &keys).unwrap_or_else(|e| panic!("{e}"))
}

/// Families whose gradients may be too large for f16 at any scale.
const MOST_TOO_LARGE: usize = 14;

/// The largest difference of two trajectories.
pub(crate) fn apart(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// Every family stays as near to the trajectory in f64 as torch does in the same precision: twice torch's distance, or
/// `floor` of what the loss falls, which is what other roundings may come to over 20 steps.
fn stays_beside_torch(precision: &str, floor: f64, of_torch: impl Fn(&Trajectory) -> &[f64]) {
    let (mut failed, mut too_large) = (Vec::new(), Vec::new());
    for (family, trajectory) in trajectories() {
        let dir = tempfile::tempdir().expect("is made");
        let ran = run(&family_settings(dir.path(), &family, precision, &[]));
        ran.end.as_ref().unwrap_or_else(|e| panic!("{family}: {e}"));
        // The one sequence is every batch, so steps whose update is refused, as f16 has them until the loss scale fits, change
        // nothing but how far the run comes.
        let losses = ran.losses_of_updates();
        if losses.is_empty() {
            // Some of these models have gradients that f16 cannot hold at any scale, which is no reason to go on with them.
            std::fs::remove_dir_all(dir.path().join("run")).expect("is there");
            let norm = run(&family_settings(dir.path(), &family, "f32", &[])).first_norm();
            assert!(precision == "f16" && norm > 65504.0, "{family}: no updates, and a gradient of norm {norm}");
            println!("{family}: not compared, its gradient of norm {norm:.1e} does not fit f16");
            too_large.push(family);
            continue;
        }
        let exact = &trajectory.f64[..losses.len()];
        let ours = apart(&losses, exact);
        let theirs = apart(&of_torch(&trajectory)[..losses.len()], exact);
        println!("{family}: {ours:.1e} from f64, torch {theirs:.1e}");
        let fall = exact[0] - exact[exact.len() - 1];
        if ours > (2.0 * theirs).max(floor * fall) {
            failed.push(format!("{family}: {ours:.1e} from f64, torch {theirs:.1e}"));
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
    assert!(too_large.len() <= MOST_TOO_LARGE, "not compared: {too_large:?}");
}

#[test]
fn twenty_steps_of_every_family_in_f32_are_those_of_torch() {
    stays_beside_torch("f32", 1e-5, |t| &t.f32);
}

#[test]
fn and_in_bf16_with_f32_masters() {
    // AdamW's first step is the sign of the gradient, and experts are chosen: roundings to bf16 change some of both.
    stays_beside_torch("bf16", 0.2, |t| &t.bf16);
}

#[test]
fn and_in_f16_with_a_scaled_loss() {
    // As many bits as bf16 and three more, in the same 16.
    stays_beside_torch("f16", 0.2, |t| &t.bf16);
}
