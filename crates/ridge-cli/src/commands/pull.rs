//! `ridge pull`: downloads a model from the Hugging Face Hub.

use std::num::NonZeroUsize;

use clap::Args;
use ridge_hub::{HubModel, HubSettings, PullObserver, PullRequest, pull};
use ridge_hw::units::Bytes;
use serde_json::json;

use crate::args::whole;
use crate::error::{Result, refused};
use crate::output::{Progress, count, note, print, print_json};

/// Download a model from the Hugging Face Hub
///
/// Downloads the files that Ridge reads into the cache that huggingface_hub and vLLM share, and prints the folder. Every
/// command then accepts the model by name. An interrupted download resumes where it stopped.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge pull Qwen/Qwen3-0.6B                  then: ridge chat Qwen/Qwen3-0.6B
  ridge pull Qwen/Qwen3-0.6B@refs/pr/1        a branch, tag, commit or PR
  ridge pull ORG/NAME-GGUF:Q4_K_M             a GGUF file, by a part of its name
  ridge pull ORG/NAME --include '*.json'      files by pattern

Environment: HF_TOKEN, or the token saved by `hf auth login`, for private and gated models; HF_ENDPOINT for a mirror; \
HF_HUB_CACHE or HF_HOME for the cache; HF_HUB_OFFLINE=1 to use downloaded files only; HF_HUB_DOWNLOAD_TIMEOUT in seconds; \
HTTPS_PROXY; SSL_CERT_FILE.
Exit codes: 0 done, 1 failed, 2 usage error.")]
pub(crate) struct PullArgs {
    /// Model on the Hub: ORG/NAME or ORG/NAME@REVISION, with :PART appended to select the GGUF file whose name contains PART
    #[arg(value_name = "MODEL")]
    model: HubModel,

    /// Branch, tag or commit [default: main]
    #[arg(long, value_name = "NAME")]
    revision: Option<String>,

    /// Download files that match this pattern (with * and ?) instead of those that Ridge reads; may be repeated
    #[arg(long, value_name = "PATTERN")]
    include: Vec<String>,

    /// Skip files that match this pattern; may be repeated
    #[arg(long, value_name = "PATTERN")]
    exclude: Vec<String>,

    /// Number of parallel downloads
    #[arg(short, long, value_name = "N", value_parser = whole::<usize, 1, 64>, allow_negative_numbers = true, default_value_t = 8)]
    jobs: usize,

    /// Print a JSON object: folder, commit, files, bytes
    #[arg(long)]
    json: bool,

    /// Print only the folder
    #[arg(short, long)]
    quiet: bool,
}

pub(crate) fn run(args: PullArgs) -> Result<()> {
    let model = match &args.revision {
        Some(revision) => {
            args.model.at(revision).map_err(|_| refused("--revision", revision, "is not a valid revision"))?
        }
        None => args.model,
    };
    let connections = NonZeroUsize::new(args.jobs).unwrap_or(NonZeroUsize::MIN);
    let request = PullRequest { model, include: args.include, exclude: args.exclude, connections };
    let settings = HubSettings::from_environment()?;
    let mut progress = PullProgress::default();
    let pulled = pull(&request, &settings, &mut progress)?;
    drop(progress);
    if args.json {
        return print_json(&json!({
            "folder": pulled.folder,
            "commit": pulled.commit,
            "files": pulled.files,
            "downloaded": pulled.downloaded,
            "bytes": pulled.bytes,
        }));
    }
    if !args.quiet && !settings.offline {
        let (files, bytes) = (count(pulled.files, "file"), Bytes(pulled.bytes));
        note(&format!("{}: {files}, {bytes}, {} downloaded", request.model, pulled.downloaded));
    }
    print(&format!("{}\n", pulled.folder.display()))
}

#[derive(Default)]
struct PullProgress(Option<Progress>);

impl PullObserver for PullProgress {
    fn chosen(&mut self, _files: usize, bytes: u64) {
        self.0 = Some(Progress::new("downloading", bytes));
    }

    fn at(&mut self, bytes: u64) {
        if let Some(progress) = &mut self.0 {
            progress.at(bytes);
        }
    }
}
