//! Integration tests of `ridge-hw`, one module per subject.

mod topology;
