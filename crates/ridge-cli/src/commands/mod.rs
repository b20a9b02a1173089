//! The commands, each with its arguments: one file, or a folder where it is longer. No command uses another.

pub(crate) mod bench;
pub(crate) mod chat;
pub(crate) mod classify;
pub(crate) mod convert;
pub(crate) mod data;
pub(crate) mod doctor;
pub(crate) mod embed;
pub(crate) mod eval;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod launch;
pub(crate) mod plan;
pub(crate) mod pull;
pub(crate) mod quantize;
pub(crate) mod serve;
pub(crate) mod shell;
pub(crate) mod tokenize;
pub(crate) mod train;
