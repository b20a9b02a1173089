//! Download of one file: resumed where an earlier attempt stopped, verified, and renamed into place.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ridge_files::hub::HubModel;
use sha1::Sha1;
use sha2::{Digest as _, Sha256};

use crate::client::{Attempts, Client, Content, Failure};
use crate::error::{HubError, Result};
use crate::listing::{Checksum, RemoteFile};

/// What all downloads of a command share.
pub(crate) struct Downloads<'a> {
    pub(crate) client: &'a Client,
    pub(crate) model: &'a HubModel,
    pub(crate) commit: &'a str,
    /// The folders `blobs`, `.locks/...` and `snapshots/COMMIT`.
    pub(crate) blobs: PathBuf,
    pub(crate) locks: PathBuf,
    pub(crate) snapshot: PathBuf,
    /// Bytes of all files that are there.
    pub(crate) done: AtomicU64,
    /// Another file failed.
    pub(crate) given_up: AtomicBool,
}

/// How the download of a file ended.
#[derive(PartialEq)]
enum Downloaded {
    /// The content is in place.
    Whole,
    /// What an earlier command had left was not the start of this content. It is deleted: a download from the first
    /// byte on may still succeed.
    OnWrongBytes,
}

const BUFFER: usize = 1 << 18;
/// How often a request for content may fail one after the other: 15 seconds of waiting.
const ATTEMPTS: u32 = 5;

impl Downloads<'_> {
    /// Makes the file present in the snapshot. Says whether anything had to be downloaded.
    pub(crate) fn fetch(&self, file: &RemoteFile) -> Result<bool> {
        let digits = file.checksum.digits();
        let blob = self.blobs.join(digits);
        let link = self.snapshot.join(&file.path);
        let is_there = || size_of(&blob) == Some(file.size);
        let mut downloaded = false;
        if !is_there() {
            let lock = self.locks.join(format!("{digits}.lock"));
            // Another process may download the same: then this one waits and finds it.
            let _held = lock_file(&lock)?;
            if !is_there() {
                while self.download(file, &blob)? == Downloaded::OnWrongBytes {}
                downloaded = true;
            }
        }
        if !downloaded {
            self.done.fetch_add(file.size, Ordering::Relaxed);
        }
        link_to(&link, &file.path, digits)?;
        Ok(downloaded)
    }

    fn download(&self, file: &RemoteFile, blob: &Path) -> Result<Downloaded> {
        let incomplete = blob.with_file_name(format!("{}.incomplete", file.checksum.digits()));
        let io = |action| move |cause| HubError::Io { path: PathBuf::new(), action, cause };
        let named = |error: HubError| match error {
            HubError::Io { action, cause, .. } => HubError::Io { path: incomplete.clone(), action, cause },
            other => other,
        };
        let open = || OpenOptions::new().create(true).append(true).read(true).open(&incomplete);
        let mut out = open().map_err(io("write the download")).map_err(named)?;
        let mut hash = Hash::new(file);
        let mut size = self.read_again(file, &mut out, &mut hash).map_err(io("read the download")).map_err(named)?;
        let mut continued = size;
        let path = format!("{}/resolve/{}/{}", self.model.id(), self.commit, escaped(&file.path));
        let mut attempts = Attempts::of(ATTEMPTS);
        while size < file.size {
            let failure = match self.client.content(self.model, &path, size) {
                Ok(content) => {
                    if content.start < size {
                        // The server sends the whole file only.
                        out.set_len(0).map_err(io("write the download")).map_err(named)?;
                        self.done.fetch_sub(size, Ordering::Relaxed);
                        (size, continued, hash) = (0, 0, Hash::new(file));
                    }
                    let before = size;
                    let failure = self.append(content, file, &mut out, &mut hash, &mut size).map_err(named)?;
                    if size > before {
                        attempts.progressed();
                    }
                    failure
                }
                Err(failure) => Some(failure),
            };
            if let Some(failure) = failure {
                attempts.wait(failure, || self.client.url(&path))?;
            }
        }
        out.sync_all().map_err(io("write the download")).map_err(named)?;
        let is = hash.finish();
        if is != file.checksum.digits() {
            self.done.fetch_sub(size, Ordering::Relaxed);
            std::fs::remove_file(&incomplete).map_err(io("delete the download")).map_err(named)?;
            if continued > 0 {
                return Ok(Downloaded::OnWrongBytes);
            }
            let (file, should) = (file.path.clone(), file.checksum.digits().to_owned());
            return Err(HubError::Checksum { file, is, should });
        }
        std::fs::rename(&incomplete, blob).map_err(io("rename the download")).map_err(named)?;
        Ok(Downloaded::Whole)
    }

    /// Hashes what an earlier attempt left. More than the file has is deleted.
    fn read_again(&self, file: &RemoteFile, out: &mut File, hash: &mut Hash) -> std::io::Result<u64> {
        if out.metadata()?.len() > file.size {
            out.set_len(0)?;
        }
        let (mut buffer, mut size) = (vec![0; BUFFER], 0);
        loop {
            let read = out.read(&mut buffer)?;
            if read == 0 {
                return Ok(size);
            }
            hash.update(&buffer[..read]);
            size += read as u64;
            self.done.fetch_add(read as u64, Ordering::Relaxed);
        }
    }

    /// Appends what arrives until the file is complete, or the connection fails: then gives the failure.
    fn append(
        &self,
        content: Content,
        file: &RemoteFile,
        out: &mut File,
        hash: &mut Hash,
        size: &mut u64,
    ) -> Result<Option<Failure>> {
        let passing = |problem: String| Ok(Some(Failure::Passing { problem, wait: None }));
        let mut body = content.body.into_with_config().limit(u64::MAX).reader();
        let mut buffer = vec![0; BUFFER];
        while *size < file.size {
            if self.given_up.load(Ordering::Relaxed) {
                return Err(HubError::GivenUp);
            }
            let read = match body.read(&mut buffer) {
                Ok(0) => return passing(format!("the connection ended after {size} of {} bytes", file.size)),
                Ok(read) => read.min((file.size - *size) as usize),
                Err(error) => return passing(error.to_string()),
            };
            out.write_all(&buffer[..read]).map_err(|cause| HubError::Io {
                path: PathBuf::new(),
                action: "write the download",
                cause,
            })?;
            hash.update(&buffer[..read]);
            *size += read as u64;
            self.done.fetch_add(read as u64, Ordering::Relaxed);
        }
        Ok(None)
    }
}

/// The checksum of what has arrived.
enum Hash {
    Sha256(Sha256),
    GitBlob(Sha1),
}

impl Hash {
    fn new(file: &RemoteFile) -> Self {
        match &file.checksum {
            Checksum::Sha256(_) => Self::Sha256(Sha256::new()),
            Checksum::GitBlob(_) => Self::GitBlob(Sha1::new_with_prefix(format!("blob {}\0", file.size))),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hash) => hash.update(bytes),
            Self::GitBlob(hash) => hash.update(bytes),
        }
    }

    fn finish(self) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        match self {
            Self::Sha256(hash) => hex(&hash.finalize()),
            Self::GitBlob(hash) => hex(&hash.finalize()),
        }
    }
}

fn size_of(path: &Path) -> Option<u64> {
    Some(std::fs::metadata(path).ok()?.len())
}

/// Makes the folder of a file.
pub(crate) fn make_parent(path: &Path) -> Result<()> {
    let Some(folder) = path.parent() else { return Ok(()) };
    std::fs::create_dir_all(folder).map_err(|cause| HubError::Io {
        path: folder.to_owned(),
        action: "make the folder",
        cause,
    })
}

/// Takes the lock of a file, as long as what is returned lives.
fn lock_file(path: &Path) -> Result<File> {
    make_parent(path)?;
    let fail = |cause| HubError::Io { path: path.to_owned(), action: "lock", cause };
    let file = OpenOptions::new().create(true).append(true).open(path).map_err(fail)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => file.lock().map_err(fail)?,
        Err(TryLockError::Error(cause)) => return Err(fail(cause)),
    }
    Ok(file)
}

/// Links `link`, at `path` in the snapshot, to the content: relative, so that the cache can be moved.
fn link_to(link: &Path, path: &str, digits: &str) -> Result<()> {
    make_parent(link)?;
    let up = "../".repeat(2 + path.matches('/').count());
    let target = PathBuf::from(format!("{up}blobs/{digits}"));
    if std::fs::read_link(link).is_ok_and(|old| old == target) {
        return Ok(());
    }
    let fail = |cause| HubError::Io { path: link.to_owned(), action: "link the download", cause };
    match std::fs::remove_file(link) {
        Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => return Err(fail(cause)),
        _ => {}
    }
    match std::os::unix::fs::symlink(&target, link) {
        // Another process was faster.
        Err(cause) if cause.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        result => result.map_err(fail),
    }
}

/// The path as part of an address (RFC 3986, section 2.1).
fn escaped(path: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    path.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}
