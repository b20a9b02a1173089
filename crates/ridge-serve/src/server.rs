//! Listening, connections, and shutdown.

use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs as _};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;
use std::time::{Duration, Instant};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpStream;
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, Semaphore};

use crate::api;
use crate::app::{App, ModelWorker, Runs, ServeOptions, ServedModel};
use crate::connection::Impatient;
use crate::embedding::EmbedWorker;
use crate::error::ServeError;
use crate::metrics::Metrics;
use crate::worker::Worker;

/// Maximum size of a request's header, in bytes.
const MAX_HEAD: usize = 64 << 10;
const MAX_HEADERS: usize = 100;
/// Threads that serve connections, separate from those that compute.
const THREADS: usize = 2;

/// The listen backlog.
const BACKLOG: i32 = 4096;

/// A bound address that is not listening yet: connections are refused.
#[derive(Debug)]
pub struct ReservedAddress {
    socket: Socket,
    given: String,
}

impl ReservedAddress {
    /// Binds `host` and `port`; port 0 selects a free one.
    ///
    /// # Errors
    /// When the address is invalid or in use.
    pub fn new(host: &str, port: u16) -> Result<Self, ServeError> {
        let given = format!("{host}:{port}");
        let fail = |cause| ServeError::Listen { address: given.clone(), cause };
        let mut outcome = Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
        for address in (host, port).to_socket_addrs().map_err(fail)? {
            outcome = bind(address);
            if outcome.is_ok() {
                break;
            }
        }
        Ok(Self { socket: outcome.map_err(fail)?, given })
    }

    /// The port.
    ///
    /// # Errors
    /// When the system does not tell.
    pub fn port(&self) -> Result<u16, ServeError> {
        let address = self.socket.local_addr().map_err(|cause| self.failed(cause))?;
        Ok(address.as_socket().map_or(0, |address| address.port()))
    }

    /// Starts to listen.
    ///
    /// # Errors
    /// When another program that had taken the same address listens there meanwhile.
    pub fn listen(self) -> Result<TcpListener, ServeError> {
        // The standard library's listener lets 128 connections wait, and a crowd that comes at once is more.
        match self.socket.listen(BACKLOG) {
            Ok(()) => Ok(self.socket.into()),
            Err(cause) => Err(self.failed(cause)),
        }
    }

    fn failed(&self, cause: io::Error) -> ServeError {
        ServeError::Listen { address: self.given.clone(), cause }
    }
}

fn bind(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // A server that is started again need not wait for its predecessor's connections to be forgotten.
    #[cfg(unix)]
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

/// Serves `model`, which `runs`, at `listeners` until SIGTERM or SIGINT. Then new requests are rejected, and running ones have
/// [`ServeOptions::drain`] to finish. A second signal exits immediately. SIGHUP reloads the key file.
///
/// # Errors
/// When the system refuses threads or signals.
pub fn serve(
    listeners: Vec<TcpListener>,
    model: ServedModel,
    runs: Runs,
    options: ServeOptions,
) -> Result<(), ServeError> {
    let metrics = Arc::new(Metrics::default());
    let most = options.max_requests;
    let (device, thread) = match runs {
        Runs::Engine(service, floor) => {
            let (worker, thread) = Worker::start(*service, floor, most, Arc::clone(&metrics))?;
            (ModelWorker::Engine(worker), thread)
        }
        Runs::Embedder(embedder) => {
            let (worker, thread) = EmbedWorker::start(*embedder, most)?;
            (ModelWorker::Embedder(worker), thread)
        }
    };
    let app = Arc::new(App::new(model, options, device, metrics));
    let runtime = Builder::new_multi_thread().worker_threads(THREADS).max_blocking_threads(16).enable_all().build()?;
    let drained = runtime.block_on(run(listeners, Arc::clone(&app)))?;
    runtime.shutdown_timeout(Duration::from_secs(1));
    // The thread ends when nothing runs and nobody can send any more; one that hangs is left to the system.
    if let ModelWorker::Engine(worker) = &app.worker {
        worker.drain();
    }
    let engine_stopped = drained && thread_ends(&thread, Duration::from_secs(5), app);
    tracing::info!(drained, engine_stopped, "shut down");
    Ok(())
}

fn thread_ends(thread: &std::thread::JoinHandle<()>, patience: Duration, app: Arc<App>) -> bool {
    drop(app);
    let until = Instant::now() + patience;
    while !thread.is_finished() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    thread.is_finished()
}

/// Accepts connections until a signal comes, then waits for them. True if all ended in time.
async fn run(listeners: Vec<TcpListener>, app: Arc<App>) -> Result<bool, ServeError> {
    let listen = |listener: TcpListener| {
        listener.set_nonblocking(true)?;
        tokio::net::TcpListener::from_std(listener)
    };
    let listeners = listeners.into_iter().map(listen).collect::<io::Result<Vec<_>>>()?;
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let router = api::router(Arc::clone(&app));
    let graceful = GracefulShutdown::new();
    // Dropped when the server begins to end.
    let (serving, ending) = tokio::sync::watch::channel(());
    let places = Arc::new(Semaphore::new(app.options.max_connections));
    let told = Arc::new(Notify::new());
    let teller = Arc::clone(&told);
    tokio::spawn(async move {
        loop {
            let term = std::pin::pin!(terminate.recv());
            let int = std::pin::pin!(interrupt.recv());
            futures_util::future::select(term, int).await;
            teller.notify_one();
        }
    });
    let mut hangup = signal(SignalKind::hangup())?;
    let of_keys = Arc::clone(&app);
    tokio::spawn(async move {
        while hangup.recv().await.is_some() {
            match of_keys.options.keys.reload() {
                Ok(keys) => tracing::info!(keys, "reloaded the API keys"),
                Err(error) => tracing::error!(%error, "cannot reload the API keys; the previous keys stay in use"),
            }
        }
    });
    loop {
        let accept = std::pin::pin!(accept(&listeners, &places));
        let signal = std::pin::pin!(told.notified());
        let (stream, place) = match futures_util::future::select(signal, accept).await {
            futures_util::future::Either::Left(_) => break,
            futures_util::future::Either::Right((accepted, _)) => accepted,
        };
        let (watcher, ending) = (graceful.watcher(), ending.clone());
        let (router, app) = (router.clone(), Arc::clone(&app));
        tokio::spawn(async move {
            // Hyper closes a connection that is to end before its first request, which may be on its way.
            match begins(&stream, ending, app.options.read_timeout).await {
                Beginning::Request => ended(watcher.watch(connection(stream, &router, &app, true)).await),
                Beginning::End => {
                    drop(watcher);
                    ended(connection(stream, &router, &app, false).await);
                }
                Beginning::Nothing => {}
            }
            drop(place);
        });
    }
    app.draining.store(true, Relaxed);
    drop(serving);
    tracing::info!(seconds = app.options.drain.as_secs(), "shutting down: waiting for running requests");
    let mut over = std::pin::pin!(graceful.shutdown());
    let limit = async {
        let end = std::pin::pin!(tokio::time::sleep(app.options.drain));
        let again = std::pin::pin!(told.notified());
        futures_util::future::select(end, again).await;
    };
    let mut limit = std::pin::pin!(limit);
    // During shutdown, new work is rejected and `/ready` returns 503.
    let refusing = async {
        loop {
            let (stream, place) = accept(&listeners, &places).await;
            let connection = connection(stream, &router, &app, false);
            tokio::spawn(async move {
                ended(connection.await);
                drop(place);
            });
        }
    };
    let refusing = std::pin::pin!(refusing);
    let drained = async {
        let all = futures_util::future::select(over.as_mut(), limit.as_mut()).await;
        matches!(all, futures_util::future::Either::Left(_))
    };
    let drained = match futures_util::future::select(std::pin::pin!(drained), refusing).await {
        futures_util::future::Either::Left((drained, _)) => drained,
        futures_util::future::Either::Right((never, _)) => never,
    };
    if !drained {
        // Aborted streams end with an error event, if the client still reads.
        app.cut();
        let _ = tokio::time::timeout(CUTTING, over).await;
    }
    Ok(drained)
}

/// Time for clients to read the error of an aborted request.
const CUTTING: Duration = Duration::from_secs(1);

/// What comes first on a new connection.
enum Beginning {
    /// Bytes, or its end.
    Request,
    /// The end of the server.
    End,
    /// Neither in time.
    Nothing,
}

/// Waits for what comes first, for so long at most.
async fn begins(stream: &TcpStream, mut ending: tokio::sync::watch::Receiver<()>, limit: Duration) -> Beginning {
    let first = async {
        let mut byte = [0];
        let bytes = std::pin::pin!(stream.peek(&mut byte));
        let ending = std::pin::pin!(ending.changed());
        // Of both, the end.
        match futures_util::future::select(ending, bytes).await {
            futures_util::future::Either::Left(_) => Beginning::End,
            futures_util::future::Either::Right(_) => Beginning::Request,
        }
    };
    tokio::time::timeout(limit, first).await.unwrap_or(Beginning::Nothing)
}

type Connection = http1::Connection<TokioIo<Impatient>, TowerToHyperService<Router>>;

/// Serves one connection; if not `again`, for one request.
fn connection(stream: TcpStream, router: &Router, app: &App, again: bool) -> Connection {
    let _ = stream.set_nodelay(true);
    let io = TokioIo::new(Impatient::new(stream, app.options.write_timeout));
    http1::Builder::new()
        .timer(TokioTimer::new())
        .keep_alive(again)
        .header_read_timeout(app.options.read_timeout)
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_HEADERS)
        .serve_connection(io, TowerToHyperService::new(router.clone()))
}

fn ended(outcome: hyper::Result<()>) {
    if let Err(error) = outcome {
        tracing::debug!(%error, "a connection was lost");
    }
}

/// Accepts the next connection, once the number of connections is below the limit.
async fn accept(
    listeners: &[tokio::net::TcpListener],
    places: &Arc<Semaphore>,
) -> (TcpStream, Option<tokio::sync::OwnedSemaphorePermit>) {
    let place = Arc::clone(places).acquire_owned().await.ok();
    loop {
        let next = poll_fn(|cx| {
            let ready = listeners.iter().map(|listener| listener.poll_accept(cx)).find(Poll::is_ready);
            ready.unwrap_or(Poll::Pending)
        });
        match next.await {
            Ok((stream, _)) => return (stream, place),
            Err(error) => {
                // Out of file descriptors, or the client has disconnected: neither stops the server.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}
