//! `ridge serve` and malicious or broken requests: each is rejected without affecting others.

use std::io::{Read as _, Write as _};
use std::time::{Duration, Instant};

use crate::common::server::{Server, read_answer};
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// The server still answers, and nothing is left over.
#[track_caller]
fn is_well(server: &Server) {
    let answer = server.post(COMPLETIONS, &json!({ "prompt": "Once", "max_tokens": 3, "temperature": 0 }));
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(server.get("/health").status, 200);
    server.until("nothing runs", |s| s.metric("ridge:num_requests_running") == 0.0);
    assert_eq!(server.metric("ridge:kv_cache_usage_perc"), 0.0);
}

fn user(content: &Value) -> Value {
    json!({ "messages": [{ "role": "user", "content": content }] })
}

#[test]
fn bodies_that_are_no_request_are_refused() {
    let server = Server::start(&[]);
    let deep = |open: &str, close: &str, n: usize| format!("{}{}", open.repeat(n), close.repeat(n));
    let bodies: Vec<Vec<u8>> = vec![
        b"".to_vec(),
        b"{".to_vec(),
        b"null".to_vec(),
        b"[]".to_vec(),
        b"\"prompt\"".to_vec(),
        b"{\"prompt\": \"a\"} {}".to_vec(),
        b"{\"prompt\": \"\\ud800\"}".to_vec(),
        b"{\"prompt\": \"\\udc00\\ud800\"}".to_vec(),
        b"{\"prompt\": \"\xff\xfe\"}".to_vec(),
        b"{\"prompt\": \"\xed\xa0\x80\"}".to_vec(),
        b"{\"prompt\": \"a\", \"temperature\": 1e999}".to_vec(),
        b"{\"prompt\": \"a\", \"temperature\": NaN}".to_vec(),
        b"{\"prompt\": \"a\", \"max_tokens\": 99999999999999999999999999}".to_vec(),
        b"{\"prompt\": \"a\", \"max_tokens\": -1}".to_vec(),
        b"{\"prompt\": \"a\", \"seed\": 1e300}".to_vec(),
        b"\0\0\0\0".to_vec(),
        deep("[", "]", 100_000).into_bytes(),
        deep("{\"a\":", "}", 100_000).into_bytes(),
        format!("{{\"prompt\": {}}}", deep("[", "]", 100)).into_bytes(),
    ];
    for body in &bodies {
        for path in [COMPLETIONS, CHAT, "/v1/embeddings", "/tokenize", "/detokenize"] {
            let answer = server.post_bytes(path, body);
            let status = if path == "/v1/embeddings" { 404 } else { 400 };
            answer.refused(status);
        }
    }
    is_well(&server);
}

#[test]
fn values_out_of_range_are_refused_by_name() {
    let server = Server::start(&[]);
    let with = |key: &str, value: Value| {
        let mut body = json!({ "prompt": "Once", "max_tokens": 2 });
        body[key] = value;
        server.post(COMPLETIONS, &body)
    };
    let long = "x".repeat(2000);
    for (key, value, param) in [
        ("prompt", json!([1, 512]), "prompt"),
        ("prompt", json!([1, u32::MAX]), "prompt"),
        ("prompt", json!([1, u64::MAX]), "prompt[1]"),
        ("prompt", json!([-1]), "prompt[0]"),
        ("prompt", json!([]), "prompt"),
        ("prompt", json!([[]]), "prompt[0]"),
        ("prompt", json!(vec!["a"; 300]), "prompt"),
        ("temperature", json!(-0.5), "temperature"),
        ("temperature", json!("1"), "temperature"),
        ("top_p", json!(1.5), "top_p"),
        ("min_p", json!(2), "min_p"),
        ("typical_p", json!(0), "typical_p"),
        ("repetition_penalty", json!(0), "repetition_penalty"),
        ("n", json!(1000), "n"),
        ("best_of", json!(0), "best_of"),
        ("stop", json!([long]), "stop[0]"),
        ("stop", json!(vec!["a"; 65]), "stop"),
        ("logit_bias", json!({ "512": 1 }), "logit_bias"),
        ("logit_bias", json!({ "-1": 1 }), "logit_bias"),
        ("logprobs", json!(1000), "logprobs"),
        ("stream", json!("yes"), "stream"),
        ("priority", json!(1), "priority"),
        ("targets", json!({ "ttft_ms": 5 }), "targets"),
        ("model", json!("gpt-4"), "model"),
        ("frequency_penality", json!(1), "frequency_penality"),
        (
            "response_format",
            json!({ "type": "json_schema", "json_schema": { "schema": 3 } }),
            "response_format.json_schema.schema",
        ),
    ] {
        let status = if key == "model" { 404 } else { 400 };
        assert_eq!(with(key, value.clone()).refused(status), param, "{key}: {value}");
    }
    assert_eq!(server.post(COMPLETIONS, &json!({ "prompt": "a ".repeat(2000) })).refused(400), "prompt");
    assert_eq!(server.post(COMPLETIONS, &json!({ "prompt": vec!["a"; 200], "n": 100 })).refused(400), "n");
    // Far too long to be worth tokenising.
    assert_eq!(server.post(COMPLETIONS, &json!({ "prompt": "a".repeat(4 << 20) })).refused(400), "prompt");
    is_well(&server);
}

#[test]
fn chats_that_make_no_sense_are_refused_by_name() {
    let server = Server::start(&[]);
    assert_eq!(
        server.post(CHAT, &user(&json!([{ "type": "image_url", "image_url": {} }]))).refused(400),
        "messages[0].content[0].type"
    );
    assert_eq!(
        server.post(CHAT, &json!({ "messages": [{ "role": "king", "content": "" }] })).refused(400),
        "messages[0].role"
    );
    assert_eq!(server.post(CHAT, &json!({ "messages": "hello" })).refused(400), "messages");
    let mut tools = user(&json!("hi"));
    tools["tools"] = json!([{ "type": "function", "function": { "name": "f", "parameters": { "type": "object" } } }]);
    // The embedded model's template knows no tools.
    assert_eq!(server.post(CHAT, &tools).refused(400), "tools");
    tools["tool_choice"] = json!("sometimes");
    assert_eq!(server.post(CHAT, &tools).refused(400), "tool_choice");
    let mut deep = json!({ "type": "object" });
    for _ in 0..60 {
        deep = json!({ "type": "object", "properties": { "a": deep } });
    }
    tools["tools"][0]["function"]["parameters"] = deep;
    assert_eq!(server.post(CHAT, &tools).status, 400);
    is_well(&server);
}

#[test]
fn giant_bodies_are_refused_before_they_are_read() {
    let server = Server::start(&["--max-body", "1"]);
    // Said to be giant: refused at once.
    let head = format!("POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n");
    server.send(&head, b"{").refused(413);
    server.post_bytes(COMPLETIONS, &vec![b' '; (1 << 20) + 1]).refused(413);
    // In chunks without an end: refused when it is too much.
    let mut stream = server.connect();
    write!(stream, "POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n").unwrap();
    let chunk = [b"10000\r\n".to_vec(), vec![b' '; 0x10000], b"\r\n".to_vec()].concat();
    for _ in 0..64 {
        if stream.write_all(&chunk).is_err() {
            break;
        }
    }
    read_answer(&mut stream).refused(413);
    is_well(&server);
}

#[test]
fn clients_that_dawdle_are_cut() {
    let server = Server::start(&["--read-timeout", "1"]);
    let began = Instant::now();
    // A head that never ends, a body that never comes, and a connection that says nothing.
    let mut head = server.connect();
    head.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: ").unwrap();
    let mut body = server.connect();
    body.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{\"prompt\"").unwrap();
    let mut silent = server.connect();
    let mut rest = Vec::new();
    let _ = head.read_to_end(&mut rest);
    let _ = silent.read_to_end(&mut rest);
    read_answer(&mut body).refused(408);
    assert!(began.elapsed() < Duration::from_secs(50), "they were waited for");
    is_well(&server);
}

#[test]
fn heads_that_are_no_heads_are_refused() {
    let server = Server::start(&[]);
    let status = |bytes: &[u8]| {
        let mut stream = server.connect();
        let _ = stream.write_all(bytes);
        read_answer(&mut stream).status
    };
    let many: String = (0..5000).map(|i| format!("X-{i}: y\r\n")).collect();
    assert_eq!(status(format!("GET /health HTTP/1.1\r\nHost: x\r\n{many}\r\n").as_bytes()), 431);
    let long = "y".repeat(1 << 20);
    assert_eq!(status(format!("GET /health HTTP/1.1\r\nHost: x\r\nX: {long}\r\n\r\n").as_bytes()), 431);
    let status_of_long_path = status(format!("GET /{long} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes());
    assert!(matches!(status_of_long_path, 414 | 431), "{status_of_long_path}");
    assert_eq!(status(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"), 400);
    assert_eq!(status(b"GET /health\r\n\r\n"), 400);
    assert_eq!(
        status(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}"),
        400
    );
    assert_eq!(server.get("/../../etc/passwd").status, 404);
    assert_eq!(server.get(COMPLETIONS).refused(405), "");
    is_well(&server);
}

#[test]
fn a_client_that_reads_nothing_is_cut() {
    let server = Server::start(&["--write-timeout", "1", "--sequences", "32"]);
    // More than sockets hold: log-probabilities make each token a kilobyte and more.
    let ask = json!({
        "prompt": "Once", "max_tokens": 500, "n": 64, "ignore_eos": true, "stream": true, "logprobs": 20,
    });
    let connection = server.begin(COMPLETIONS, &ask);
    server.until("it runs", |s| s.metric("ridge:num_requests_running") > 0.0);
    server
        .until("it is cut", |s| s.metric("ridge:num_requests_running") + s.metric("ridge:num_requests_waiting") == 0.0);
    drop(connection);
    is_well(&server);
}

#[test]
fn more_requests_than_are_taken_are_refused() {
    let server = Server::start(&["--max-requests", "1"]);
    let ask = json!({ "prompt": "Once", "max_tokens": 500, "n": 64, "ignore_eos": true, "stream": true });
    let mut running = server.begin(COMPLETIONS, &ask);
    running.read_exact(&mut [0; 64]).unwrap();
    let refused = server.post(COMPLETIONS, &json!({ "prompt": "Once" }));
    refused.refused(429);
    assert_eq!(refused.header("retry-after"), Some("1"));
    drop(running);
    server.until("there is room", |s| s.post(COMPLETIONS, &json!({ "prompt": "Once" })).status == 200);
}

#[test]
fn answers_that_take_too_long_end_with_an_error() {
    let server = Server::start(&["--request-timeout", "1"]);
    let ask = json!({ "max_tokens": 500, "n": 128, "ignore_eos": true, "logprobs": 20, "prompt": vec!["Once"; 8] });
    server.post(COMPLETIONS, &ask).refused(504);
    is_well(&server);
}

#[test]
fn requests_may_follow_one_another_on_a_connection() {
    let server = Server::start(&[]);
    let mut stream = server.connect();
    let body = json!({ "prompt": "Once", "max_tokens": 2 }).to_string();
    let one = format!("POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    // Both at once, and the second closes.
    let two = one.replace("Host: x", "Host: x\r\nConnection: close");
    stream.write_all(format!("{one}{two}").as_bytes()).unwrap();
    let mut all = String::new();
    stream.read_to_string(&mut all).unwrap();
    assert_eq!(all.matches("HTTP/1.1 200").count(), 2, "{all}");
}
