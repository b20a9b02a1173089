//! What a layer keeps between steps.

use ridge_graph::DType;

use crate::model::BuildOptions;
use crate::module::StateGroup;

/// One tensor of a layer's state of a fixed size.
#[derive(Clone, Debug)]
pub(crate) struct FixedTensor {
    /// Its name within the layer, such as `mixer.conv_state`.
    pub(super) name: String,
    /// Its elements, of one sequence.
    pub(super) width: usize,
    /// Their dtype.
    pub(super) dtype: DType,
}

/// What a layer keeps between steps.
#[derive(Clone, Debug)]
pub(crate) struct LayerStates {
    /// Has it keys and values in a paged cache?
    pub(super) paged: bool,
    /// Tensors of a fixed size.
    pub(super) fixed: Vec<FixedTensor>,
}

impl LayerStates {
    /// Keys and values of attention.
    pub(super) fn paged() -> Self {
        Self { paged: true, fixed: Vec::new() }
    }

    /// Nothing.
    pub(super) fn none() -> Self {
        Self { paged: false, fixed: Vec::new() }
    }

    /// The last inputs of a convolution, in scope `scope` of the layer.
    pub(super) fn with_conv(mut self, scope: &str, channels: usize, taps: usize, options: &BuildOptions) -> Self {
        let name = format!("{scope}.{CONV_STATE}");
        self.fixed.push(FixedTensor { name, width: channels * (taps - 1), dtype: options.activations });
        self
    }

    /// The matrices of a recurrence's heads, in scope `scope` of the layer.
    pub(super) fn with_recurrence(mut self, scope: &str, [heads, key, value]: [usize; 3]) -> Self {
        let name = format!("{scope}.{RECURRENT_STATE}");
        self.fixed.push(FixedTensor { name, width: heads * key * value, dtype: DType::F32 });
        self
    }

    /// These and those of `others`.
    pub(super) fn and(mut self, others: Self) -> Self {
        self.paged |= others.paged;
        self.fixed.extend(others.fixed);
        self
    }

    /// Adds the tensors of a layer of scope `scope` to the group of fixed-size states.
    pub(super) fn add_to(&self, group: &mut StateGroup, scope: &str) {
        for tensor in &self.fixed {
            group.states.push(format!("{scope}.{}", tensor.name));
            group.bytes_per_sequence += tensor.width * tensor.dtype.size_bytes();
        }
    }
}

/// A group of states without any.
pub(super) fn empty_group() -> StateGroup {
    StateGroup { states: Vec::new(), bytes_per_token: 0, bytes_per_sequence: 0, window: None, heads: 1 }
}

/// Names of the states within a mixer.
pub(super) const CONV_STATE: &str = "conv_state";
pub(super) const RECURRENT_STATE: &str = "recurrent_state";
