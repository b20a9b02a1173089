//! Downloading a model.

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use ridge_files::hub::HubModel;
use wildmatch::WildMatch;

use crate::client::Client;
use crate::download::{Downloads, make_parent};
use crate::error::{HubError, Result};
use crate::listing::{RemoteFile, ask};
use crate::selection::{Patterns, select};
use crate::settings::HubSettings;

/// What is to be downloaded.
#[derive(Clone, Debug)]
pub struct PullRequest {
    /// The model, its revision, and which of several GGUF files.
    pub model: HubModel,
    /// Take the files with these names in place of those that Ridge reads; `*` is any characters, `?` any one.
    pub include: Vec<String>,
    /// Leave out files with these names.
    pub exclude: Vec<String>,
    /// Files that are downloaded at a time.
    pub connections: NonZeroUsize,
}

impl PullRequest {
    /// What Ridge reads of a model, over eight connections.
    pub fn new(model: HubModel) -> Self {
        const CONNECTIONS: NonZeroUsize = NonZeroUsize::new(8).expect("8 is above 0");
        Self { model, include: Vec::new(), exclude: Vec::new(), connections: CONNECTIONS }
    }
}

/// A model that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// The folder of its files.
    pub folder: PathBuf,
    /// The commit that they are of.
    pub commit: String,
    /// How many files were chosen, and how many of them had to be downloaded.
    pub files: usize,
    /// See `files`.
    pub downloaded: usize,
    /// Bytes of all chosen files.
    pub bytes: u64,
}

/// Who wants to know how it goes. `()` does not.
pub trait PullObserver {
    /// Files were chosen: so many, of so many bytes.
    fn chosen(&mut self, _files: usize, _bytes: u64) {}

    /// So many bytes are there.
    fn at(&mut self, _bytes: u64) {}
}

impl PullObserver for () {}

/// How often the observer is told.
const INTERVAL: Duration = Duration::from_millis(100);

/// Downloads a model into the cache, or what of it is not there.
///
/// # Errors
/// When the server has no such model or does not show it, the network fails for longer than some seconds, a checksum is
/// wrong, or a file cannot be written. What arrived is kept, and the next call continues there.
pub fn pull(request: &PullRequest, settings: &HubSettings, observer: &mut dyn PullObserver) -> Result<Pulled> {
    let (model, cache) = (&request.model, &settings.cache);
    if settings.offline {
        return offline(request, settings);
    }
    let client = Client::new(settings)?;
    let listing = ask(&client, model)?;
    let patterns = |all: &[String]| all.iter().map(|pattern| WildMatch::new(pattern)).collect();
    let patterns = Patterns { include: patterns(&request.include), exclude: patterns(&request.exclude) };
    let mut files = select(model, listing.files, &patterns)?;
    let bytes = files.iter().map(|file| file.size).sum();
    observer.chosen(files.len(), bytes);
    // Large files first, so that none is left alone at the end.
    files.sort_by_key(|file| std::cmp::Reverse(file.size));

    let folder = cache.model(model);
    let snapshot = cache.snapshot(model, &listing.commit);
    let name = folder.file_name().unwrap_or_default();
    let downloads = Downloads {
        client: &client,
        model,
        commit: &listing.commit,
        blobs: folder.join("blobs"),
        locks: cache.root().join(".locks").join(name),
        snapshot: snapshot.clone(),
        done: AtomicU64::new(0),
        given_up: AtomicBool::new(false),
    };
    make_parent(&downloads.blobs.join("a"))?;
    make_parent(&snapshot.join("a"))?;
    let chosen = files.len();
    let downloaded = fetch_all(&downloads, files, request.connections, observer)?;
    // An unchanged reference is not written again, so that a complete model in a read-only cache is no error.
    if model.revision() != listing.commit && cache.commit(model).as_deref() != Some(listing.commit.as_str()) {
        let reference = cache.reference(model);
        make_parent(&reference)?;
        std::fs::write(&reference, &listing.commit).map_err(|cause| HubError::Io {
            path: reference,
            action: "write the reference",
            cause,
        })?;
    }
    Ok(Pulled { folder: snapshot, commit: listing.commit, files: chosen, downloaded, bytes })
}

/// What the cache has.
fn offline(request: &PullRequest, settings: &HubSettings) -> Result<Pulled> {
    let (model, cache) = (&request.model, &settings.cache);
    let missing = || HubError::Offline { model: model.to_string(), cache: cache.root().to_owned() };
    let commit = cache.commit(model).ok_or_else(missing)?;
    cache.find(model).map_err(|_| missing())?;
    let folder = cache.snapshot(model, &commit);
    Ok(Pulled { folder, commit, files: 0, downloaded: 0, bytes: 0 })
}

/// Fetches the files, several at a time. Says how many had to be downloaded.
fn fetch_all(
    downloads: &Downloads<'_>,
    files: Vec<RemoteFile>,
    connections: NonZeroUsize,
    observer: &mut dyn PullObserver,
) -> Result<usize> {
    let workers = connections.get().min(files.len());
    let queue = Mutex::new(VecDeque::from(files));
    let next = || queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner).pop_front();
    std::thread::scope(|scope| {
        let (sender, results) = channel();
        for _ in 0..workers {
            let sender = sender.clone();
            scope.spawn(move || {
                while let Some(file) = next().filter(|_| !downloads.given_up.load(Ordering::Relaxed)) {
                    // The receiver lives as long as the scope.
                    let _ = sender.send(downloads.fetch(&file));
                }
            });
        }
        drop(sender);
        let (mut downloaded, mut failure) = (0, None);
        loop {
            match results.recv_timeout(INTERVAL) {
                Ok(Ok(new)) => downloaded += usize::from(new),
                Ok(Err(error)) => {
                    downloads.given_up.store(true, Ordering::Relaxed);
                    failure.get_or_insert(error);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            observer.at(downloads.done.load(Ordering::Relaxed));
        }
        failure.map_or(Ok(downloaded), Err)
    })
}
