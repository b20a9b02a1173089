//! Checks and chores of the repository, run as `cargo xtask`.

fn main() {}
