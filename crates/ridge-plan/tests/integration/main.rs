//! Integration tests of `ridge-plan`, one module per subject.

mod accuracy;
mod own;
mod search;
mod serve;
mod stored;
