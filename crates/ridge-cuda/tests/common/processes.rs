//! Tests whose ranks are processes: the test starts itself again as every rank.
#![allow(dead_code, unreachable_pub)] // each test binary uses its part

use std::process::{Child, Command, Stdio};

use ridge_comm::JoinSettings;
use ridge_comm::variables::{MEET, RANK, RANKS, TRANSPORT};
use ridge_cuda::{Cuda, CudaOptions};

/// Which case a rank is to run.
const CASE: &str = "RIDGE_TEST_CASE";
/// The GPU that a rank is to use.
const GPU: &str = "RIDGE_TEST_GPU";

/// What a process that was started as a rank is to do: the case, its settings, and its GPU if it has one.
pub fn rank() -> Option<(String, JoinSettings, usize)> {
    let case = std::env::var(CASE).ok()?;
    let gpu = std::env::var(GPU).map_or(0, |gpu| gpu.parse().expect("a number"));
    Some((case, JoinSettings::from_environment().expect("makes sense")?, gpu))
}

/// Starts `test` as each of `ranks` ranks, with what `more` adds to their environment.
pub fn start(test: &str, case: &str, ranks: usize, more: impl Fn(usize, &mut Command)) -> Vec<Child> {
    let meet = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port is free");
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().expect("is known"));
        command.args([test, "--exact", "--nocapture"]).env(CASE, case);
        command.env(RANK, rank.to_string()).env(RANKS, ranks.to_string());
        command.env(MEET, meet.to_string()).env(TRANSPORT, "shm");
        more(rank, &mut command);
        // What a rank tells of its tests is not of this process's tests.
        command.stdout(Stdio::null()).spawn().expect("starts")
    };
    (0..ranks).map(start).collect()
}

/// Gives a rank a GPU of its own.
///
/// Where there are fewer, all ranks use the first one: NCCL allows that to ranks that it takes for different hosts, which
/// communicate through sockets.
pub fn use_gpu(rank: usize, ranks: usize, command: &mut Command) {
    let several = Cuda::new(CudaOptions { ordinal: ranks - 1, ..CudaOptions::default() }).is_ok();
    command.env(GPU, if several { rank } else { 0 }.to_string());
    if !several {
        command.env("NCCL_HOSTID", format!("rank{rank}")).env("NCCL_SOCKET_IFNAME", "lo");
    }
}

/// Waits for ranks that are to succeed.
pub fn finish(test: &str, ranks: Vec<Child>) {
    for (rank, mut child) in ranks.into_iter().enumerate() {
        let status = child.wait().expect("ends");
        assert!(status.success(), "{test}: rank {rank} ended with {status}");
    }
}
