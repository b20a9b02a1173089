//! The `ridge` command.

fn main() {}
