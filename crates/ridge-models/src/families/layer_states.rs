//! What a layer keeps between steps.

use ridge_graph::{Builder, DType, Result as GraphResult, Var};

use crate::model::{BuildOptions, KV, StepInputs, block_table, cache_states, kv_bytes};
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

/// One more paged cache of a layer, besides keys and values, in the same blocks as those of layers without a window.
#[derive(Clone, Debug)]
pub(crate) struct PagedTensor {
    /// Its name within the layer, such as `self_attn.index_keys`.
    pub(super) name: &'static str,
    /// Sides, heads and their width.
    pub(super) shape: [usize; 3],
}

/// What a layer keeps between steps.
#[derive(Clone, Debug)]
pub(crate) struct LayerStates {
    /// Has it keys and values in a paged cache?
    pub(super) paged: bool,
    /// Other paged caches.
    pub(super) caches: Vec<PagedTensor>,
    /// Tensors of a fixed size.
    pub(super) fixed: Vec<FixedTensor>,
}

impl LayerStates {
    /// Keys and values of attention.
    pub(super) fn paged() -> Self {
        Self { paged: true, caches: Vec::new(), fixed: Vec::new() }
    }

    /// Nothing.
    pub(super) fn none() -> Self {
        Self { paged: false, caches: Vec::new(), fixed: Vec::new() }
    }

    /// A further paged cache.
    pub(super) fn with_cache(mut self, name: &'static str, shape: [usize; 3]) -> Self {
        self.caches.push(PagedTensor { name, shape });
        self
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
        self.caches.extend(others.caches);
        self.fixed.extend(others.fixed);
        self
    }

    /// Adds the further caches of a layer of scope `scope` to their group.
    pub(super) fn add_caches_to(&self, group: &mut StateGroup, scope: &str, options: &BuildOptions) {
        for cache in &self.caches {
            group.states.extend(cache_states(&format!("{scope}.{}", cache.name), options));
            group.bytes_per_token += kv_bytes(cache.shape, options);
        }
    }

    /// Adds the tensors of a layer of scope `scope` to the group of fixed-size states.
    pub(super) fn add_to(&self, group: &mut StateGroup, scope: &str) {
        for tensor in &self.fixed {
            group.states.push(format!("{scope}.{}", tensor.name));
            group.bytes_per_sequence += tensor.width * tensor.dtype.size_bytes();
        }
    }
}

/// The states of a decoder's layers in groups, as layers are added to them.
pub(super) struct LayerGroups<'a> {
    options: &'a BuildOptions,
    step: &'a StepInputs,
    /// Of groups without a window: the slots of the step's tokens in their blocks, i32 `[tokens]`.
    slots: Var,
    /// Keys and values, a group for each window, with the slots of the step's tokens in its blocks.
    paged: Vec<(StateGroup, Var)>,
    /// Other paged caches, and states of a fixed size.
    further: StateGroup,
    fixed: StateGroup,
}

impl<'a> LayerGroups<'a> {
    /// No groups yet.
    pub(super) fn new(options: &'a BuildOptions, step: &'a StepInputs, slots: Var) -> Self {
        Self { options, step, slots, paged: Vec::new(), further: empty_group(), fixed: empty_group() }
    }

    /// Adds the states of a layer with this window, whose scope and whose attention's are `scopes` and whose cache has `shape`.
    /// Gives the slots of the step's tokens in its cache, i32 `[tokens]`.
    pub(super) fn add(
        &mut self,
        g: &mut Builder,
        [scope, attention]: [&str; 2],
        states: &LayerStates,
        window: Option<usize>,
        shape: [usize; 3],
    ) -> GraphResult<Var> {
        states.add_caches_to(&mut self.further, scope, self.options);
        states.add_to(&mut self.fixed, scope);
        if !states.paged {
            return Ok(self.slots);
        }
        let at = self.paged.iter().position(|(group, _)| group.window == window).unwrap_or(self.paged.len());
        if at == self.paged.len() {
            let slots = match window {
                None => self.slots,
                Some(_) => {
                    let (step, table) = (self.step, block_table(g, window)?);
                    g.token_layout(step.seq_ids, step.query_start, step.lengths, table, self.options.block_size)?.1
                }
            };
            self.paged.push((StateGroup { window, heads: shape[1], ..empty_group() }, slots));
        }
        let (group, slots) = &mut self.paged[at];
        group.states.extend(cache_states(&format!("{scope}.{attention}.{KV}"), self.options));
        group.bytes_per_token += kv_bytes(shape, self.options);
        Ok(*slots)
    }

    /// The groups that have states.
    pub(super) fn into_groups(self) -> Vec<StateGroup> {
        let others = [self.further, self.fixed].into_iter().filter(|group| !group.states.is_empty());
        self.paged.into_iter().map(|(group, _)| group).chain(others).collect()
    }
}

/// A group of states without any.
pub(super) fn empty_group() -> StateGroup {
    StateGroup { states: Vec::new(), bytes_per_token: 0, bytes_per_sequence: 0, window: None, heads: 1 }
}

/// Names of the states within a mixer.
pub(super) const CONV_STATE: &str = "conv_state";
pub(super) const RECURRENT_STATE: &str = "recurrent_state";
