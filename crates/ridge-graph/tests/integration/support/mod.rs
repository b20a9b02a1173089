//! Helpers that several test modules share.

pub(crate) mod decoder;
pub(crate) mod gradients;
pub(crate) mod sharding;
