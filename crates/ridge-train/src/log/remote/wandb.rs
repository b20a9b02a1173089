//! A run on a server of Weights & Biases, as its client reports one: the run by the GraphQL mutation `upsertBucket`, then lines of
//! files by `file_stream` (github.com/wandb/wandb, `wandb/sdk/internal/internal_api.py` and `file_stream.py`).

use std::collections::BTreeMap;
use std::time::Duration;

use ridge_hub::{Credentials, JsonClient, JsonError, host_of, path_segment};
use serde_json::{Map, Value, json};

use super::credentials::Environment;
use super::queue::{Row, Tracker};
use crate::address::masked;
use crate::error::{Result, TrainError};
use crate::log::event::RunEnded;
use crate::log::jsonl::seconds;

const CLOUD: &str = "https://api.wandb.ai";

/// Makes a run, or finds the one of this name.
const UPSERT: &str = "mutation UpsertBucket($name: String, $project: String, $entity: String, $displayName: String, \
    $config: JSONString, $program: String) { \
    upsertBucket(input: { name: $name, modelName: $project, entityName: $entity, displayName: $displayName, \
    config: $config, jobProgram: $program }) { \
    bucket { id name displayName project { id name entity { id name } } historyLineCount } inserted } }";

/// A run that is reported to a server.
pub(in crate::log) struct WandbServer {
    client: JsonClient,
    /// The address, without a slash at the end.
    base: String,
    entity: Option<String>,
    project: String,
    id: String,
    name: String,
    settings: Vec<(String, Value)>,
    began: f64,
    /// Where lines go.
    stream: String,
    /// Lines of the history that the server has: the offset of the next one, so that a repeated request adds nothing.
    lines: u64,
    /// The last number of each name.
    summary: BTreeMap<String, f64>,
}

/// Whether a run is reported to a server of W&B.
pub(in crate::log) enum WandbMode {
    /// It is not, as the environment says.
    Offline,
    /// It is not, for want of a key for this host.
    NoKey(String),
    Online(Box<WandbServer>),
}

impl WandbServer {
    /// The run `id` of `project` on the server of the environment, with `settings` by `section.key` as its configuration. The
    /// server is not asked yet.
    ///
    /// # Errors
    /// When the address is none or has a password, or certificates cannot be read.
    pub(in crate::log) fn of_environment(
        project: &str,
        id: &str,
        name: &str,
        settings: &[(String, Value)],
        environment: &Environment<'_>,
        timeout: Duration,
    ) -> Result<WandbMode> {
        if environment.get("WANDB_MODE").is_some_and(|mode| mode != "online") {
            return Ok(WandbMode::Offline);
        }
        let base = environment.get("WANDB_BASE_URL").unwrap_or_else(|| CLOUD.to_owned());
        let base = base.trim_end_matches('/');
        if let Some(masked) = masked(base) {
            let why = "must have no user and password; set WANDB_API_KEY";
            return Err(TrainError::setting("WANDB_BASE_URL", masked, why));
        }
        let Some(host) = host_of(base) else {
            return Err(TrainError::setting("WANDB_BASE_URL", base, format!("is not a URL such as {CLOUD}")));
        };
        let Some(password) = environment.wandb_key(&host) else { return Ok(WandbMode::NoKey(host)) };
        let client = JsonClient::new(Credentials::Basic { user: "api".to_owned(), password }, timeout)
            .map_err(|error| TrainError::setting("log.wandb", project, error.to_string()))?;
        Ok(WandbMode::Online(Box::new(Self {
            client,
            base: base.to_owned(),
            entity: environment.get("WANDB_ENTITY"),
            project: project.to_owned(),
            id: id.to_owned(),
            name: name.to_owned(),
            settings: settings.to_vec(),
            began: seconds(),
            stream: String::new(),
            lines: 0,
            summary: BTreeMap::new(),
        })))
    }

    /// The numbers of a row, with its times.
    fn numbers(&self, row: &Row) -> impl Iterator<Item = (String, f64)> {
        let times = [("_step", row.step as f64), ("_runtime", row.time - self.began), ("_timestamp", row.time)];
        let times = times.map(|(name, value)| (name.to_owned(), value));
        row.numbers.clone().into_iter().chain(times)
    }
}

impl Tracker for Box<WandbServer> {
    fn name(&self) -> String {
        format!("W&B at {}", self.base)
    }

    fn begin(&mut self) -> Result<String, JsonError> {
        let config: Map<String, Value> =
            self.settings.iter().map(|(key, value)| (key.clone(), json!({ "value": value }))).collect();
        let variables = json!({
            "name": self.id, "project": self.project, "entity": self.entity, "displayName": self.name,
            "config": Value::from(config).to_string(), "program": "ridge train",
        });
        let answer =
            self.client.post(&format!("{}/graphql", self.base), &json!({ "query": UPSERT, "variables": variables }))?;
        let bucket = &answer["data"]["upsertBucket"]["bucket"];
        let name = |pointer: &str| bucket.pointer(pointer).and_then(Value::as_str);
        let (Some(entity), Some(project)) = (name("/project/entity/name"), name("/project/name")) else {
            let said = answer.pointer("/errors/0/message").and_then(Value::as_str);
            let said = said.unwrap_or("its answer has no run; check WANDB_BASE_URL");
            return Err(self.client.refusal(&format!("the server does not make the run: {said}")));
        };
        let [entity, project, id] = [entity, project, &self.id].map(path_segment);
        self.lines = bucket["historyLineCount"].as_u64().unwrap_or(0);
        self.stream = format!("{}/files/{entity}/{project}/{id}/file_stream", self.base);
        let pages = if self.base == CLOUD { "https://wandb.ai" } else { &self.base };
        Ok(format!("{pages}/{entity}/{project}/runs/{id}"))
    }

    fn send(&mut self, rows: &[Row]) -> Result<(), JsonError> {
        if rows.is_empty() {
            return self.client.post(&self.stream, &json!({ "complete": false, "failed": false })).map(|_| ());
        }
        let lines: Vec<Vec<(String, f64)>> = rows.iter().map(|row| self.numbers(row).collect()).collect();
        let content: Vec<String> =
            lines.iter().map(|line| object(line.iter().map(|(name, value)| (name, *value)))).collect();
        self.summary.extend(lines.into_iter().flatten());
        let summary = object(self.summary.iter().map(|(name, value)| (name, *value)));
        let files = json!({
            "wandb-history.jsonl": { "offset": self.lines, "content": content },
            "wandb-summary.json": { "offset": 0, "content": [summary] },
        });
        self.client.post(&self.stream, &json!({ "files": files }))?;
        self.lines += rows.len() as u64;
        Ok(())
    }

    fn end(&mut self, ended: RunEnded) -> Result<(), JsonError> {
        let code = u8::from(ended == RunEnded::Failed);
        self.client.post(&self.stream, &json!({ "complete": true, "exitcode": code })).map(|_| ())
    }
}

/// Numbers as the text of a JSON object, with the literals `NaN` and `Infinity` as the client of W&B writes them.
fn object<'a>(numbers: impl Iterator<Item = (&'a String, f64)>) -> String {
    let pair = |(name, value): (&String, f64)| {
        let value = match value {
            _ if value.is_nan() => "NaN".to_owned(),
            _ if value.is_infinite() => if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned(),
            _ if value.fract() == 0.0 && value.abs() < 1e15 => format!("{value:.0}"),
            _ => Value::from(value).to_string(),
        };
        format!("{}:{value}", Value::from(name.as_str()))
    };
    format!("{{{}}}", numbers.map(pair).collect::<Vec<_>>().join(","))
}

#[cfg(test)]
mod tests {
    use ridge_testing::{JsonReply, JsonRequest, JsonServer};

    use super::*;
    use crate::log::remote::{Delivery, Pace};

    /// The run on a server at `base`, with a key.
    fn run(base: &str) -> Box<WandbServer> {
        let base = base.to_owned();
        let variables = move |name: &str| match name {
            "WANDB_BASE_URL" => Some(format!("{base}/")),
            "WANDB_API_KEY" => Some("key1".to_owned()),
            "WANDB_ENTITY" => Some("my team".to_owned()),
            _ => None,
        };
        let settings = [("train.steps".to_owned(), json!(6))];
        let timeout = Duration::from_secs(5);
        let mode = WandbServer::of_environment("p", "abcd1234", "run", &settings, &Environment(&variables), timeout);
        let WandbMode::Online(run) = mode.expect("is made") else { panic!("there is a key") };
        run
    }

    fn answer(request: &JsonRequest, lines: u64) -> JsonReply {
        let project = json!({ "name": "p", "entity": { "name": "my team" } });
        let bucket = json!({ "name": "abcd1234", "project": project, "historyLineCount": lines });
        let body = match request.target.as_str() {
            "/graphql" => json!({ "data": { "upsertBucket": { "bucket": bucket, "inserted": lines == 0 } } }),
            "/files/my%20team/p/abcd1234/file_stream" => json!({ "exitcode": null, "limits": {} }),
            target => panic!("{target}"),
        };
        JsonReply::Body(200, body.to_string())
    }

    fn bodies(server: &JsonServer) -> Vec<Value> {
        server.seen().iter().map(|request| serde_json::from_str(&request.body).expect("is JSON")).collect()
    }

    fn row(step: u64, name: &str, value: f64) -> Row {
        Row { step, time: 5.5e9, numbers: vec![(name.to_owned(), value)] }
    }

    fn line(text: &Value) -> Value {
        serde_json::from_str(text.as_str().expect("is text")).expect("is JSON")
    }

    #[test]
    fn a_run_is_made_with_its_settings_and_gets_lines_and_an_end() {
        let there = JsonServer::start(|request, _| answer(request, 0));
        let delivery = Delivery::start(run(&there.url()), Pace::default());
        delivery.push(row(1, "train/loss", 2.0));
        delivery.push(row(1, "validation/loss", f64::INFINITY));
        delivery.end(RunEnded::Failed);
        let page = format!("W&B at {0}: {0}/my%20team/p/runs/abcd1234", there.url());
        assert_eq!(delivery.close("see the file"), [page]);
        // "api:key1" in base64.
        assert!(there.seen().iter().all(|request| request.authorization.as_deref() == Some("Basic YXBpOmtleTE=")));
        let bodies = bodies(&there);
        let variables = &bodies[0]["variables"];
        assert_eq!((&variables["entity"], &variables["project"]), (&json!("my team"), &json!("p")));
        assert_eq!(variables["name"], "abcd1234");
        assert_eq!(line(&variables["config"]), json!({ "train.steps": { "value": 6 } }));
        let history = &bodies[1]["files"]["wandb-history.jsonl"];
        assert_eq!(history["offset"], 0);
        let lines = history["content"].as_array().expect("lines");
        let first = line(&lines[0]);
        assert_eq!((lines.len(), &first["train/loss"], &first["_step"]), (2, &json!(2), &json!(1)));
        let second = lines[1].as_str().expect("is text");
        assert!(second.starts_with("{\"validation/loss\":Infinity,\"_step\":1,"), "{second}");
        let summary = bodies[1]["files"]["wandb-summary.json"]["content"][0].as_str().expect("is text");
        assert!(summary.ends_with("\"train/loss\":2,\"validation/loss\":Infinity}"), "{summary}");
        assert_eq!(bodies[2..], [json!({ "complete": true, "exitcode": 1 })]);
    }

    /// The offset is what keeps a line from being there twice.
    #[test]
    fn a_repeated_request_has_the_same_offset_and_a_run_that_continues_goes_on_behind_its_lines() {
        let there = JsonServer::start(|request, before| match before {
            1 => JsonReply::Body(500, String::new()),
            _ => answer(request, 40),
        });
        let mut run = run(&there.url());
        run.begin().expect("the server answers");
        let rows = [row(9, "a", 1.0), row(10, "a", 2.0)];
        assert!(run.send(&rows).is_err_and(|error| error.passing));
        run.send(&rows).expect("the server answers");
        run.send(&rows[1..]).expect("the server answers");
        run.send(&[]).expect("the server answers");
        let bodies = bodies(&there);
        let offset = |body: &Value| body["files"]["wandb-history.jsonl"]["offset"].as_u64();
        assert_eq!(bodies[1..].iter().map(offset).collect::<Vec<_>>(), [Some(40), Some(40), Some(42), None]);
        assert_eq!(bodies[4], json!({ "complete": false, "failed": false }));
    }

    #[test]
    fn refusals_say_why_without_the_key() {
        let there = JsonServer::start(|request, before| match before {
            0 => JsonReply::Body(200, json!({ "errors": [{ "message": "key1 may not" }] }).to_string()),
            1 => JsonReply::Body(401, json!({ "error": request.authorization }).to_string()),
            _ => JsonReply::Body(307, String::new()),
        });
        let mut run = run(&there.url());
        let mut refused = || run.begin().expect_err("is refused").to_string();
        assert_eq!(refused(), "the server does not make the run: *** may not");
        assert_eq!(refused(), "the server responded with 401 Unauthorized: Basic ***");
        assert_eq!(refused(), "the server responded with 307 Temporary Redirect");
    }

    #[test]
    fn without_a_key_or_offline_there_is_no_server() {
        let mode = |set: &'static [(&'static str, &'static str)]| {
            let variables = |name: &str| set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            WandbServer::of_environment("p", "id", "run", &[], &Environment(&variables), Duration::from_secs(1))
        };
        assert!(matches!(mode(&[]), Ok(WandbMode::NoKey(host)) if host == "api.wandb.ai"));
        let own = mode(&[("WANDB_BASE_URL", "http://own:8080/x")]);
        assert!(matches!(own, Ok(WandbMode::NoKey(host)) if host == "own"));
        let six = mode(&[("WANDB_BASE_URL", "HTTP://[::1]:8080")]);
        assert!(matches!(six, Ok(WandbMode::NoKey(host)) if host == "::1"));
        let offline = mode(&[("WANDB_MODE", "offline"), ("WANDB_API_KEY", "k")]);
        assert!(matches!(offline, Ok(WandbMode::Offline)));
        assert!(matches!(mode(&[("WANDB_MODE", "online"), ("WANDB_API_KEY", "k")]), Ok(WandbMode::Online(_))));
        let wrong = mode(&[("WANDB_BASE_URL", "own:8080")]).err().expect("is no URL").to_string();
        assert_eq!(wrong, "WANDB_BASE_URL = own:8080: is not a URL such as https://api.wandb.ai");
        for (base, shown) in [("https://me:secret@own/x", "https://***@own"), ("me:secret@own", "***@own")] {
            let with = [("WANDB_BASE_URL", base), ("WANDB_API_KEY", "k")];
            let variables =
                |name: &str| with.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            let (environment, timeout) = (Environment(&variables), Duration::from_secs(1));
            let refused = WandbServer::of_environment("p", "id", "run", &[], &environment, timeout).err();
            let wanted = format!("WANDB_BASE_URL = {shown}: must have no user and password; set WANDB_API_KEY");
            assert_eq!(refused.map(|error| error.to_string()), Some(wanted));
        }
    }
}
