//! `ridge classify`: image classification.

use std::path::{Path, PathBuf};

use clap::Args;
use ridge::LoadedNetwork;
use ridge_engine::Classifier;
use ridge_image::{Image, Preprocessing};
use ridge_models::{ModelFiles, Network};
use serde_json::{Value, json};

use crate::args::{DeviceArgs, MAX_COUNT, NumberArgs, whole};
use crate::error::{Result, refused};
use crate::input;
use crate::output::{LoadProgress, columns, print, print_json};

/// Classify images (ViT)
///
/// Images are PNG or JPEG files. They are resized and normalised as the model's preprocessor_config.json says.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge classify --model DIR photo.jpg         most likely classes
  ridge classify --model DIR --top 1 *.png     most likely class of each image
  ridge classify --model DIR --json photo.jpg  one JSON object

Exit codes: 0 done, 1 failed, 2 usage error.")]
pub(crate) struct ClassifyArgs {
    /// PNG or JPEG files
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<PathBuf>,

    /// Model: a folder in the Hugging Face layout, or the ORG/NAME of a model downloaded with `ridge pull`
    #[arg(short, long, value_name = "MODEL")]
    model: PathBuf,

    /// Use random weights
    #[arg(long)]
    random_weights: bool,

    /// Maximum images of a step
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MAX_COUNT>,
        allow_negative_numbers = true, default_value_t = 32, help_heading = "Running"
    )]
    batch: usize,

    #[command(flatten)]
    place: DeviceArgs,

    #[command(flatten)]
    numbers: NumberArgs,

    /// Show the N most likely classes
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MAX_COUNT>,
        allow_negative_numbers = true, default_value_t = 5, help_heading = "Output"
    )]
    top: usize,

    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,
}

pub(crate) fn run(args: ClassifyArgs) -> Result<()> {
    let settings = args.numbers.settings(Some(args.model.clone()))?;
    let files = ModelFiles::open(Some(&args.model))?;
    let preprocessing = files.image_preprocessing();
    let (placement, mut progress) = (args.place.placement(), LoadProgress::new(false));
    let config = files.network_config()?;
    let LoadedNetwork { session, network } =
        ridge::load_network(&files, &config, &settings.numbers, &placement, args.random_weights, &mut progress)?;
    let Network::ImageClassifier(classifier) = &network else {
        let why = format!("is of the family {}, which does not classify images", network.module().family);
        return Err(refused("--model", &files, &why));
    };
    let preprocessing = preprocessing?;
    let running = Classifier::new(&session, classifier, args.batch)?;
    let mut shown = Vec::new();
    for batch in args.images.chunks(args.batch) {
        let pixels = batch.iter().map(|path| prepared(path, &preprocessing, classifier.size));
        let pixels = pixels.collect::<Result<Vec<_>>>()?;
        for (path, probabilities) in batch.iter().zip(running.classify(&pixels)?) {
            let most_likely = most_likely(&probabilities, args.top);
            if args.json {
                shown.push(object(path, &most_likely, &classifier.labels));
            } else {
                print(&table(path, &most_likely, &classifier.labels))?;
            }
        }
    }
    if args.json {
        return print_json(&json!({ "model": files.to_string(), "images": shown }));
    }
    Ok(())
}

/// The preprocessed pixels of the image at `path`.
fn prepared(path: &Path, preprocessing: &Preprocessing, size: [usize; 2]) -> Result<Vec<f32>> {
    let image = Image::decode(&path.display().to_string(), &input::bytes(path)?)?;
    let made = preprocessing.size.map_or([image.height, image.width], |(size, _)| size);
    if made != size {
        let why = format!(
            "has {} x {} pixels after preprocessing, and the model takes {} x {}",
            made[0], made[1], size[0], size[1]
        );
        return Err(refused("IMAGE", path.display(), &why));
    }
    Ok(preprocessing.apply(&image))
}

/// The `most` most likely classes with their probabilities, the most likely first.
fn most_likely(probabilities: &[f64], most: usize) -> Vec<(usize, f64)> {
    let mut classes: Vec<(usize, f64)> = probabilities.iter().copied().enumerate().collect();
    classes.sort_by(|(a, p), (b, q)| q.total_cmp(p).then(a.cmp(b)));
    classes.truncate(most);
    classes
}

fn table(path: &Path, most_likely: &[(usize, f64)], labels: &[String]) -> String {
    let rows: Vec<Vec<String>> =
        most_likely.iter().map(|(class, p)| vec![format!("  {p:.4}"), labels[*class].clone()]).collect();
    format!("{}\n{}", path.display(), columns(&rows))
}

fn object(path: &Path, most_likely: &[(usize, f64)], labels: &[String]) -> Value {
    let class = |(class, p): &(usize, f64)| json!({ "class": class, "label": labels[*class], "probability": p });
    json!({ "image": path.display().to_string(), "classes": most_likely.iter().map(class).collect::<Vec<_>>() })
}
