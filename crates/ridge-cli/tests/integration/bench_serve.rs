//! `ridge bench serve` against a small server of the test that answers, refuses, hangs up and speaks nonsense, and
//! against `ridge serve`. No speed is asserted.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::server::Server;
use crate::common::{self, Ran, repository, ridge};
use serde_json::{Value, json};

/// What the fake server does with the request of this number, from 0 on.
type Script = fn(number: usize, request: &Value, stream: &mut TcpStream) -> std::io::Result<()>;

/// A server that does as it is told, and remembers what it was asked.
struct Fake {
    address: SocketAddr,
    asked: Arc<Mutex<Vec<Value>>>,
    most: Arc<AtomicUsize>,
}

impl Fake {
    fn start(script: Script) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let fake = Self { address, asked: Arc::clone(&asked), most: Arc::clone(&most) };
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (asked, running, most) = (Arc::clone(&asked), Arc::clone(&running), Arc::clone(&most));
                std::thread::spawn(move || {
                    let mut reader = BufReader::new(stream.try_clone().unwrap());
                    let mut stream = stream;
                    while let Some((path, body)) = read_request(&mut reader) {
                        // Its load is told by nobody.
                        if path == "/metrics" {
                            if respond(&mut stream, 404, "text/plain", "").is_err() {
                                return;
                            }
                            continue;
                        }
                        most.fetch_max(running.fetch_add(1, SeqCst) + 1, SeqCst);
                        let done = if path == "/v1/models" {
                            respond(
                                &mut stream,
                                200,
                                "application/json",
                                &json!({ "data": [{ "id": "fake" }] }).to_string(),
                            )
                        } else {
                            let mut request: Value = serde_json::from_slice(&body).unwrap();
                            request["path"] = json!(path);
                            let number = {
                                let mut asked = asked.lock().unwrap();
                                asked.push(request.clone());
                                asked.len() - 1
                            };
                            script(number, &request, &mut stream)
                        };
                        running.fetch_sub(1, SeqCst);
                        if done.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        fake
    }

    fn bench(&self, args: &[&str]) -> Ran {
        let url = format!("http://{}", self.address);
        ridge(&[&["bench", "serve", "--url", &url], args].concat())
    }

    fn report(&self, args: &[&str]) -> Value {
        object(&self.bench(&[&["--json"], args].concat()))
    }

    /// Requests but the first, which only asks whether there is a server.
    fn asked(&self) -> Vec<Value> {
        self.asked.lock().unwrap()[1..].to_vec()
    }
}

fn object(ran: &Ran) -> Value {
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    serde_json::from_str(&ran.stdout).unwrap()
}

fn read_request(reader: &mut BufReader<TcpStream>) -> Option<(String, Vec<u8>)> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|n| *n > 0)?;
    let path = line.split(' ').nth(1)?.to_owned();
    let mut length = 0;
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        let header = header.trim().to_lowercase();
        if header.is_empty() {
            break;
        }
        if let Some(n) = header.strip_prefix("content-length:") {
            length = n.trim().parse().ok()?;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((path, body))
}

fn respond(stream: &mut TcpStream, status: u16, kind: &str, body: &str) -> std::io::Result<()> {
    let length = body.len();
    write!(stream, "HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n{body}")
}

fn begin(stream: &mut TcpStream) -> std::io::Result<()> {
    write!(stream, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
}

fn chunk(stream: &mut TcpStream, text: &str) -> std::io::Result<()> {
    write!(stream, "{:x}\r\n{text}\r\n", text.len())?;
    stream.flush()
}

fn token(request: &Value, text: &str, finish: Option<&str>) -> String {
    let choice = match request["messages"].is_array() {
        true => json!({ "index": 0, "delta": { "content": text }, "finish_reason": finish }),
        false => json!({ "index": 0, "text": text, "finish_reason": finish }),
    };
    format!("data: {}\n\n", json!({ "choices": [choice] }))
}

/// As many tokens as asked, one an event.
fn answer(_: usize, request: &Value, stream: &mut TcpStream) -> std::io::Result<()> {
    begin(stream)?;
    let tokens = request["max_tokens"].as_u64().unwrap();
    for i in 0..tokens {
        chunk(stream, &token(request, "a ", (i + 1 == tokens).then_some("length")))?;
        std::thread::sleep(Duration::from_millis(1));
    }
    let prompt = request["prompt"].as_array().map_or(1, Vec::len);
    let usage = json!({ "choices": [], "usage": { "prompt_tokens": prompt, "completion_tokens": tokens } });
    chunk(stream, &format!("data: {usage}\n\ndata: [DONE]\n\n"))?;
    write!(stream, "0\r\n\r\n")
}

/// Answers none but the one that goes ahead until so many have come.
fn hold(number: usize, came: &AtomicUsize, many: usize) {
    came.fetch_add(usize::from(number > 0), SeqCst);
    while number > 0 && came.load(SeqCst) < many {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_closed_loop_keeps_as_many_at_a_time_as_it_should() {
    fn four_at_first(number: usize, request: &Value, stream: &mut TcpStream) -> std::io::Result<()> {
        static CAME: AtomicUsize = AtomicUsize::new(0);
        hold(number, &CAME, 4);
        answer(number, request, stream)
    }
    let fake = Fake::start(four_at_first);
    let report = fake.report(&["--concurrency", "4", "--requests", "20", "--prompt", "7", "--generate", "5"]);
    let asked = fake.asked();
    assert_eq!(asked.len(), 20);
    for request in &asked {
        assert_eq!((&request["path"], &request["model"]), (&json!("/v1/completions"), &json!("fake")));
        assert_eq!((&request["max_tokens"], &request["ignore_eos"]), (&json!(5), &json!(true)));
        assert_eq!(request["prompt"].as_array().unwrap().len(), 7);
    }
    assert_eq!(fake.most.load(SeqCst), 4);
    let r = &report["report"];
    assert_eq!((&r["requests"], &r["answered"], &r["failed"]), (&json!(20), &json!(20), &json!(0)));
    assert_eq!((&r["prompt_tokens"], &r["output_tokens"]), (&json!(140), &json!(100)));
    assert_eq!((&r["ttft_seconds"]["count"], &r["itl_seconds"]["count"]), (&json!(20), &json!(80)));
    assert_eq!((&r["peak_concurrency"], &r["short_answers"]), (&json!(4), &json!(0)));
    for (low, high) in [("p50", "p90"), ("p90", "p95"), ("p95", "p99"), ("p99", "max")] {
        assert!(r["e2e_seconds"][low].as_f64() <= r["e2e_seconds"][high].as_f64());
    }
    assert_eq!(r["tpot_seconds"]["count"], 20);
    assert!(r["e2e_seconds"]["mean"].as_f64() > r["ttft_seconds"]["mean"].as_f64());
}

#[test]
fn an_open_loop_does_not_wait_for_slow_answers() {
    fn when_all_came(number: usize, request: &Value, stream: &mut TcpStream) -> std::io::Result<()> {
        static CAME: AtomicUsize = AtomicUsize::new(0);
        hold(number, &CAME, 30);
        answer(number, request, stream)
    }
    let fake = Fake::start(when_all_came);
    let args = ["--rate", "100", "--requests", "30", "--prompt", "4..9", "--generate", "2"];
    let report = fake.report(&args);
    // None is answered before the last one came.
    assert_eq!((&report["report"]["answered"], &report["report"]["peak_concurrency"]), (&json!(30), &json!(30)));
    assert_eq!(report["report"]["sent_late_seconds"]["count"], 30);
    // The same seed asks the same.
    let prompts = |fake: &Fake| {
        let mut prompts: Vec<String> = fake.asked().iter().map(|r| r["prompt"].to_string()).collect();
        prompts.sort();
        prompts
    };
    let (again, other) = (Fake::start(answer), Fake::start(answer));
    again.report(&args);
    other.report(&[&args[..], &["--seed", "1"]].concat());
    assert_eq!(prompts(&fake), prompts(&again));
    assert_ne!(prompts(&fake), prompts(&other));
    assert!(fake.asked().iter().all(|r| (4..=9).contains(&r["prompt"].as_array().unwrap().len())));
}

#[test]
fn every_kind_of_failure_is_counted_and_none_is_averaged() {
    fn mixed(number: usize, request: &Value, stream: &mut TcpStream) -> std::io::Result<()> {
        let broken = || Err(std::io::Error::other("hang up"));
        match number % 7 {
            1 => respond(stream, 429, "application/json", r#"{"error": {"message": "too \u001b[31mmany"}}"#),
            2 => {
                begin(stream)?;
                chunk(stream, &token(request, "a", None))?;
                stream.shutdown(std::net::Shutdown::Both)?;
                broken()
            }
            3 => {
                begin(stream)?;
                chunk(stream, "data: {\"choices\": [\n\n")?;
                stream.shutdown(std::net::Shutdown::Both)?;
                broken()
            }
            4 => {
                begin(stream)?;
                chunk(stream, "data: {\"error\": {\"message\": \"out of memory\"}}\n\n")?;
                write!(stream, "0\r\n\r\n")
            }
            5 => respond(stream, 200, "text/html", "<p>welcome</p>"),
            6 => {
                begin(stream)?;
                chunk(stream, "data: [DONE]\n\n")?;
                write!(stream, "0\r\n\r\n")
            }
            _ => answer(number, request, stream),
        }
    }
    let fake = Fake::start(mixed);
    // One at a time: the first is the one that asks whether there is a server; then 1, 2, .. 21.
    let args = ["--concurrency", "1", "--requests", "21", "--generate", "3", "--slo", "e2e=100s"];
    let report = &fake.report(&args)["report"];
    assert_eq!((&report["answered"], &report["failed"], &report["good"]), (&json!(3), &json!(18), &json!(3)));
    let failures = report["failures"].as_object().unwrap();
    let counts: Vec<(&str, u64)> = failures.iter().map(|(k, f)| (k.as_str(), f["count"].as_u64().unwrap())).collect();
    assert_eq!(counts, [("closed", 3), ("empty", 3), ("http 429", 3), ("malformed", 6), ("server", 3)]);
    assert_eq!(failures["http 429"]["example"], "too [31mmany");
    assert_eq!(failures["server"]["example"], "out of memory");
    for times in ["ttft_seconds", "e2e_seconds", "tpot_seconds"] {
        assert_eq!(report[times]["count"], 3, "{times}");
    }
    let text = Fake::start(mixed).bench(&args).stdout;
    assert!(text.contains("http 429   3  too [31mmany"), "{text}");
    assert!(text.contains("answered  3 of 21 requests") && text.contains("goodput   3 (14.3%)"), "{text}");
}

#[test]
fn a_server_that_only_fails_ends_it_with_its_words() {
    fn refuses(_: usize, _: &Value, stream: &mut TcpStream) -> std::io::Result<()> {
        respond(stream, 400, "application/json", r#"{"error": {"message": "ignore_eos is not known"}}"#)
    }
    fn later(number: usize, request: &Value, stream: &mut TcpStream) -> std::io::Result<()> {
        if number == 0 { answer(number, request, stream) } else { refuses(number, request, stream) }
    }
    let ran = Fake::start(refuses).bench(&[]);
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("(http 400): ignore_eos is not known"), "{}", ran.stderr);
    let ran = Fake::start(later).bench(&["--requests", "5", "--plot", "/dev/null"]);
    assert_eq!(ran.code, 1);
    assert!(ran.stdout.contains("http 400  5") && ran.stderr.contains("none of 5 requests"), "{}", ran.stderr);
    // A port of an open connection, at which nobody listens, and which no other test is given meanwhile.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let connection = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let address = connection.local_addr().unwrap();
    let ran = ridge(&["bench", "serve", "--url", &address.to_string()]);
    assert!(ran.code == 1 && ran.stderr.contains("(connect)"), "{}", ran.stderr);
}

#[test]
fn a_trace_is_sent_at_its_times_with_its_shared_beginnings() {
    let trace = repository().join("fixtures/traces/mooncake_conversation.jsonl").display().to_string();
    let fake = Fake::start(answer);
    // 32 tokens for each of the trace's blocks of 512.
    let args = ["--trace", &trace, "--shrink", "16", "--speed", "20", "--requests", "40"];
    let report = fake.report(&args);
    assert_eq!(report["report"]["answered"], 40);
    let asked = fake.asked();
    let prompts: Vec<&Vec<Value>> = asked.iter().map(|r| r["prompt"].as_array().unwrap()).collect();
    assert!(prompts.iter().any(|p| p.len() == 6758 / 16) && asked.iter().any(|r| r["max_tokens"] == 500 / 16));
    // The first two requests of the trace have the block 0 in common, and nothing else.
    let long = |n: usize| prompts.iter().find(|p| p.len() == n / 16).unwrap();
    let (a, b) = (long(6758), long(7322));
    let common = a.iter().zip(b.iter()).take_while(|(a, b)| a == b).count();
    assert!((32..36).contains(&common), "{common}");
}

#[test]
fn a_trace_without_times_is_sent_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("lengths.csv");
    std::fs::write(&trace, format!("input_tokens,output_tokens\n{}", "8,2\n".repeat(40))).unwrap();
    let fake = Fake::start(answer);
    let report = fake.report(&["--trace", &trace.display().to_string()]);
    assert_eq!((&report["report"]["answered"], fake.asked().len()), (&json!(40), 40));
    let text = Fake::start(answer).bench(&["--trace", &trace.display().to_string()]).stdout;
    assert!(text.contains("concurrency 40"), "{text}");
}

#[test]
fn chats_ask_with_texts_and_extra_settings() {
    let fake = Fake::start(answer);
    let tokenizer = repository().join("models/stories260K").display().to_string();
    let extra = r#"{"temperature": 0.5, "top_k": 9}"#;
    let args = ["--chat", "--tokenizer", &tokenizer, "--prompt", "33", "-N", "3", "--stop-at-eos", "--extra", extra];
    fake.report(&args);
    for request in fake.asked() {
        assert_eq!((&request["path"], &request["top_k"]), (&json!("/v1/chat/completions"), &json!(9)));
        assert_eq!((&request["temperature"], request.get("ignore_eos")), (&json!(0.5), None));
        let text = request["messages"][0]["content"].as_str().unwrap();
        let tokens = common::json(&["tokenize", "--model", &tokenizer, "--no-special", "--json", text]);
        assert_eq!(tokens["ids"].as_array().map_or(0, Vec::len), 33, "{tokens}");
    }
}

#[test]
fn a_sweep_prints_its_steps_and_draws_them() {
    // The fake server answers one request after the other, a hundred a second at most. All answers keep a minute, and none
    // keeps no time.
    let fake = Fake::start(|number, request, stream| {
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap();
        std::thread::sleep(Duration::from_millis(10));
        answer(number, request, stream)
    });
    let folder = tempfile::tempdir().unwrap();
    let svg = folder.path().join("out.svg");
    let common = ["--sweep", "--requests", "3", "--generate", "2"];
    let plot = ["--slo", "e2e=60s", "--plot", svg.to_str().unwrap(), "--json"];
    let ran = fake.bench(&[&common[..], &["--rate", "30", "--duration", "1", "--attain", "0.95"], &plot].concat());
    let sweep = &object(&ran)["sweep"];
    assert!(sweep["lowest_broken_rate"].as_f64().is_some_and(|rate| rate < 300.0), "{sweep}");
    let steps = sweep["steps"].as_array().unwrap();
    for step in steps {
        assert_eq!((&step["report"]["good_share"], &step["kept"]), (&json!(1.0), &step["steady"]), "{step}");
    }
    assert_eq!(ran.stderr.matches(", p95 of e2e ").count(), steps.len(), "{}", ran.stderr);
    let svg = std::fs::read_to_string(svg).unwrap();
    assert!(svg.starts_with("<svg") && svg.matches("<title").count() >= steps.len() * 7, "{svg}");
    let ran = fake.bench(&[&common[..], &["--rate", "500", "--duration", "0.01", "--slo", "ttft=0.000001ms"]].concat());
    assert!(ran.stdout.contains("no rate tried is sustained with 90.0% within ttft at most"), "{}", ran.stdout);
    assert_eq!(ran.stderr.matches(" exceeded ").count(), 11, "{}", ran.stderr);
}

#[test]
fn mistakes_are_named_with_their_flags() {
    for (args, said) in [
        (&["--url", "https://x"][..], "TLS is not supported"),
        (&["--rate", "0"], "--rate"),
        (&["--rate", "nan"], "--rate"),
        (&["--prompt", "9..3"], "--prompt"),
        (&["--slo", "ttft=5"], "must end in ms or s"),
        (&["--sweep"], "--slo"),
        (&["--speed", "2"], "--trace"),
        (&["--extra", "[1]"], "--extra [1]: is not a JSON object"),
        (&["--burst", "0.001"], "--burst"),
    ] {
        let ran = ridge(&[&["bench", "serve"], args].concat());
        assert!(ran.code == 2 && ran.stderr.contains(said), "{args:?}: {}", ran.stderr);
    }
    let ran = ridge(&["bench", "serve", "--trace", "nowhere.csv"]);
    assert!(ran.code == 1 && ran.stderr.contains("cannot read nowhere.csv"), "{}", ran.stderr);
}

#[test]
fn ridge_serve_answers_it_in_every_manner() {
    let server = Server::start(&["--context", "512", "--sequences", "8"]);
    let url = format!("http://{}", server.address);
    let bench = |args: &[&str]| object(&ridge(&[&["bench", "serve", "--json", "--url", &url], args].concat()));
    let closed = bench(&["-c", "6", "-N", "12", "--prompt", "40", "--generate", "9", "--slo", "e2e=600s"]);
    let r = &closed["report"];
    assert_eq!((&r["answered"], &r["short_answers"], &r["good"]), (&json!(12), &json!(0), &json!(12)), "{r}");
    assert_eq!((&r["prompt_tokens"], &r["output_tokens"]), (&json!(480), &json!(108)));
    assert_eq!(closed["model"], "stories260K");
    let trace = repository().join("fixtures/traces/mooncake_conversation.jsonl").display().to_string();
    let replayed = bench(&["--trace", &trace, "--shrink", "512", "--speed", "100", "-N", "20"]);
    assert_eq!(replayed["report"]["answered"], 20, "{replayed}");
}

/// What requests waited for, by the server's own metrics.
#[test]
fn a_report_is_judged_by_what_requests_waited_for() {
    let server = Server::start(&["--context", "256", "--sequences", "1"]);
    let url = format!("http://{}", server.address);
    let args = ["bench", "serve", "--json", "--url", &url, "-c", "8", "-N", "24", "--prompt", "16", "--generate", "60"];
    let ran = ridge(&args);
    let report = &object(&ran)["report"];
    assert!(report["server"]["queue_seconds"].as_f64().unwrap() > 0.0, "{report}");
    assert!(report["server"]["most_of_cache"].is_number(), "{report}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("load.json");
    std::fs::write(&file, &ran.stdout).unwrap();
    let said = common::stdout(&["plan", "diagnose", file.to_str().unwrap()]);
    // Eight at a time, of which one runs.
    assert!(said.starts_with("bound by the queue") && said.contains("according to the server's metrics"), "{said}");
    let found = common::json(&["plan", "diagnose", "--json", file.to_str().unwrap()]);
    assert_eq!(found["diagnosis"]["verdict"], "queue", "{found}");
}
