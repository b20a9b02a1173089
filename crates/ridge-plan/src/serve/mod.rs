//! Latencies and throughput of a server.
