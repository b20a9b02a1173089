//! Machine code on disk, so that a kernel is compiled once on a machine.
//!
//! An entry's name is a hash of all that the code depends on: source, options, architecture, NVRTC and driver. The file
//! begins with a hash of the code itself, so that a damaged entry is seen and made again. Entries are written beside
//! their place and moved there, so that nobody reads half of one. A cache that cannot be written is none.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// A folder of machine code.
pub(crate) struct KernelCache {
    folder: Option<PathBuf>,
    /// What every entry depends on.
    salt: String,
}

impl KernelCache {
    /// The cache of this user: `$XDG_CACHE_HOME/ridge/cuda`, else `~/.cache/ridge/cuda`.
    pub(crate) fn of_user(salt: String) -> Self {
        Self::at(folder_of_user(), salt)
    }

    fn at(folder: Option<PathBuf>, salt: String) -> Self {
        Self { folder, salt }
    }

    /// The code of `source`: the entry's, or what `compile` makes, which becomes the entry. `loads` says whether code is
    /// usable; an entry that is not is made again.
    pub(crate) fn get<T, E>(
        &self,
        source: &str,
        compile: impl FnOnce() -> Result<Vec<u8>, E>,
        loads: impl Fn(&[u8]) -> Option<T>,
    ) -> Result<Option<T>, E> {
        let key = hash(&[self.salt.as_bytes(), source.as_bytes()]);
        let path = self.folder.as_ref().map(|f| f.join(format!("{key:032x}.cubin")));
        if let Some(found) = path.as_deref().and_then(read).and_then(|code| loads(&code)) {
            return Ok(Some(found));
        }
        let code = compile()?;
        if let Some(path) = &path {
            // The next process compiles again, which costs time alone.
            let _ = write(path, &code);
        }
        Ok(loads(&code))
    }
}

impl KernelCache {
    /// What was kept under `key`, if it is whole.
    pub(crate) fn read(&self, key: &str) -> Option<Vec<u8>> {
        read(&self.choice(key)?)
    }

    /// Keeps bytes under `key`; a cache that cannot be written is none.
    pub(crate) fn write(&self, key: &str, bytes: &[u8]) {
        if let Some(path) = self.choice(key) {
            let _ = write(&path, bytes);
        }
    }

    fn choice(&self, key: &str) -> Option<PathBuf> {
        let key = hash(&[self.salt.as_bytes(), key.as_bytes()]);
        self.folder.as_ref().map(|f| f.join(format!("{key:032x}.choice")))
    }
}

/// The folder of this user's cache, if the environment tells one.
pub(crate) fn folder_of_user() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let base = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
    Some(base.join("ridge/cuda"))
}

fn read(path: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(path).ok()?;
    let (sum, code) = bytes.split_first_chunk::<16>()?;
    (hash(&[code]).to_le_bytes() == *sum).then(|| code.to_vec())
}

fn write(path: &Path, code: &[u8]) -> std::io::Result<()> {
    replace(path, &[&hash(&[code]).to_le_bytes(), code])
}

/// Writes a file of `parts` beside `path` and moves it there.
pub(crate) fn replace(path: &Path, parts: &[&[u8]]) -> std::io::Result<()> {
    use std::sync::atomic::{AtomicU32, Ordering};
    static WRITTEN: AtomicU32 = AtomicU32::new(0);
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder)?;
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    let beside = path.with_extension(format!("{}-{number}.part", std::process::id()));
    let mut file = fs::File::create(&beside)?;
    let moved = parts.iter().try_for_each(|part| file.write_all(part)).and_then(|()| fs::rename(&beside, path));
    if moved.is_err() {
        let _ = fs::remove_file(&beside);
    }
    moved
}

/// FNV-1a over 128 bits (Fowler, Noll and Vo; RFC 9923) of the parts with their lengths.
pub(crate) fn hash(parts: &[&[u8]]) -> u128 {
    let mut hash = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128;
    for part in parts {
        for byte in (part.len() as u64).to_le_bytes().iter().chain(*part) {
            hash = (hash ^ u128::from(*byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    }
    hash
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// What the cache gives for `source`, and whether it was compiled for that.
    fn get(cache: &KernelCache, source: &str) -> (Vec<u8>, bool) {
        let compiled = Cell::new(false);
        let compile = || -> Result<_, ()> {
            compiled.set(true);
            Ok(format!("code of {source}").into_bytes())
        };
        let code = cache.get(source, compile, |code| Some(code.to_vec())).unwrap().unwrap();
        (code, compiled.get())
    }

    #[test]
    fn a_kernel_is_compiled_once() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::at(Some(folder.path().join("a/b")), "sm_90a".into());
        assert_eq!(get(&cache, "x"), (b"code of x".to_vec(), true));
        assert_eq!(get(&cache, "x"), (b"code of x".to_vec(), false));
        assert_eq!(get(&cache, "y"), (b"code of y".to_vec(), true));
        let other = KernelCache::at(Some(folder.path().join("a/b")), "sm_80".into());
        assert!(get(&other, "x").1, "for another architecture it is other code");
    }

    #[test]
    fn a_damaged_entry_is_made_again() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::at(Some(folder.path().into()), "sm_90a".into());
        get(&cache, "x");
        let entry = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
        let whole = fs::read(&entry).unwrap();
        let mut wrong = whole.clone();
        *wrong.last_mut().unwrap() ^= 1;
        for damaged in [&whole[..whole.len() - 1], &whole[..7], &[], &wrong] {
            fs::write(&entry, damaged).unwrap();
            assert_eq!(get(&cache, "x"), (b"code of x".to_vec(), true));
            assert_eq!(get(&cache, "x"), (b"code of x".to_vec(), false));
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
    }

    #[test]
    fn code_that_does_not_load_is_made_again() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::at(Some(folder.path().into()), "sm_90a".into());
        get(&cache, "x");
        let loads = |code: &[u8]| (code == b"new").then_some(());
        assert_eq!(cache.get("x", || Ok::<_, ()>(b"new".to_vec()), loads), Ok(Some(())));
    }

    #[test]
    fn without_a_folder_everything_is_compiled() {
        let cache = KernelCache::at(None, String::new());
        assert!(get(&cache, "x").1 && get(&cache, "x").1);
    }
}
