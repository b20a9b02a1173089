//! What one kernel can reach: [`occupancy`] of a multiprocessor and sectors and banks of an [`access`] by its shape alone,
//! and by its FLOPs and bytes the [`roofline`] of a matrix product, of attention, or of every op of a model.

pub mod access;
pub mod occupancy;
pub mod roofline;
