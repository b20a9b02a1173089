//! Integration tests of `ridge-plan`, one module per subject.

mod accuracy;
mod search;
mod serve;
