//! What a GPU kernel can reach by its shape alone: [`occupancy`] of a multiprocessor, sectors and banks of an [`access`].

pub mod access;
pub mod occupancy;
