//! What the kernels of attention claim: attention with what is done to q on the way, and with each further input.

use ridge_graph::Function;
use ridge_graph::ops::PagedAttention;
use ridge_graph::passes::Numerics;

use super::latent_queries::{self, LatentQueries};
use super::one_order::has_one_order;
use super::{MOST, make};
use crate::kernel::composite;
use crate::kernels::entry::CudaKernelEntry;

pub(in crate::kernels) fn entries() -> Vec<CudaKernelEntry> {
    let queries = [
        ("attention", "q", 1),
        ("rope_attention", "rope(q, positions)", 2),
        ("norm_rope_attention", "rope(rms_norm(q, w), positions)", 3),
    ];
    let mut entries = Vec::new();
    for (name, q) in latent_queries::patterns() {
        let pattern = format!("attention({q}, kv, block_table, seq_ids, positions)");
        let of_latents =
            |body: &Function| LatentQueries::are_in(body) && supports(body, latent_queries::INPUTS, [false; 2]);
        let entry = CudaKernelEntry::new(name, &pattern, of_latents, make);
        entries.push(entry.where_it_pays(LatentQueries::are_few).numerics_by_extents());
    }
    for (codes, scales) in [("", ""), ("_codes", ", scales")] {
        for (of_sinks, sinks) in [("", ""), ("_sinks", ", cast(sinks)?")] {
            for (of_prompts, prompts) in [("", ""), ("_prompts", ", prompt_lengths")] {
                for (query, q, kv) in queries {
                    let pattern =
                        format!("attention({q}, kv, block_table, seq_ids, positions{scales}{sinks}{prompts})");
                    let has = [!sinks.is_empty(), !prompts.is_empty()];
                    let entry =
                        CudaKernelEntry::new(format!("{query}{codes}{of_sinks}{of_prompts}"), &pattern, |_| true, make);
                    entries.push(entry.offering(move |request| {
                        let supported = supports(request.body, kv, has)
                            && (!request.target.deterministic || has_one_order(request.body, kv));
                        // Contexts are cut into a number of spans that the bucket's extents give.
                        let numerics = match request.target.deterministic {
                            true => Numerics::Class("attention".into()),
                            false => Numerics::ByExtents,
                        };
                        supported.then(|| request.at_efficiency(1.0, 1.0, numerics))
                    }));
                }
            }
        }
    }
    entries
}

/// What a block holds of its heads fits into shared memory; `sinks` and `prompts` say whether there are such, behind the scales.
fn supports(body: &Function, kv: usize, [sinks, prompts]: [bool; 2]) -> bool {
    // Chunks have no kernel yet, nor have slopes, which are a further input.
    let takes = |op: &PagedAttention| !op.chunked && !op.slopes && op.sinks == sinks && op.prompt_lengths == prompts;
    let plain = composite::<PagedAttention>(body).is_some_and(takes);
    let kv = &body.args[kv].ty.shape.0;
    plain
        && kv[2].as_const().is_some_and(|heads| heads > 0)
        && kv[4].as_const().is_some_and(|dim| (1..=MOST).contains(&dim))
}
