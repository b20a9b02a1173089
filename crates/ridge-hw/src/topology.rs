//! Which logical CPUs sit together (cores, sockets and NUMA nodes, as sysfs states them), and which GPUs and network cards
//! do (the matrix of `nvidia-smi topo -m`).

mod matrix;
mod nodes;

pub use matrix::{Matrix, MatrixGpu, MatrixNic, PathType};
pub use nodes::{NumaNode, cores, numa_nodes};
pub(crate) use nodes::{core_counts, parse_cpu_list};
