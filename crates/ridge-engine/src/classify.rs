//! Image classification: batches of images to class probabilities.

use ridge_graph::{Bindings, DType, Tensor};
use ridge_models::{ImageClassifier, symbols};
use ridge_runtime::{Compiled, Session};

use crate::error::{EngineError, Result};

/// Runs one classifier over images.
pub struct Classifier {
    compiled: Compiled,
    /// Channels, height and width of an image.
    shape: [usize; 3],
    /// Images of a step at most.
    images: usize,
}

impl Classifier {
    /// For a classifier, whose weights `session` has; a step takes `images` images at most.
    ///
    /// # Errors
    /// When the device cannot run the model, or `images` is 0.
    pub fn new(session: &Session, classifier: &ImageClassifier, images: usize) -> Result<Self> {
        if images == 0 {
            return Err(EngineError::Setting { name: "images", value: "0".into(), why: "must be at least 1".into() });
        }
        let [height, width] = classifier.size;
        let compiled = session.compile(&classifier.graph, &["logits"])?;
        Ok(Self { compiled, shape: [classifier.channels, height, width], images })
    }

    /// For each image, `[channels, height, width]` row by row, the probabilities of the classes.
    ///
    /// # Errors
    /// When an image has not as many numbers as the classifier takes, before anything runs; when the device fails, or a
    /// logit is not finite.
    pub fn classify(&self, images: &[Vec<f32>]) -> Result<Vec<Vec<f64>>> {
        let of_image: usize = self.shape.iter().product();
        if let Some(image) = images.iter().find(|image| image.len() != of_image) {
            let [channels, height, width] = self.shape;
            let why = format!("must be {of_image}: {channels} channels of {height} x {width}");
            return Err(EngineError::Setting { name: "numbers of an image", value: image.len().to_string(), why });
        }
        let mut probabilities = Vec::with_capacity(images.len());
        for batch in images.chunks(self.images) {
            let mut bucket = self.compiled.bucket(&Bindings::new().with(symbols::IMAGES, batch.len()))?;
            let shape = [&[batch.len()], &self.shape[..]].concat();
            let values = batch.iter().flatten().map(|value| f64::from(*value)).collect();
            bucket.set("pixel_values", &Tensor::float(DType::F32, &shape, values))?;
            bucket.submit()?;
            bucket.wait()?;
            let logits = bucket.tensor("logits")?;
            for row in logits.floats().chunks(logits.shape[1].max(1)) {
                if !row.iter().all(|logit| logit.is_finite()) {
                    return Err(EngineError::NotFinite { position: probabilities.len() });
                }
                probabilities.push(softmax(row));
            }
        }
        Ok(probabilities)
    }
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f64::MIN, f64::max);
    let weights: Vec<f64> = logits.iter().map(|logit| (logit - largest).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}
