//! Matrix tiles of x86 (AMX): how operands lie in them, and the tile instructions.
//!
//! `amx/config.rs` has the sizes and the configuration, `amx/ahead.rs` what is fetched while products are computed,
//! `amx/tiles.rs` the instructions, `amx/columns.rs` rows of x as tiles of columns and sums back to rows, `amx/panels.rs`
//! weights repacked in panels, `amx/rows.rs` and `amx/few.rs` products of rows that lie anywhere (attention). Products of
//! weights stand on it: `kernels/tile_product.rs`.

mod ahead;
mod columns;
mod config;
mod few;
pub(crate) mod panels;
mod rows;
pub(crate) mod tiles;

pub(crate) use ahead::Ahead;
pub(crate) use columns::{
    ColumnLayout, Terms, elements, floats, halves, rows_together, split, takes, terms, transpose, transpose_into,
    unpack_columns,
};
pub(crate) use config::{BLOCK, COLUMNS, DEPTH, FEW, LINE, SHORT, SIDE, TileSession, Words, part, parts};
pub(crate) use few::FewQueries;
pub(crate) use rows::{TileRows, multiply_rows};
