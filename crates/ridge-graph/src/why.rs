//! Why an op or a storage format refuses what it is given.

/// What is wrong with an op's inputs or a format's shape, and what would be right. Whoever reports it adds op, types and
/// scope, see [`GraphError`](crate::GraphError).
pub type Why = String;
