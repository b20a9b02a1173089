//! Hand-written kernels, one file a subject, and the registry of the patterns that they claim. Their CUDA C++ is in the
//! crate's folder `kernels/`.

mod adamw;
mod adamw8;
mod adjust;
mod apart;
mod attention;
mod attention_training;
mod block_text;
mod blocks_row;
mod blocks_rows;
mod body;
mod cache_epilogue;
mod conv_recurrence;
mod convolution;
mod encode_blocks;
mod entry;
mod experts;
mod experts_few;
mod experts_row;
mod gelu;
mod grouped_linear;
mod head_products;
mod linear;
mod linear_blocks;
mod linear_cache;
mod linear_call;
mod linear_cross_entropy;
mod linear_rows;
mod linear_scaled;
mod norm;
mod norm_gradients;
mod norm_rows;
mod quantize;
mod recurrence;
mod rope;
mod sampling;
mod scaled_mlp;
mod sparse_attention;
mod tokens;
mod training;
mod wkv;

use std::sync::Arc;

use ridge_graph::passes;

use crate::kernel::{CudaKernel, CudaKernelSpec, DeviceAction};

pub(crate) use encode_blocks::{ENCODER_THREADS, block_encoder, encoded_group};
pub use entry::CudaKernelEntry;
pub(crate) use quantize::plain_rows as quantize_rows;

/// Every text of this folder.
#[cfg(test)]
pub(crate) const TEXTS: [crate::kernel::KernelText<'_>; 48] = [
    adamw::UPDATE,
    adamw8::STEP,
    adjust::ADJUST,
    attention::ATTENTION,
    attention::decode::DECODE,
    attention::LATENT,
    attention::LATENT_SM90,
    attention::PROMPT,
    attention::TILES,
    attention_training::GRADIENT_SM90,
    attention_training::TRAINING,
    blocks_row::ROW,
    blocks_rows::SEVERAL,
    conv_recurrence::CONV_RECURRENCE,
    convolution::CAUSAL,
    encode_blocks::ENCODE,
    experts::EXPERTS,
    experts::ROUTER,
    experts_few::FEW,
    experts_few::ROUTE,
    experts_row::BULK,
    experts_row::RING,
    gelu::GELU,
    grouped_linear::BLOCKS,
    grouped_linear::HOPPER_BLOCKS,
    grouped_linear::ROWS,
    grouped_linear::HOPPER,
    grouped_linear::TILES,
    head_products::HEADS,
    linear_call::AFTER,
    linear_rows::ROWS,
    linear_blocks::DECODE,
    linear_blocks::GROUPS,
    linear_blocks::ROWS,
    linear_scaled::SCALED,
    norm::NORM,
    norm_gradients::GRADIENTS,
    norm_rows::ROWS,
    quantize::QUANTIZE,
    rope::ROPE,
    rope::TABLE,
    sampling::SAMPLE,
    sparse_attention::INDEX,
    tokens::TABLE,
    tokens::TOKENS,
    training::LOSS,
    training::SUMS,
    wkv::WKV,
];

/// The kernels that may claim patterns, by name. A backend has one, to which its caller may add.
#[derive(Clone)]
pub struct CudaKernelRegistry {
    entries: Vec<CudaKernelEntry>,
    deterministic: bool,
    int8_attention: bool,
}

impl CudaKernelRegistry {
    /// The kernels of this crate.
    pub fn builtin() -> Self {
        let entries = [
            adamw::entries(),
            adamw8::entries(),
            adjust::entries(),
            attention::patterns::entries(),
            attention_training::entries(),
            conv_recurrence::entries(),
            convolution::entries(),
            experts::entries(),
            experts_few::entries(),
            experts_row::entries(),
            gelu::entries(),
            grouped_linear::entries(),
            head_products::entries(),
            linear::entries(),
            linear_blocks::entries(),
            linear_cache::entries(),
            linear_cross_entropy::entries(),
            // Of equals, what claims more.
            scaled_mlp::entries(),
            linear_scaled::entries(),
            norm::entries(),
            norm_gradients::entries(),
            norm_rows::entries(),
            quantize::entries(),
            recurrence::entries(),
            rope::entries(),
            sampling::entries(),
            sparse_attention::entries(),
            tokens::entries(),
            training::entries(),
            wkv::entries(),
        ];
        Self { entries: entries.concat(), deterministic: false, int8_attention: false }
    }

    /// The registry for a device that is to give a row the same bits whatever is computed beside it
    /// ([`CudaOptions::deterministic`](crate::CudaOptions::deterministic)): without kernels that are for some numbers of rows.
    #[must_use]
    pub fn deterministic(mut self) -> Self {
        self.entries.retain(CudaKernelEntry::always_pays);
        Self { deterministic: true, ..self }
    }

    /// Is it a [deterministic](CudaKernelRegistry::deterministic) one?
    pub(crate) fn is_deterministic(&self) -> bool {
        self.deterministic
    }

    /// The registry for a device whose attention of prompts multiplies queries and keys as int8 where the cache is int8
    /// ([`CudaOptions::int8_attention`](crate::CudaOptions::int8_attention)).
    #[must_use]
    pub fn with_int8_attention(self) -> Self {
        Self { int8_attention: true, ..self }
    }

    /// Is it one [with int8 attention](CudaKernelRegistry::with_int8_attention)?
    pub(crate) fn has_int8_attention(&self) -> bool {
        self.int8_attention
    }

    /// Adds a kernel, in place of one of that name.
    pub fn add(&mut self, entry: CudaKernelEntry) {
        self.entries.retain(|known| known.name() != entry.name());
        self.entries.push(entry);
    }

    /// What they claim on the nominal target, as [`ridge_runtime::lower`] takes it. Of kernels that are predicted to save
    /// equal time, the first claims.
    pub fn claims(&self) -> Vec<passes::Kernel> {
        let deterministic = self.deterministic;
        let nominal = Arc::new(passes::Target { fuses_views: true, deterministic, ..passes::Target::default() });
        self.entries.iter().map(|entry| entry.claim().clone().on(&nominal)).collect()
    }

    /// The same of the kernels that are for any number of rows.
    fn claims_of_any_rows(&self) -> Vec<passes::Kernel> {
        self.entries.iter().filter(|entry| entry.always_pays()).map(|entry| entry.claim().clone()).collect()
    }

    /// The kernel `name` for what it claimed.
    ///
    /// # Errors
    /// When there is none of that name, or it does not support these shapes.
    pub(crate) fn make(&self, name: &str, spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
        let entry = self.entries.iter().find(|entry| entry.name() == name);
        let entry = entry.ok_or_else(|| {
            let known: Vec<&str> = self.entries.iter().map(CudaKernelEntry::name).collect();
            format!("there is no kernel {name}; the registry has {}", known.join(", "))
        })?;
        let apart = || apart::make(&self.claims_of_any_rows(), &|name, part| self.make(name, part), spec);
        if !entry.pays(spec) {
            return apart();
        }
        let kernel = entry.make(spec)?;
        let Some(arch) = entry.arch() else { return Ok(kernel) };
        let others = apart()?;
        let scratch = kernel.scratch.max(others.scratch);
        let action = DeviceAction::ByArch { arch, actions: kernel.actions, otherwise: others.actions };
        Ok(CudaKernel { scratch, ..action.into() })
    }
}
