//! A run on an MLflow tracking server (MLflow documentation, "REST API", version 2.0).

use std::time::Duration;

use ridge_hub::{JsonClient, JsonError, path_segment};
use serde_json::{Value, json};

use super::credentials::Environment;
use super::queue::{Row, Tracker};
use crate::error::{Result, TrainError};
use crate::log::event::RunEnded;
use crate::log::jsonl::{milliseconds, seconds};

/// What a server takes in one request (REST API, "Log Batch": request limits), and the length of a parameter that servers of all
/// versions take.
const MAX_METRICS: usize = 1000;
const MAX_PARAMETERS: usize = 100;
const MAX_VALUE: usize = 500;
/// The tag by which a run that continues finds itself: servers choose the ids of runs.
const TAG: &str = "ridge.run_id";

/// A run that is reported to a server.
pub(in crate::log) struct MlflowServer {
    client: JsonClient,
    /// The address, without a slash at the end.
    uri: String,
    experiment: String,
    id: String,
    name: String,
    settings: Vec<(String, Value)>,
    began: f64,
    /// The server's id of the run.
    run: String,
}

impl MlflowServer {
    /// The run `id` on the server at `uri`, with `settings` by `section.key` as parameters. The server is not asked yet.
    ///
    /// # Errors
    /// When the address has a password or certificates cannot be read.
    pub(in crate::log) fn new(
        uri: &str,
        id: &str,
        name: &str,
        settings: &[(String, Value)],
        environment: &Environment<'_>,
        timeout: Duration,
    ) -> Result<Self> {
        let client = JsonClient::new(environment.mlflow(), timeout)
            .map_err(|error| TrainError::setting("log.mlflow", uri, error.to_string()))?;
        Ok(Self {
            client,
            uri: uri.trim_end_matches('/').to_owned(),
            experiment: environment.get("MLFLOW_EXPERIMENT_NAME").unwrap_or_else(|| "ridge".to_owned()),
            id: id.to_owned(),
            name: name.to_owned(),
            settings: settings.to_vec(),
            began: seconds(),
            run: String::new(),
        })
    }

    fn url(&self, call: &str) -> String {
        format!("{}/api/2.0/mlflow/{call}", self.uri)
    }

    fn post(&self, call: &str, body: &Value) -> Result<Value, JsonError> {
        self.client.post(&self.url(call), body)
    }

    /// The id of the experiment, which is made if there is none.
    fn experiment_id(&self) -> Result<String, JsonError> {
        let known = || {
            let call = format!("experiments/get-by-name?experiment_name={}", path_segment(&self.experiment));
            let answer = self.client.get(&self.url(&call))?;
            self.text(&answer, "/experiment/experiment_id")
        };
        let is = |error: &JsonError, code: &str| error.body["error_code"] == code;
        match known() {
            Err(error) if is(&error, "RESOURCE_DOES_NOT_EXIST") => {}
            other => return other,
        }
        match self.post("experiments/create", &json!({ "name": self.experiment })) {
            Ok(answer) => self.text(&answer, "/experiment_id"),
            // Another run was quicker.
            Err(error) if is(&error, "RESOURCE_ALREADY_EXISTS") => known(),
            Err(error) => Err(error),
        }
    }

    /// The run that an earlier process, or an earlier request, began.
    fn begun(&self, experiment: &str) -> Result<Option<Value>, JsonError> {
        let filter = format!("tags.`{TAG}` = '{}'", self.id);
        let ask = json!({ "experiment_ids": [experiment], "filter": filter, "max_results": 1 });
        let answer = self.post("runs/search", &ask)?;
        Ok(answer.pointer("/runs/0").cloned())
    }

    /// Adds the settings that the run does not have. Values cannot be changed: those of a run that continues stay.
    fn log_parameters(&self, run: &Value) -> Result<(), JsonError> {
        let known: Vec<&str> =
            run["data"]["params"].as_array().into_iter().flatten().filter_map(|entry| entry["key"].as_str()).collect();
        let new: Vec<Value> = self
            .settings
            .iter()
            .filter(|(key, _)| !known.contains(&key.as_str()))
            .map(|(key, value)| {
                let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                json!({ "key": key, "value": text.chars().take(MAX_VALUE).collect::<String>() })
            })
            .collect();
        new.chunks(MAX_PARAMETERS)
            .try_for_each(|params| self.log_batch(&json!({ "run_id": self.run, "params": params })))
    }

    /// The text at `pointer` of an answer.
    fn text(&self, answer: &Value, pointer: &str) -> Result<String, JsonError> {
        let found = answer.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
        let problem = || format!("the server's answer has no {}; check its address", &pointer[1..]);
        found.ok_or_else(|| self.client.refusal(&problem()))
    }

    fn log_batch(&self, batch: &Value) -> Result<(), JsonError> {
        self.post("runs/log-batch", batch).map(|_| ())
    }
}

impl Tracker for MlflowServer {
    fn name(&self) -> String {
        format!("MLflow at {}", self.uri)
    }

    fn begin(&mut self) -> Result<String, JsonError> {
        let experiment = self.experiment_id()?;
        let run = match self.begun(&experiment)? {
            Some(run) => {
                self.run = self.text(&run, "/info/run_id")?;
                self.post("runs/update", &json!({ "run_id": self.run, "status": "RUNNING" }))?;
                run
            }
            None => {
                let tag = |key: &str, value: &str| json!({ "key": key, "value": value });
                let tags = [
                    tag("mlflow.runName", &self.name),
                    tag("mlflow.source.name", "ridge train"),
                    tag("mlflow.source.type", "LOCAL"),
                    tag(TAG, &self.id),
                ];
                let create = json!({
                    "experiment_id": experiment, "run_name": self.name, "start_time": milliseconds(self.began), "tags": tags,
                });
                let answer = self.post("runs/create", &create)?;
                self.run = self.text(&answer, "/run/info/run_id")?;
                answer["run"].clone()
            }
        };
        self.log_parameters(&run)?;
        Ok(format!("{}/#/experiments/{experiment}/runs/{}", self.uri, self.run))
    }

    /// A number that was sent before has the same key, time and step, and is kept once.
    fn send(&mut self, rows: &[Row]) -> Result<(), JsonError> {
        let metric = |row: &Row, (key, value): &(String, f64)| json!({ "key": key, "value": number(*value), "timestamp": milliseconds(row.time), "step": row.step });
        let metrics: Vec<Value> =
            rows.iter().flat_map(|row| row.numbers.iter().map(move |pair| metric(row, pair))).collect();
        metrics
            .chunks(MAX_METRICS)
            .try_for_each(|metrics| self.log_batch(&json!({ "run_id": self.run, "metrics": metrics })))
    }

    fn end(&mut self, ended: RunEnded) -> Result<(), JsonError> {
        let status = match ended {
            RunEnded::Finished => "FINISHED",
            RunEnded::Failed => "FAILED",
            RunEnded::Stopped => "KILLED",
        };
        let update = json!({ "run_id": self.run, "status": status, "end_time": milliseconds(seconds()) });
        self.post("runs/update", &update).map(|_| ())
    }
}

/// A number as JSON, where values that are none are texts, as protocol buffers have them ("ProtoJSON format").
fn number(value: f64) -> Value {
    match value {
        _ if value.is_finite() => value.into(),
        _ if value.is_nan() => "NaN".into(),
        _ if value > 0.0 => "Infinity".into(),
        _ => "-Infinity".into(),
    }
}

#[cfg(test)]
mod tests {
    use ridge_testing::{JsonReply, JsonRequest, JsonServer};

    use super::*;
    use crate::log::remote::{Delivery, Pace};

    const ANONYMOUS: Environment<'static> = Environment(&|_| None);

    fn server(uri: &str, environment: &Environment<'_>) -> MlflowServer {
        let settings = [("train.steps".to_owned(), json!(6)), ("optimizer.name".to_owned(), json!("adamw"))];
        MlflowServer::new(uri, "abc", "run", &settings, environment, Duration::from_secs(5)).expect("is made")
    }

    fn row(step: u64, loss: f64) -> Row {
        Row { step, time: 2.5, numbers: vec![("train/loss".to_owned(), loss)] }
    }

    /// As a server answers that has `experiment` and `run` or not.
    fn answer(request: &JsonRequest, experiment: bool, run: bool) -> JsonReply {
        let call = request.target.strip_prefix("/api/2.0/mlflow/").expect("a call").split('?').next();
        let known =
            json!({ "info": { "run_id": "r1" }, "data": { "params": [{ "key": "train.steps", "value": "4" }] } });
        let (status, body) = match call.expect("has a name") {
            "experiments/get-by-name" if experiment => (200, json!({ "experiment": { "experiment_id": "7" } })),
            "experiments/get-by-name" => (404, json!({ "error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no" })),
            "experiments/create" => (200, json!({ "experiment_id": "8" })),
            "runs/search" => (200, if run { json!({ "runs": [known] }) } else { json!({}) }),
            "runs/create" => (200, json!({ "run": { "info": { "run_id": "r2" }, "data": {} } })),
            "runs/update" | "runs/log-batch" => (200, json!({})),
            call => panic!("{call}"),
        };
        JsonReply::Body(status, body.to_string())
    }

    fn calls(server: &JsonServer) -> Vec<(String, Value)> {
        let call = |request: JsonRequest| {
            let body = serde_json::from_str(&request.body).unwrap_or_default();
            (request.target.trim_start_matches("/api/2.0/mlflow/").to_owned(), body)
        };
        server.seen().into_iter().map(call).collect()
    }

    #[test]
    fn a_run_is_made_with_its_settings_and_gets_numbers_and_an_end() {
        let there = JsonServer::start(|request, _| answer(request, false, false));
        let delivery = Delivery::start(server(&format!("{}/", there.url()), &ANONYMOUS), Pace::default());
        delivery.push(row(1, 2.0));
        delivery.push(row(2, f64::NAN));
        delivery.end(RunEnded::Stopped);
        let page = format!("MLflow at {0}: {0}/#/experiments/8/runs/r2", there.url());
        assert_eq!(delivery.close("see the file"), [page]);
        let calls = calls(&there);
        let names: Vec<&str> = calls.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(
            names,
            [
                "experiments/get-by-name?experiment_name=ridge",
                "experiments/create",
                "runs/search",
                "runs/create",
                "runs/log-batch",
                "runs/log-batch",
                "runs/update"
            ]
        );
        assert_eq!(calls[2].1["filter"], "tags.`ridge.run_id` = 'abc'");
        assert_eq!(calls[3].1["tags"][3], json!({ "key": "ridge.run_id", "value": "abc" }));
        let settings = json!([
            { "key": "train.steps", "value": "6" }, { "key": "optimizer.name", "value": "adamw" },
        ]);
        assert_eq!(calls[4].1, json!({ "run_id": "r2", "params": settings }));
        let metrics = json!([
            { "key": "train/loss", "value": 2.0, "timestamp": 2500, "step": 1 },
            { "key": "train/loss", "value": "NaN", "timestamp": 2500, "step": 2 },
        ]);
        assert_eq!(calls[5].1, json!({ "run_id": "r2", "metrics": metrics }));
        assert_eq!((&calls[6].1["run_id"], &calls[6].1["status"]), (&json!("r2"), &json!("KILLED")));
    }

    #[test]
    fn a_run_that_continues_is_found_and_keeps_its_settings() {
        let there = JsonServer::start(|request, _| answer(request, true, true));
        let mut run = server(&there.url(), &ANONYMOUS);
        run.begin().expect("the server answers");
        let calls = calls(&there);
        assert_eq!(calls[2], ("runs/update".to_owned(), json!({ "run_id": "r1", "status": "RUNNING" })));
        let new = json!([{ "key": "optimizer.name", "value": "adamw" }]);
        assert_eq!(calls[3..], [("runs/log-batch".to_owned(), json!({ "run_id": "r1", "params": new }))]);
    }

    #[test]
    fn more_numbers_than_a_request_takes_are_several() {
        let there = JsonServer::start(|request, _| answer(request, true, true));
        let mut run = server(&there.url(), &ANONYMOUS);
        let rows: Vec<Row> = (0..2001).map(|step| row(step, 1.0)).collect();
        run.send(&rows).expect("the server answers");
        let sizes: Vec<usize> =
            calls(&there).iter().map(|(_, body)| body["metrics"].as_array().map_or(0, Vec::len)).collect();
        assert_eq!(sizes, [1000, 1000, 1]);
    }

    #[test]
    fn credentials_are_sent_and_shown_nowhere() {
        let there = JsonServer::start(|request, _| {
            let repeated = format!("no access with {}, hunter2", request.authorization.clone().unwrap_or_default());
            JsonReply::Body(401, json!({ "message": repeated }).to_string())
        });
        let variables = |name: &str| match name {
            "MLFLOW_TRACKING_USERNAME" => Some("me".to_owned()),
            "MLFLOW_TRACKING_PASSWORD" => Some("hunter2".to_owned()),
            "MLFLOW_TRACKING_TOKEN" => Some("unused".to_owned()),
            _ => None,
        };
        let delivery = Delivery::start(server(&there.url(), &Environment(&variables)), Pace::default());
        delivery.push(row(1, 2.0));
        delivery.end(RunEnded::Finished);
        let notes = delivery.close("see the file");
        let name = format!("MLflow at {}", there.url());
        let problem = "the server responded with 401 Unauthorized: no access with Basic ***, ***";
        assert_eq!(
            notes,
            [
                format!("{name}: {problem}; training goes on"),
                format!("{name}: 1 of 1 reports were not delivered ({problem}); see the file")
            ]
        );
        // "me:hunter2" in base64.
        assert_eq!(there.seen()[0].authorization.as_deref(), Some("Basic bWU6aHVudGVyMg=="));
        assert_eq!(there.seen().len(), 1, "what is refused is not asked again");
    }

    #[test]
    fn a_server_that_is_silent_or_broken_for_a_while_gets_all_in_the_end() {
        let there = JsonServer::start(|request, before| match before {
            0 => JsonReply::Silence,
            1 => JsonReply::Body(503, String::new()),
            2 => JsonReply::Body(500, "<html>".to_owned()),
            _ => answer(request, true, false),
        });
        let mut run = server(&there.url(), &ANONYMOUS);
        run.client = JsonClient::new(ridge_hub::Credentials::None, Duration::from_millis(200)).expect("is made");
        let pace = Pace { first_wait: Duration::from_millis(5), ..Pace::default() };
        let delivery = Delivery::start(run, pace);
        delivery.push(row(1, 2.0));
        // Behind the end there are three attempts, and the fourth request is the first that is answered.
        while there.seen().is_empty() {
            std::thread::sleep(Duration::from_millis(1));
        }
        delivery.end(RunEnded::Finished);
        let notes = delivery.close("see the file");
        assert!(notes.len() == 2 && notes[0].contains("timeout"), "{notes:?}");
        assert_eq!(calls(&there).last().expect("is asked").1["status"], "FINISHED");
    }

    #[test]
    fn an_answer_of_something_else_is_refused() {
        let there = JsonServer::start(|_, _| JsonReply::Body(200, "<html>".to_owned()));
        let error = server(&there.url(), &ANONYMOUS).begin().expect_err("is no MLflow");
        assert_eq!(error.to_string(), "the server's answer is not JSON; check its address");
        let there = JsonServer::start(|_, _| JsonReply::Body(200, "{}".to_owned()));
        let error = server(&there.url(), &ANONYMOUS).begin().expect_err("is no MLflow");
        assert_eq!(error.to_string(), "the server's answer has no experiment/experiment_id; check its address");
    }
}
