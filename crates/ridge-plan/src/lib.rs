//! What a model needs and takes on given hardware: memory, time, communication and money, before a dollar is spent.
//!
//! Nothing here runs anything. `reading` walks a model's graph once and keeps, for each kind of layer, coefficients of
//! tokens, pairs and degrees of parallelism; everything else is sums of those. Read in this order: [`reading`],
//! [`ledger`] (memory), [`efficiency`] (what devices reach), [`comm`] (collectives), [`pipeline`] (schedules, event by
//! event), [`train`] (time of a step, cost of a run), [`search`] (all ways to divide a step), [`serve`] (latencies and
//! throughput of a server). [`kernel`] stands alone: what the shape of one GPU kernel allows. [`plot`] draws.
//! [`topology`] places ranks on the links of a given machine, [`diagnose`] says what a recorded trace waited for.

pub mod accuracy;
pub mod comm;
pub mod diagnose;
pub mod efficiency;
mod error;
pub mod kernel;
pub mod ledger;
pub mod pipeline;
pub mod plot;
pub mod reading;
pub mod search;
pub mod serve;
pub mod topology;
pub mod train;

pub use error::PlanError;

/// The worked problems with code, run as documentation tests.
#[cfg(doctest)]
mod worked {
    #[doc = include_str!("../../../docs/worked/decode-bound-by-arithmetic.md")]
    struct Decode;
    #[doc = include_str!("../../../docs/worked/dit-xl-at-256-requests.md")]
    struct DitXl;
    #[doc = include_str!("../../../docs/worked/failures-at-16k-gpus.md")]
    struct Failures;
    #[doc = include_str!("../../../docs/worked/image-tokens-for-16-users.md")]
    struct ImageTokens;
    #[doc = include_str!("../../../docs/worked/lora-for-a-70b.md")]
    struct Lora;
    #[doc = include_str!("../../../docs/worked/speculation.md")]
    struct Speculation;
    #[doc = include_str!("../../../docs/worked/zero3-for-13b-on-8-gpus.md")]
    struct Zero3;
}
