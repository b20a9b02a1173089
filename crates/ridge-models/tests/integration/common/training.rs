//! The batch and the settings of `fixtures/training.py`.

use ridge_graph::{Bindings, DType, Tensor};

use super::{Expected, SHUFFLED, Sequence, step};

pub(crate) const STEPS: usize = 20;
const LR: f64 = 1e-2;

/// The batch of the fixture as one ragged step of two new sequences.
pub(crate) struct TrainingBatch {
    pub(crate) inputs: Vec<(String, Tensor)>,
    pub(crate) bindings: Bindings,
}

impl TrainingBatch {
    pub(crate) fn new(expected: &Expected) -> Self {
        let lengths = expected.tokens("seq_lens");
        let tokens = expected.tokens("tokens");
        let (first, second) = tokens.split_at(lengths[0] as usize);
        let mut sequences = [Sequence::new(first, &SHUFFLED[0]), Sequence::new(second, &SHUFFLED[1])];
        let (mut inputs, bindings) = step(&mut sequences, &[first.len(), second.len()]);
        let targets = Tensor::int(DType::I32, &[tokens.len()], expected.tokens("targets"));
        inputs.push(("targets".into(), targets));
        inputs.push(("lr".into(), scalar(LR)));
        Self { inputs, bindings }
    }

    /// The inputs of step `count`, counted from 1.
    pub(crate) fn at(&self, count: usize) -> Vec<(String, Tensor)> {
        let mut inputs = self.inputs.clone();
        inputs.push(("step".into(), scalar(count as f64)));
        inputs
    }
}

fn scalar(value: f64) -> Tensor {
    Tensor::float(DType::F32, &[], vec![value])
}
