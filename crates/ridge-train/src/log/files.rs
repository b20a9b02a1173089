//! The logs of a run: its files, and what servers are sent.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::event::{RunEnded, TrainEvent};
use super::jsonl::{JsonLines, seconds};
use super::mlflow::MlflowRun;
use super::numbers::numbers;
use super::remote::{Delivery, Environment, MlflowServer, Pace, Row, WandbMode, WandbServer};
use super::tensorboard::EventFile;
use super::wandb::WandbRun;
use crate::address::{is_remote, public};
use crate::error::{Result, io_error};
use crate::settings::{LogSettings, Settings};

/// The file of events in the folder of a run.
pub(crate) const LOG: &str = "log.jsonl";
/// A server that says nothing for so long has failed.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The logs of a run. What a server is sent is in a file, too: nothing is lost when it cannot be reached.
pub struct Logs {
    jsonl: Option<JsonLines>,
    tensorboard: Option<EventFile>,
    mlflow: Option<MlflowRun>,
    wandb: Option<WandbRun>,
    /// Servers, each with where to find what it was not sent.
    servers: Vec<(Delivery, String)>,
    notes: Vec<String>,
}

/// How others know the run.
struct Identity {
    /// 32 hexadecimal digits.
    id: String,
    name: String,
    /// Settings by `section.key`.
    settings: Vec<(String, Value)>,
}

impl Logs {
    /// Those that `settings` asks for: in the folder of the run, in the file store of MLflow or on its server, and on that of W&B if
    /// the environment has a key.
    ///
    /// # Errors
    /// When a file cannot be written, or the environment has settings of servers that cannot be used. No server is waited for.
    pub fn open(folder: &Path, settings: &Settings) -> Result<Self> {
        let LogSettings { jsonl, tensorboard, mlflow, wandb, .. } = &settings.log;
        let jsonl = jsonl.then(|| JsonLines::open(&folder.join(LOG))).transpose()?;
        let tensorboard = tensorboard.then(|| EventFile::create(&folder.join("tensorboard"))).transpose()?;
        let mut logs = Self { jsonl, tensorboard, mlflow: None, wandb: None, servers: Vec::new(), notes: Vec::new() };
        if mlflow.is_some() || wandb.is_some() {
            let name = folder.file_name().map_or_else(|| "run".to_owned(), |name| name.to_string_lossy().into_owned());
            let identity = Identity { id: run_id(folder)?, name, settings: keys(settings) };
            // A server hears of a run only when nothing is left that may fail.
            let mlflow = mlflow.as_ref().map(|store| logs.open_mlflow(folder, store, &identity)).transpose()?;
            let wandb = wandb.as_ref().map(|project| logs.open_wandb(folder, project, &identity)).transpose()?;
            let mlflow = mlflow.flatten().map(|(server, instead)| (Delivery::start(server, Pace::default()), instead));
            let wandb = wandb.flatten().map(|(server, instead)| (Delivery::start(server, Pace::default()), instead));
            logs.servers.extend(mlflow.into_iter().chain(wandb));
        }
        Ok(logs)
    }

    /// In a file store: `store`, or one in the folder if that is the address of a server, which is returned with where to find what
    /// it is not sent.
    fn open_mlflow(
        &mut self,
        folder: &Path,
        store: &Path,
        identity: &Identity,
    ) -> Result<Option<(MlflowServer, String)>> {
        let Identity { id, name, settings } = identity;
        let (mut files, mut reported) = (store.to_owned(), None);
        if is_remote(store) {
            files = folder.join("mlruns");
            let uri = store.to_string_lossy();
            let server = MlflowServer::new(&uri, id, name, settings, &Environment::PROCESS, TIMEOUT)?;
            let instead = format!("the whole run is in the file store {}", files.display());
            reported = Some((server, instead));
        }
        self.mlflow = Some(MlflowRun::open(&files, id, name, settings)?);
        Ok(reported)
    }

    /// In a folder of its own, and the server of the environment, as with [`Logs::open_mlflow`].
    fn open_wandb(
        &mut self,
        folder: &Path,
        project: &str,
        identity: &Identity,
    ) -> Result<Option<(Box<WandbServer>, String)>> {
        let Identity { id, name, settings } = identity;
        let id = &id[..8];
        let run = WandbRun::create(folder, project, id, name, settings)?;
        self.wandb = Some(run);
        // Each process that continues a run writes a folder of its own.
        let folders = folder.join("wandb").join("offline-run-*");
        let instead = format!("`wandb sync {}` uploads the whole run", folders.display());
        match WandbServer::of_environment(project, id, name, settings, &Environment::PROCESS, TIMEOUT)? {
            WandbMode::Offline => Ok(None),
            WandbMode::NoKey(host) => {
                self.notes.push(format!(
                    "W&B: WANDB_API_KEY is not set, and no netrc file has a key of {host}, so the run is written offline; \
                     {instead}"
                ));
                Ok(None)
            }
            WandbMode::Online(server) => Ok(Some((server, instead))),
        }
    }

    /// Logs an event.
    ///
    /// # Errors
    /// When it cannot be written. What a server cannot be sent is no error.
    pub fn write(&mut self, event: &TrainEvent) -> Result<()> {
        let Self { jsonl, tensorboard, mlflow, wandb, servers, .. } = self;
        if let Some(jsonl) = jsonl {
            jsonl.write(event)?;
        }
        let Some((step, numbers)) = numbers(event) else { return Ok(()) };
        if let Some(file) = tensorboard {
            numbers.iter().try_for_each(|(name, value)| file.scalar(step, name, *value))?;
        }
        if let Some(run) = mlflow {
            run.numbers(step, &numbers)?;
        }
        if let Some(run) = wandb {
            run.numbers(step, &numbers)?;
        }
        for (server, _) in servers {
            server.push(Row { step, time: seconds(), numbers: numbers.clone() });
        }
        Ok(())
    }

    /// What one should know of servers since the last call.
    pub fn notes(&mut self) -> Vec<String> {
        let servers = self.servers.iter().flat_map(|(server, _)| server.notes());
        self.notes.extend(servers);
        std::mem::take(&mut self.notes)
    }

    /// Notes how the run ended, and waits up to 20 seconds for servers to take what is left. What they did not take is among the
    /// notes.
    ///
    /// # Errors
    /// When the end cannot be written.
    pub fn close(&mut self, ended: RunEnded) -> Result<()> {
        let files = self.mlflow.as_mut().map_or(Ok(()), |run| run.close(ended));
        let files = files.and(self.wandb.as_mut().map_or(Ok(()), |run| run.close(ended)));
        for (server, _) in &self.servers {
            server.end(ended);
        }
        for (server, instead) in std::mem::take(&mut self.servers) {
            self.notes.extend(server.close(&instead));
        }
        files
    }
}

/// The id by which others know the run of this folder: 32 hexadecimal digits, made when it is first asked for.
fn run_id(folder: &Path) -> Result<String> {
    let path = folder.join("run-id");
    if let Ok(id) = std::fs::read_to_string(&path)
        && id.len() == 32
        && id.bytes().all(|byte| byte.is_ascii_hexdigit())
    {
        return Ok(id);
    }
    let seed = format!("{} {} {}", folder.display(), seconds(), std::process::id());
    let id: String = Sha256::digest(seed).iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    std::fs::write(&path, &id).map_err(|cause| io_error(&path, "write the id of the run", &cause))?;
    Ok(id)
}

/// Settings by `section.key`, with addresses as [`public`] has them.
fn keys(settings: &Settings) -> Vec<(String, Value)> {
    let Ok(Value::Object(sections)) = serde_json::to_value(settings) else { return Vec::new() };
    let of = |(section, keys): (String, Value)| {
        let keys = if let Value::Object(keys) = keys { keys } else { serde_json::Map::new() };
        keys.into_iter().map(move |(key, value)| (format!("{section}.{key}"), without_secrets(value)))
    };
    sections.into_iter().flat_map(of).collect()
}

/// Servers get settings, and those who see runs there are others than those who may read the data.
fn without_secrets(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(public(&text)),
        Value::Array(values) => values.into_iter().map(without_secrets).collect(),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_are_sent_have_no_signatures() {
        let mut settings = Settings::default();
        settings.data.train = vec!["https://me:secret@host/a.jsonl?signature=secret".into(), "b?.txt".into()];
        let keys = keys(&settings);
        let sent = keys.iter().find(|(key, _)| key == "data.train").map(|(_, value)| value);
        assert_eq!(sent, Some(&serde_json::json!(["https://host/a.jsonl", "b?.txt"])));
    }
}
