//! `ridge launch`: runs a command as several ranks, one process each.

use std::ffi::OsString;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::{BufRead as _, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use ridge::{Transport, variables};

use crate::args::whole;
use crate::error::{Error, Result, refused};
use crate::output::note;

/// Run a command as several ranks, one process each
///
/// Every rank runs the command after `--`, whose --tp shards the model; only the first rank prints. When a rank is lost, the
/// others report it and exit.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge launch -n 2 -- generate --tp 2 --greedy
  ridge launch -n 4 --transport tcp -- generate --tp 4 --model DIR \"A prompt\"
  ridge launch -n 2 -- generate --tp 2 --device cuda --model DIR \"A prompt\"

On two machines, with the same secret in RIDGE_TOKEN, for node 0 and node 1:
  ridge launch -n 1 --nodes 2 --node 0 --meet HOST:29500 -- generate --tp 2
  ridge launch -n 1 --nodes 2 --node 1 --meet HOST:29500 -- generate --tp 2

With --device cuda, each rank of a machine uses one GPU, in order, and ranks communicate over NCCL.

The environment of each rank has RIDGE_RANK, RIDGE_RANKS, RIDGE_LOCAL_RANK, RIDGE_MEET, RIDGE_TOKEN and RIDGE_TRANSPORT; \
another launcher can set them instead.")]
pub(crate) struct LaunchArgs {
    /// Ranks on this machine
    #[arg(short = 'n', long, value_name = "N", value_parser = whole::<usize, 1, 64>, allow_negative_numbers = true)]
    ranks: usize,

    /// How ranks communicate [default: shm on one machine, else tcp]
    #[arg(long, value_enum)]
    transport: Option<TransportArg>,

    /// Number of machines, each with --ranks ranks
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, 1024>,
        allow_negative_numbers = true, default_value_t = 1, requires = "meet"
    )]
    nodes: usize,

    /// Index of this machine, from 0
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 0, 1023>,
        allow_negative_numbers = true, default_value_t = 0
    )]
    node: usize,

    /// Rendezvous address: host and port of machine 0 [default: a free port of this machine]
    #[arg(long, value_name = "HOST:PORT")]
    meet: Option<String>,

    /// Timeout of a collective in seconds [default: 600]
    #[arg(long, value_name = "SECONDS", value_parser = whole::<usize, 1, 1_000_000>, allow_negative_numbers = true)]
    patience: Option<usize>,

    /// The command: `generate` and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Values of `--transport`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TransportArg {
    /// Shared memory, on one machine
    Shm,
    /// TCP
    Tcp,
}

/// Commands that support multi-process ranks.
const COMMANDS: [&str; 1] = ["generate"];

/// Time for ranks to exit by themselves after one has failed.
const GRACE: Duration = Duration::from_secs(10);

pub(crate) fn run(args: &LaunchArgs) -> Result<()> {
    let name = args.command.first().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    if !COMMANDS.contains(&name.as_str()) {
        return Err(refused("COMMAND", name, &format!("does not support ranks; supported: {}", COMMANDS.join(", "))));
    }
    if args.node >= args.nodes {
        return Err(refused("--node", args.node, &format!("must be below --nodes {}", args.nodes)));
    }
    let transport = match args.transport {
        Some(TransportArg::Shm) if args.nodes > 1 => {
            return Err(refused("--transport", "shm", "works on one machine only; use tcp for several"));
        }
        Some(TransportArg::Tcp) => Transport::Tcp,
        None if args.nodes > 1 => Transport::Tcp,
        Some(TransportArg::Shm) | None => Transport::SharedMemory,
    };
    let token = match std::env::var(variables::TOKEN) {
        Ok(token) if !token.is_empty() => token,
        _ if args.nodes > 1 => {
            let why = "must be set to the same secret on all machines";
            return Err(refused(variables::TOKEN, "", why));
        }
        _ => (0..2).map(|_| format!("{:016x}", RandomState::new().build_hasher().finish())).collect(),
    };
    let meet = match &args.meet {
        Some(meet) => meet.clone(),
        None => free_address()?,
    };
    let program = std::env::current_exe().map_err(|cause| Error::Launch { program: "ridge".into(), cause })?;
    let mut ranks = Ranks(Vec::with_capacity(args.ranks));
    for local in 0..args.ranks {
        let rank = args.node * args.ranks + local;
        let mut command = Command::new(&program);
        command.args(&args.command);
        command.env(variables::RANK, rank.to_string()).env(variables::RANKS, (args.ranks * args.nodes).to_string());
        command.env(variables::LOCAL_RANK, local.to_string());
        command.env(variables::MEET, &meet).env(variables::TOKEN, &token).env(variables::TRANSPORT, transport.name());
        if let Some(patience) = args.patience {
            command.env(variables::PATIENCE, patience.to_string());
        }
        if rank > 0 {
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        }
        let started = command.spawn();
        let mut child = started.map_err(|cause| Error::Launch { program: program.display().to_string(), cause })?;
        if let Some(said) = child.stderr.take() {
            pass_on(rank, said)?;
        }
        ranks.0.push((rank, child));
    }
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::flag::register(signal, Arc::clone(&ended)).map_err(Error::Signal)?;
    }
    ranks.wait(&ended)
}

/// A free local address.
fn free_address() -> Result<String> {
    let address = TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
    address
        .map(|address| address.to_string())
        .map_err(|cause| Error::Ranks { why: format!("no port is free: {cause}") })
}

/// Prints a rank's output with its number.
fn pass_on(rank: usize, said: impl Read + Send + 'static) -> Result<()> {
    let lines = move || {
        for line in BufReader::new(said).lines().map_while(Result::ok) {
            note(&format!("rank {rank}: {line}"));
        }
    };
    let started = std::thread::Builder::new().name(format!("rank-{rank}")).spawn(lines);
    started.map(drop).map_err(|cause| Error::Ranks { why: format!("cannot start a thread: {cause}") })
}

/// The ranks of this machine. Processes that still run when it is dropped are killed.
struct Ranks(Vec<(usize, Child)>);

impl Ranks {
    /// Waits until all ranks have exited or the launch is interrupted. After one has failed, the others get a grace period.
    fn wait(mut self, interrupted: &AtomicBool) -> Result<()> {
        let mut failed: Option<(usize, ExitStatus, Instant)> = None;
        let mut running: Vec<usize> = (0..self.0.len()).collect();
        while !running.is_empty() {
            let mut ended = None;
            for (at, index) in running.iter().enumerate() {
                let (rank, child) = &mut self.0[*index];
                let status = child.try_wait().map_err(|cause| Error::Ranks { why: format!("rank {rank}: {cause}") })?;
                if let Some(status) = status {
                    ended = Some((at, *rank, status));
                    break;
                }
            }
            match ended {
                Some((at, rank, status)) => {
                    running.swap_remove(at);
                    if !status.success() && failed.is_none() {
                        failed = Some((rank, status, Instant::now()));
                    }
                }
                None => std::thread::sleep(Duration::from_millis(10)),
            }
            if interrupted.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            if failed.as_ref().is_some_and(|(_, _, at)| at.elapsed() > GRACE) {
                break;
            }
        }
        // Another thread prints its remaining output.
        std::thread::sleep(Duration::from_millis(20));
        match failed {
            None => Ok(()),
            Some((rank, status, _)) => Err(Error::Ranks { why: format!("rank {rank} exited first, with {status}") }),
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for (_, child) in &mut self.0 {
            if matches!(child.try_wait(), Ok(None)) {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}
