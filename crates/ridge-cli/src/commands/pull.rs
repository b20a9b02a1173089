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
/// The files that Ridge reads go into the cache that huggingface_hub and vLLM share, and the folder is printed. Every
/// command then takes the model by its name. An interrupted download continues where it ended.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge pull Qwen/Qwen3-0.6B                  then: ridge chat Qwen/Qwen3-0.6B
  ridge pull Qwen/Qwen3-0.6B@refs/pr/1        a branch, tag, commit or PR
  ridge pull ORG/NAME-GGUF:Q4_K_M             the GGUF file named so
  ridge pull ORG/NAME --include '*.json'      files by their names

Environment: HF_TOKEN or the token that `hf auth login` saved, for private and gated models; HF_ENDPOINT for a mirror; \
HF_HUB_CACHE or HF_HOME for the cache; HF_HUB_OFFLINE=1 to use what is downloaded; HF_HUB_DOWNLOAD_TIMEOUT in seconds; \
HTTPS_PROXY; SSL_CERT_FILE.
Exit codes: 0 done, 1 failed, 2 usage error.")]
pub(crate) struct PullArgs {
    /// Model on the Hub: ORG/NAME, ORG/NAME@REVISION, and :PART behind either for the GGUF file with PART in its name
    #[arg(value_name = "MODEL")]
    model: HubModel,

    /// Branch, tag or commit [default: main]
    #[arg(long, value_name = "NAME")]
    revision: Option<String>,

    /// Download the files with this name in place of those that Ridge reads; * and ? stand for others; may be repeated
    #[arg(long, value_name = "PATTERN")]
    include: Vec<String>,

    /// Leave out the files with this name; may be repeated
    #[arg(long, value_name = "PATTERN")]
    exclude: Vec<String>,

    /// Number of files downloaded at the same time
    #[arg(short, long, value_name = "N", value_parser = whole::<usize, 1, 64>, allow_negative_numbers = true, default_value_t = 8)]
    jobs: usize,

    /// Print a JSON object: folder, commit, files, bytes
    #[arg(long)]
    json: bool,

    /// Print the folder only
    #[arg(short, long)]
    quiet: bool,
}

pub(crate) fn run(args: PullArgs) -> Result<()> {
    let model = match &args.revision {
        Some(revision) => {
            args.model.at(revision).map_err(|_| refused("--revision", revision, "cannot be the name of a revision"))?
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
