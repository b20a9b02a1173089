//! The thread that owns an embedder.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc as std_mpsc;
use std::thread;

use ridge_engine::{Embedder, TextTokens};
use tokio::sync::oneshot;

use crate::error::{ApiError, ApiResult};

type Vectors = ApiResult<Vec<Vec<f32>>>;

struct EmbedOrder {
    texts: Vec<TextTokens>,
    reply: oneshot::Sender<Vectors>,
}

/// The handle of the embedder's thread.
pub(crate) struct EmbedWorker {
    orders: std_mpsc::Sender<EmbedOrder>,
    jobs: Arc<AtomicUsize>,
    dead: Arc<AtomicBool>,
    most: usize,
    pub(crate) max_tokens: usize,
    /// Labels of a classifier; 0 where vectors are embeddings.
    pub(crate) labels: usize,
}

impl EmbedWorker {
    /// Starts the thread, which ends when the worker is dropped.
    pub(crate) fn start(embedder: Embedder, most: usize) -> std::io::Result<(Self, thread::JoinHandle<()>)> {
        let (orders, inbox) = std_mpsc::channel();
        let (jobs, dead) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (max_tokens, labels) = (embedder.max_tokens(), embedder.labels());
        // A panic drops the inbox with every order in it, and marks the worker dead.
        let mark = MarkDeadOnDrop(Arc::clone(&dead));
        let thread = thread::Builder::new().name("embedder".to_owned()).spawn(move || {
            let _mark = mark;
            run(embedder, &inbox);
        })?;
        Ok((Self { orders, jobs, dead, most, max_tokens, labels }, thread))
    }

    pub(crate) fn dead(&self) -> bool {
        self.dead.load(Relaxed)
    }

    pub(crate) fn jobs(&self) -> usize {
        self.jobs.load(Relaxed)
    }

    /// A vector for each of the texts, or of a classifier the scores.
    pub(crate) async fn embed(&self, texts: Vec<TextTokens>) -> Vectors {
        let _job = EmbedJob::new(&self.jobs);
        if self.jobs() > self.most {
            return Err(ApiError::overloaded("the request queue is full; retry later"));
        }
        let dead = || ApiError::unavailable("the embedder has stopped; see the server's log");
        let (reply, vectors) = oneshot::channel();
        self.orders.send(EmbedOrder { texts, reply }).map_err(|_| dead())?;
        vectors.await.map_err(|_| dead())?
    }
}

struct EmbedJob<'a>(&'a AtomicUsize);

impl<'a> EmbedJob<'a> {
    fn new(jobs: &'a AtomicUsize) -> Self {
        jobs.fetch_add(1, Relaxed);
        Self(jobs)
    }
}

impl Drop for EmbedJob<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

struct MarkDeadOnDrop(Arc<AtomicBool>);

impl Drop for MarkDeadOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Processes all pending requests together, so that small ones share steps.
fn run(mut embedder: Embedder, inbox: &std_mpsc::Receiver<EmbedOrder>) {
    while let Ok(first) = inbox.recv() {
        let mut orders = vec![first];
        orders.extend(inbox.try_iter());
        orders.retain(|order| !order.reply.is_closed());
        let all: Vec<TextTokens> = orders.iter().flat_map(|order| order.texts.iter().cloned()).collect();
        match embedder.embed_texts(&all) {
            Ok(vectors) => {
                let mut vectors = vectors.into_iter();
                for EmbedOrder { texts, reply } in orders {
                    let own = vectors.by_ref().take(texts.len()).collect();
                    let _ = reply.send(Ok(own));
                }
            }
            // An error belongs to one request: which one shows when each runs alone.
            Err(_) => {
                for EmbedOrder { texts, reply } in orders {
                    let _ = reply.send(embedder.embed_texts(&texts).map_err(ApiError::from));
                }
            }
        }
    }
}
