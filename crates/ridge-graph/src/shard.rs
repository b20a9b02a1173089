//! Placing a graph on one axis of a device mesh. Applied once for each axis; every application gives an ordinary
//! graph for one rank, with the collectives that it needs.
//!
//! Placements of the main function's arguments are given; those of all other values follow. For each node the rules
//! of its op ([`rules`]) say on which placements it can run; the first that its inputs have already is taken, or else
//! the one that the fewest bytes of communication lead to. Propagation fills in and verifies. It never searches:
//! a better plan for the whole graph comes from placing arguments otherwise.
//!
//! Read `shard/placement.rs` for placements and rules, `shard/prim.rs` for the primitives' rules and `shard/rules.rs` for
//! those of any op, `shard/propagate.rs` for how one is chosen, `shard/convert.rs` for what brings a value from one
//! placement to another, `shard/local.rs` for shapes and attributes of one rank's share, `shard/mesh.rs` for the graph of
//! one rank, `shard/slice.rs` for cutting tensors, and `shard/gathered.rs` for parameters that data-parallel ranks gather.

mod convert;
mod gathered;
mod local;
mod mesh;
mod placement;
mod placements;
mod prim;
mod propagate;
mod reshape;
mod rules;
mod slice;

pub use gathered::{gather_again, gather_weights};
pub use local::component_place;
pub use mesh::{Sharded, shard};
pub use placement::{MeshAxis, Placement, ShardingRule, rowwise_rules};
pub use placements::placements;
pub use rules::rules;
pub use slice::{slice_for_rank, unite};
