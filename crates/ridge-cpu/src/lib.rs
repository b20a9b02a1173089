//! The CPU backend: kernels, thread pool and loopback collectives.
