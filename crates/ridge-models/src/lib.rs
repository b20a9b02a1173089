//! Model families as graphs, and the reading of published checkpoints.
