//! The token loop: sequences, cache blocks, sampling and stopping.
