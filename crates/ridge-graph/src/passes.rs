//! Rewrites of a graph that keep its meaning. Each works once per distinct function.
//!
//! The order in which a run applies them is `ridge-runtime`'s compile pipeline: [`prune`] to the outputs asked for,
//! [`tidy`], [`take_rows_early`], [`group_linears`] and [`group_norm_gradients`], then [`claim`] by the backend's kernels and [`decompose`] of what none claimed until no
//! composite is left, then [`fuse`] and, where the backend's groups take views, [`fuse_views`].

mod activations;
mod claim;
mod decompose;
mod dropout;
mod early_rows;
mod early_writes;
mod fetch;
mod fp8;
mod fuse;
mod fuse_views;
mod layer_weights;
mod linears;
mod norms;
mod offer;
mod offload;
mod order;
mod pattern;
mod precision;
pub(crate) mod respecialise;
mod retype;
mod routing;
mod tidy;
mod vmap;

pub use activations::{Activations, round_activations};
pub use claim::claim;
pub use decompose::decompose;
pub use dropout::{DropoutPlaces, with_dropout};
pub use early_rows::take_rows_early;
pub use early_writes::write_early;
pub use fetch::{HostTraffic, HostWeight, fetch_weights, host_traffic, host_weights, is_read_by_group};
pub use fp8::{FP8_AMAX, with_fp8};
pub use fuse::fuse;
pub use fuse_views::fuse_views;
pub use layer_weights::layer_weights;
pub use linears::group_linears;
pub use norms::group_norm_gradients;
pub use offer::{Extents, Kernel, Layout, Numerics, Offer, OfferFn, OfferRequest, Target};
pub use offload::offload;
pub use pattern::Pattern;
pub use precision::{OpPrecision, op_precisions};
pub use retype::retype;
pub use routing::{Dispatch, EXPERT_DROPPED, EXPERT_LOAD, RoutedLayer, RoutingTerms, routed_layers, with_routing};
pub use tidy::{prune, tidy};
pub use vmap::vmap;
