//! A container image: the binary and the system libraries that it opens, and nothing else.
//!
//! The archive is an OCI image layout (image-spec v1.1) which also has the `manifest.json` that older versions of
//! `docker load` read. GPUs come from NVIDIA's container toolkit, which adds the driver's libraries when a container starts.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::archive::{Entry, gzip, tar};
use super::files::{read, sha256};
use crate::error::XtaskError;
use crate::run::output;

/// What the driver's libraries need beside what the binary is linked to.
const DRIVER_NEEDS: [&str; 3] = ["libdl.so.2", "libpthread.so.0", "librt.so.1"];
/// The user that the program runs as, by convention of images without a shell.
const USER: u64 = 65532;
const HOME: &str = "home/ridge";

/// A container image.
pub(super) struct Image {
    /// The archive's bytes.
    pub(super) archive: Vec<u8>,
    /// Bytes of the files in it.
    pub(super) unpacked_bytes: u64,
}

impl Image {
    /// The image that runs a binary of this machine's target.
    pub(super) fn of(ridge: &Path, version: &str, time: u64) -> Result<Self, XtaskError> {
        let mut entries = files();
        entries.push(Entry::executable("usr/bin/ridge", read(ridge)?));
        let linked = output(Command::new("ldd").arg(ridge))?;
        for path in with_driver_needs(linked_libraries(&linked)) {
            let name = path.to_string_lossy().trim_start_matches('/').to_owned();
            entries.push(Entry::executable(&name, read(&path)?));
        }
        Self::from_entries(&entries, version, time)
    }

    fn from_entries(entries: &[Entry], version: &str, time: u64) -> Result<Self, XtaskError> {
        let unpacked = tar(entries, time)?;
        let layer = gzip(&unpacked)?;
        let config = config(&sha256(&unpacked), version, time);
        let manifest = manifest(&config, &layer);
        let name = format!("ridge:{version}");
        let index = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [{
                "mediaType": MANIFEST,
                "digest": digest(&manifest),
                "size": manifest.len(),
                "annotations": {
                    "org.opencontainers.image.ref.name": version,
                    "io.containerd.image.name": format!("docker.io/library/{name}"),
                },
            }],
        });
        let docker = json!([{ "Config": blob(&config), "RepoTags": [name], "Layers": [blob(&layer)] }]);
        let archive = [
            Entry::file("oci-layout", text(&json!({ "imageLayoutVersion": "1.0.0" }))),
            Entry::file("index.json", text(&index)),
            Entry::file("manifest.json", text(&docker)),
            Entry::file(&blob(&manifest), manifest),
            Entry::file(&blob(&config), config),
            Entry::file(&blob(&layer), layer),
        ];
        Ok(Self { archive: tar(&archive, time)?, unpacked_bytes: entries.iter().map(Entry::bytes).sum() })
    }
}

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// Files and folders that programs expect: users, names of hosts, a home folder and one for temporary files.
fn files() -> Vec<Entry> {
    let passwd = format!("root:x:0:0:root:/root:/sbin/nologin\nridge:x:{USER}:{USER}:ridge:/{HOME}:/sbin/nologin\n");
    vec![
        Entry::file("etc/passwd", passwd.into_bytes()),
        Entry::file("etc/group", format!("root:x:0:\nridge:x:{USER}:\n").into_bytes()),
        Entry::file("etc/nsswitch.conf", b"hosts: files dns\n".to_vec()),
        Entry::folder(HOME, USER),
        Entry::temporary_folder("tmp"),
        Entry::link("lib", "usr/lib"),
        Entry::link("lib64", "usr/lib64"),
    ]
}

/// What starts: the binary, as a server unless other arguments are given.
fn config(layer: &str, version: &str, time: u64) -> Vec<u8> {
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    text(&json!({
        "created": date(time),
        "architecture": architecture,
        "os": "linux",
        "config": {
            "User": USER.to_string(),
            "Env": [
                "PATH=/usr/bin",
                format!("HOME=/{HOME}"),
                "NVIDIA_VISIBLE_DEVICES=all",
                "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            ],
            "WorkingDir": format!("/{HOME}"),
            "Entrypoint": ["/usr/bin/ridge"],
            "Cmd": ["serve", "--host", "0.0.0.0"],
            "ExposedPorts": { "8000/tcp": {} },
            "StopSignal": "SIGTERM",
            "Labels": {
                "org.opencontainers.image.title": "ridge",
                "org.opencontainers.image.version": version,
                "org.opencontainers.image.licenses": "MIT OR Apache-2.0",
            },
        },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{layer}")] },
        "history": [{ "created": date(time), "created_by": "cargo xtask dist" }],
    }))
}

fn manifest(config: &[u8], layer: &[u8]) -> Vec<u8> {
    let descriptor =
        |kind: &str, bytes: &[u8]| json!({ "mediaType": kind, "digest": digest(bytes), "size": bytes.len() });
    text(&json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": descriptor("application/vnd.oci.image.config.v1+json", config),
        "layers": [descriptor("application/vnd.oci.image.layer.v1.tar+gzip", layer)],
    }))
}

fn text(value: &Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", sha256(bytes))
}

/// Where a layout keeps content.
fn blob(bytes: &[u8]) -> String {
    format!("blobs/sha256/{}", sha256(bytes))
}

/// A time in RFC 3339, from seconds since 1970. Days become dates by counting eras of 400 years from March of year 0.
fn date(time: u64) -> String {
    let (days, seconds) = (time / 86_400 + 719_468, time % 86_400);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (day, month) = (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// The paths in what ldd prints: `libm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x...)` or the loader's alone.
fn linked_libraries(printed: &str) -> Vec<PathBuf> {
    let paths = printed.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    paths.map(PathBuf::from).collect()
}

/// Adds the libraries that lie beside the others and that NVIDIA's need, all by the paths below `/usr`.
fn with_driver_needs(linked: Vec<PathBuf>) -> BTreeSet<PathBuf> {
    let folders: BTreeSet<PathBuf> = linked.iter().filter_map(|path| Some(path.parent()?.to_owned())).collect();
    let beside = folders.iter().flat_map(|folder| DRIVER_NEEDS.map(|name| folder.join(name)));
    let beside = beside.filter(|path| path.exists());
    linked.into_iter().chain(beside).map(below_usr).collect()
}

/// `/lib` and `/lib64` are links to folders below `/usr` in the image, as on today's systems.
fn below_usr(path: PathBuf) -> PathBuf {
    if path.starts_with("/usr") { path } else { Path::new("/usr").join(path.strip_prefix("/").unwrap_or(&path)) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read as _;

    use flate2::read::GzDecoder;
    use tar::Archive;

    use super::*;

    #[test]
    fn paths_are_read_from_what_ldd_prints() {
        let printed = "\tlinux-vdso.so.1 (0x00007f)\n\
                       \tlibm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x00007f)\n\
                       \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let expected = ["/lib/x86_64-linux-gnu/libm.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(linked_libraries(printed), expected);
        assert_eq!(below_usr(expected[1].clone()), Path::new("/usr/lib64/ld-linux-x86-64.so.2"));
        assert_eq!(below_usr("/usr/lib/libm.so.6".into()), Path::new("/usr/lib/libm.so.6"));
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        // `date -u -d @N +%FT%TZ`.
        for (time, expected) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (1_772_323_200, "2026-03-01T00:00:00Z"),
        ] {
            assert_eq!(date(time), expected);
        }
    }

    #[test]
    fn every_digest_is_of_what_it_names() {
        let mut entries = files();
        entries.push(Entry::executable("usr/bin/ridge", b"program".to_vec()));
        let image = Image::from_entries(&entries, "1.2.3", 1_000).unwrap();
        let mut contents = BTreeMap::new();
        for entry in Archive::new(&image.archive[..]).entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            contents.insert(entry.path().unwrap().display().to_string(), bytes);
        }
        let parse = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
        let follow = |descriptor: &Value| {
            let digest = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
            let bytes = &contents[&format!("blobs/sha256/{digest}")];
            assert_eq!(sha256(bytes), digest);
            assert_eq!(descriptor["size"], bytes.len());
            bytes
        };
        let manifest = parse(follow(&parse(&contents["index.json"])["manifests"][0]));
        let config = parse(follow(&manifest["config"]));
        let layer = follow(&manifest["layers"][0]);
        let mut unpacked = Vec::new();
        GzDecoder::new(&layer[..]).read_to_end(&mut unpacked).unwrap();
        assert_eq!(config["rootfs"]["diff_ids"][0], digest(&unpacked));
        let docker = parse(&contents["manifest.json"]);
        assert_eq!(docker[0]["RepoTags"][0], "ridge:1.2.3");
        for path in [&docker[0]["Config"], &docker[0]["Layers"][0]] {
            assert!(contents.contains_key(path.as_str().unwrap()), "{path}");
        }
    }
}
