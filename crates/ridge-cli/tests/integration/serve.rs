//! `ridge serve` through its port: each endpoint as its clients use it.

use std::io::Read as _;

use crate::common::server::Server;
use crate::common::{self, repository, ridge, stdout};
use serde_json::{Value, json};

const PROMPT: &str = "Once upon a time";

fn greedy(more: &Value) -> Value {
    let mut body = json!({ "prompt": PROMPT, "temperature": 0, "max_tokens": 24 });
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

fn text(answer: &Value) -> &str {
    answer["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{answer}"))
}

#[test]
fn what_is_served_is_what_generate_says() {
    let server = Server::start(&[]);
    let answer = server.post("/v1/completions", &greedy(&json!({})));
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.header("content-type"), Some("application/json"));
    let answer = answer.json();
    let alone = stdout(&["generate", "--greedy", "--max-tokens", "24", PROMPT]);
    assert_eq!(text(&answer), alone.trim_end_matches('\n'));
    assert_eq!(answer["usage"]["completion_tokens"], 24);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!((&answer["object"], &answer["model"]), (&json!("text_completion"), &json!("stories260K")));
}

#[test]
fn streams_say_what_whole_answers_say() {
    let server = Server::start(&[]);
    for more in [
        json!({}),
        json!({ "n": 2, "temperature": 1, "seed": 5, "logprobs": 2 }),
        json!({ "stop": ["girl", "zzz"] }),
        json!({ "echo": true, "prompt": [PROMPT, "The cat"] }),
        json!({ "prompt": [1, 403, 407], "return_token_ids": true, "logprobs": 0 }),
        json!({ "temperature": 0.9, "seed": 3, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "logit_bias": {"50": -5} }),
    ] {
        let body = greedy(&more);
        let whole = server.post("/v1/completions", &body).json();
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        streamed["stream_options"] = json!({ "include_usage": true });
        let mut events = server.post("/v1/completions", &streamed).events();
        let last = events.pop().unwrap();
        assert_eq!((&last["usage"], &last["choices"]), (&whole["usage"], &json!([])), "{more}");
        for (i, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
            let pieces: Vec<&Value> = events.iter().map(|e| &e["choices"][0]).filter(|c| c["index"] == i).collect();
            let said: String = pieces.iter().map(|p| p["text"].as_str().unwrap()).collect();
            assert_eq!(choice["text"], said, "{more}");
            assert_eq!(choice["finish_reason"], pieces.last().unwrap()["finish_reason"]);
            assert_eq!(choice["stop_reason"], pieces.last().unwrap()["stop_reason"]);
            let all = |key: &str| -> Vec<Value> {
                pieces.iter().filter_map(|p| p["logprobs"][key].as_array()).flatten().cloned().collect()
            };
            for key in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                assert_eq!(choice["logprobs"][key].as_array().cloned().unwrap_or_default(), all(key), "{more}");
            }
            let ids: Vec<Value> = pieces.iter().filter_map(|p| p["token_ids"].as_array()).flatten().cloned().collect();
            assert_eq!(choice["token_ids"].as_array().cloned().unwrap_or_default(), ids);
        }
    }
}

#[test]
fn settings_of_completions_do_what_they_say() {
    let server = Server::start(&[]);
    let ask = |more: Value| {
        let answer = server.post("/v1/completions", &greedy(&more));
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()
    };
    let plain = ask(json!({}));
    let said = text(&plain).to_owned();
    // Stop strings end before them and are named; tokens after them are not counted.
    let stopped = ask(json!({ "stop": "little" }));
    assert_eq!(text(&stopped), said.split("little").next().unwrap());
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert_eq!(stopped["choices"][0]["stop_reason"], "little");
    assert!(stopped["usage"]["completion_tokens"].as_u64() < plain["usage"]["completion_tokens"].as_u64());
    // Log-probabilities spell the text.
    let told = ask(json!({ "logprobs": 3 }));
    let logprobs = &told["choices"][0]["logprobs"];
    let spelt: String = logprobs["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(spelt, said);
    assert!(logprobs["top_logprobs"].as_array().unwrap().iter().all(|t| t.as_object().unwrap().len() == 3));
    assert!(logprobs["token_logprobs"].as_array().unwrap().iter().all(|l| l.as_f64().unwrap() <= 0.0));
    // A token that the client names ends the answer, and is not of it.
    let ids = ask(json!({ "return_token_ids": true }))["choices"][0]["token_ids"].clone();
    let by = ask(json!({ "stop_token_ids": [ids[3]], "return_token_ids": true }));
    assert_eq!(by["choices"][0]["stop_reason"], ids[3]);
    assert_eq!(by["choices"][0]["token_ids"].as_array().unwrap().len(), 3);
    // Echo, several prompts, several answers in order.
    let echoed = ask(json!({ "echo": true }));
    assert_eq!(text(&echoed), format!("{PROMPT}{said}"));
    let many = ask(json!({ "prompt": [PROMPT, "The dog"], "n": 2 }));
    let choices = many["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    assert_eq!((&choices[0]["text"], &choices[1]["text"]), (&json!(said), &json!(said)));
    assert_eq!(choices[2]["text"], choices[3]["text"]);
    assert_ne!(choices[0]["text"], choices[2]["text"]);
    assert_eq!(choices.iter().map(|c| c["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3]);
    // A seed gives the same answers, each of several its own; the first is that of one alone.
    let sampled = |n: u64| ask(json!({ "temperature": 1, "seed": 11, "n": n }))["choices"].clone();
    let (one, three) = (sampled(1), sampled(3));
    assert_eq!(three, sampled(3));
    assert_eq!(one[0]["text"], three[0]["text"]);
    assert_ne!(three[0]["text"], three[1]["text"]);
    // The best of several is one of them, and not the worst.
    let best = ask(json!({ "temperature": 1, "seed": 11, "best_of": 3 }));
    assert!(three.as_array().unwrap().iter().any(|c| c["text"] == best["choices"][0]["text"]), "{best} {three}");
    assert_eq!(best["usage"]["completion_tokens"], 72);
    assert!(best["choices"][0]["logprobs"].is_null());
    // A bias forbids a token.
    let biased = ask(json!({ "logit_bias": { ids[0].to_string(): -100 }, "return_token_ids": true }));
    assert_ne!(biased["choices"][0]["token_ids"][0], ids[0]);
    // Truncation keeps the end of the prompt.
    let cut = ask(json!({ "truncate_prompt_tokens": 2, "return_token_ids": true }));
    assert_eq!(cut["choices"][0]["prompt_token_ids"].as_array().unwrap().len(), 2);
}

#[test]
fn chats_are_rendered_and_streamed() {
    let server = Server::start(&[]);
    let body = json!({
        "model": "stories260K", "temperature": 0, "max_completion_tokens": 12, "logprobs": true, "top_logprobs": 2,
        "messages": [{ "role": "user", "content": [{ "type": "text", "text": PROMPT }] }],
    });
    let whole = server.post("/v1/chat/completions", &body).json();
    let message = &whole["choices"][0]["message"];
    let completion = server.post("/v1/completions", &greedy(&json!({ "max_tokens": 12 }))).json();
    assert_eq!(message["content"], completion["choices"][0]["text"], "{whole}");
    assert_eq!((&message["role"], &whole["object"]), (&json!("assistant"), &json!("chat.completion")));
    let told = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(told.len(), 12);
    assert_eq!(told[0]["top_logprobs"].as_array().unwrap().len(), 2);
    assert_eq!(told[0]["bytes"], json!(told[0]["token"].as_str().unwrap().as_bytes()));

    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let events = server.post("/v1/chat/completions", &streamed).events();
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    assert!(events.iter().all(|e| e["object"] == "chat.completion.chunk" && e.get("usage").is_none()));
    let said: String = events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(message["content"], said);
    let streamed = events.iter().filter_map(|e| e["choices"][0]["logprobs"]["content"].as_array()).flatten();
    assert_eq!(told, &streamed.cloned().collect::<Vec<_>>());
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
}

#[test]
fn tokens_go_both_ways() {
    let server = Server::start(&[]);
    let tokens = server.post("/tokenize", &json!({ "prompt": PROMPT, "return_token_strs": true })).json();
    let known = common::json(&["tokenize", "--json", PROMPT]);
    assert_eq!((&tokens["tokens"], &tokens["count"]), (&known["ids"], &json!(known["ids"].as_array().unwrap().len())));
    assert_eq!(tokens["token_strs"].as_array().unwrap().len(), tokens["count"]);
    let without = server.post("/tokenize", &json!({ "prompt": PROMPT, "add_special_tokens": false })).json();
    let back = server.post("/detokenize", &json!({ "tokens": without["tokens"] })).json();
    assert_eq!(back["prompt"].as_str().unwrap().trim_start(), PROMPT);
    let chat = json!({ "messages": [{ "role": "user", "content": PROMPT }] });
    assert_eq!(server.post("/tokenize", &chat).json()["tokens"], tokens["tokens"]);
    assert_eq!(server.post("/detokenize", &json!({ "tokens": [1, 99999] })).refused(400), "tokens[1]");
}

#[test]
fn the_server_tells_of_itself() {
    let server = Server::start(&["--served-model-name", "tales"]);
    assert_eq!(server.get("/health").json(), json!({ "status": "ok" }));
    assert_eq!(server.get("/ready").json()["model"], "tales");
    assert_eq!(server.get("/version").json()["version"], env!("CARGO_PKG_VERSION"));
    let models = server.get("/v1/models").json();
    assert_eq!((&models["object"], &models["data"][0]["id"]), (&json!("list"), &json!("tales")));
    assert_eq!(server.get("/v1/models/tales").json()["max_model_len"], 512);
    assert_eq!(server.get("/v1/models/other").refused(404), "model");
    assert!(server.get("/live").json()["engine"].is_object());

    let before = server.metric("ridge:generation_tokens_total");
    let answer = server.post("/v1/completions", &greedy(&json!({ "n": 2 })));
    assert_eq!(answer.status, 200);
    assert_eq!(server.metric("ridge:generation_tokens_total") - before, 48.0);
    assert_eq!(server.metric("ridge:time_to_first_token_seconds_count"), 2.0);
    assert_eq!(server.metric("ridge:inter_token_latency_seconds_count"), 46.0);
    assert_eq!(server.metric("ridge:e2e_request_latency_seconds_count"), 2.0);
    server.until("nothing runs", |s| s.metric("ridge:num_requests_running") == 0.0);
    // Every line is a comment or a name, labels and a number.
    for line in server.get("/metrics").text().lines().filter(|l| !l.starts_with("# ")) {
        let (name, value) = line.rsplit_once(' ').unwrap();
        assert!(name.starts_with("ridge:") && name.ends_with('}') && value.parse::<f64>().is_ok(), "{line}");
    }
}

#[test]
fn request_ids_are_given_back() {
    let server = Server::start(&[]);
    let body = greedy(&json!({ "max_tokens": 1 })).to_string();
    let own = server.post_with("/v1/completions", "X-Request-Id: my-id.7\r\n", body.as_bytes());
    assert_eq!(own.header("x-request-id"), Some("my-id.7"));
    let bad = server.post_with("/v1/completions", "X-Request-Id: a{b}\r\n", body.as_bytes());
    assert!(bad.header("x-request-id").is_some_and(|id| id.starts_with("req-")));
}

#[test]
fn concurrent_answers_are_those_given_alone() {
    let server = Server::start(&["--sequences", "4"]);
    let asks: Vec<Value> = (0..12)
        .map(|i| {
            greedy(&json!({ "temperature": 1, "seed": i, "max_tokens": 10 + i, "stream": i % 2 == 0, "logprobs": 1 }))
        })
        .collect();
    let alone: Vec<String> = asks.iter().map(|a| said(&server, a)).collect();
    let together: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = asks.iter().map(|a| scope.spawn(|| said(&server, a))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(alone, together);
    // Also where the cache is too small for all of them, so that some give their blocks to others and come back.
    let small = Server::start(&["--sequences", "8", "--cache-tokens", "96"]);
    let crowded: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = asks.iter().map(|a| scope.spawn(|| said(&small, a))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(alone, crowded);
}

#[test]
fn a_dry_run_tells_what_is_allocated() {
    let args = ["--sequences", "4", "--cache-tokens", "1000", "--context", "256"];
    let told = stdout(&[&["serve", "--dry-run"], &args[..]].concat());
    let row = |name: &str| told.lines().find(|l| l.starts_with(name)).unwrap_or_else(|| panic!("{told}"));
    assert!(row("cache").contains("63 blocks of 16 tokens") && row("context").contains("256 tokens"), "{told}");
    assert!(row("sequences").contains("4 ") && row("sequences").contains("concurrent; 3 at full context"), "{told}");
    assert!(row("total").contains("available to this process"), "{told}");
    // The model's file is of weights that the CPU copies.
    assert!(row("weights").contains("1016 KiB"), "{told}");
    let mib = |name: &str| -> f64 {
        let mut words = row(name)[name.len()..].split_whitespace();
        let (number, unit) = (words.next().unwrap(), words.next().unwrap());
        number.parse::<f64>().unwrap() * if unit == "KiB" { 1.0 / 1024.0 } else { 1.0 }
    };
    assert!((mib("weights") + mib("cache") + mib("workspace") - mib("total")).abs() < 0.2, "{told}");
    assert_eq!(Server::start(&args).metric("ridge:kv_cache_blocks"), 63.0);
    let bert = repository().join("fixtures/families/bert").display().to_string();
    assert!(stdout(&["serve", "--dry-run", "--model", &bert]).starts_with("weights"));
    // It ends as a server would that does not start.
    for dry in [&["--dry-run"][..], &["--port", "0"]] {
        let refused = ridge(&[&["serve", "--cache-tokens", "100000000000"], dry].concat());
        assert_eq!(refused.code, 1);
        assert!(refused.stderr.contains("the weights and the cache need "), "{}", refused.stderr);
    }
}

#[test]
fn a_word_where_only_a_model_can_be_is_a_model() {
    for args in [&["serve", "nosuch"][..], &["bench", "nosuch"], &["generate", "nosuch", "Once"]] {
        let said = ridge(args).stderr;
        assert!(said.contains("nosuch: there is no such folder"), "{args:?}: {said}");
    }
}

/// The text of a completion, streamed or not.
fn said(server: &Server, ask: &Value) -> String {
    let answer = server.post("/v1/completions", ask);
    assert_eq!(answer.status, 200, "{}", answer.text());
    if ask["stream"] == true {
        answer.events().iter().map(|e| e["choices"][0]["text"].as_str().unwrap().to_owned()).collect()
    } else {
        text(&answer.json()).to_owned()
    }
}

#[test]
fn a_disconnect_frees_what_the_answer_held() {
    let server = Server::start(&["--sequences", "2"]);
    for stream in [true, false] {
        let ask = greedy(&json!({ "max_tokens": 500, "n": 64, "ignore_eos": true, "stream": stream }));
        let mut connection = server.begin("/v1/completions", &ask);
        if stream {
            let mut some = [0; 64];
            connection.read_exact(&mut some).unwrap();
        }
        server.until("it runs", |s| s.metric("ridge:num_requests_running") > 0.0);
        drop(connection);
        server.until("it is forgotten", |s| {
            s.metric("ridge:num_requests_running") + s.metric("ridge:num_requests_waiting") == 0.0
        });
        assert_eq!(server.metric("ridge:kv_cache_usage_perc"), 0.0);
    }
    assert_eq!(server.post("/v1/completions", &greedy(&json!({}))).status, 200);
}

#[test]
fn answers_that_run_end_before_the_server_does() {
    let mut server = Server::start(&[]);
    let ask = greedy(&json!({ "max_tokens": 300, "stream": true, "ignore_eos": true }));
    let mut connection = server.begin("/v1/completions", &ask);
    let mut some = [0; 64];
    connection.read_exact(&mut some).unwrap();
    server.signal("-TERM");
    let mut rest = String::new();
    connection.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("data: [DONE]"), "{rest}");
    assert_eq!(server.wait(), 0);
}

#[test]
fn keys_are_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    std::fs::write(&file, "ann sk-ann\nsk-bob\n").unwrap();
    let server = Server::start_with(&["--api-keys", file.to_str().unwrap()], &[("RIDGE_API_KEY", "sk-env")]);
    let body = greedy(&json!({ "max_tokens": 1 })).to_string();
    let with = |headers: &str| server.post_with("/v1/completions", headers, body.as_bytes());
    for key in ["sk-ann", "sk-bob", "sk-env"] {
        assert_eq!(with(&format!("Authorization: Bearer {key}\r\n")).status, 200);
    }
    for headers in ["", "Authorization: Bearer sk-an\r\n", "Authorization: sk-ann\r\n", "Authorization: Bearer \r\n"] {
        assert_eq!(with(headers).refused(401), "", "{headers}");
    }
    assert_eq!(server.get("/v1/models").status, 401);
    // What machines watch needs none.
    for path in ["/health", "/ready", "/metrics", "/version"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
}

#[test]
fn pages_of_other_origins_are_let_in_by_name() {
    let server = Server::start(&["--cors-origin", "https://example.org"]);
    let ask = |origin: &str| {
        let head = format!(
            "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nOrigin: {origin}\r\n\
             Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization,content-type\r\n\r\n"
        );
        server.send(&head, b"").header("access-control-allow-origin").map(str::to_owned)
    };
    assert_eq!(ask("https://example.org").as_deref(), Some("https://example.org"));
    assert_eq!(ask("https://evil.example"), None);
    assert_eq!(Server::start(&[]).get("/version").header("access-control-allow-origin"), None);
}

#[test]
fn a_port_that_is_taken_is_told() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let ran = ridge(&["serve", "--port", &port]);
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains(&format!("cannot listen on 127.0.0.1:{port}")), "{}", ran.stderr);
    assert!(ran.stderr.contains("choose another --port"), "{}", ran.stderr);
}

#[test]
fn mistakes_of_use_are_told_before_anything_runs() {
    for (args, said) in [
        (&["--context", "100000"][..], "--context 100000: the model supports at most 512"),
        (&["--cors-origin", "*", "--cors-origin", "http://a"], "--cors-origin *"),
        (&["--cors-origin", "example.org"], "--cors-origin example.org"),
        (&["--port", "70000"], "70000"),
    ] {
        let ran = ridge(&[&["serve"], args].concat());
        assert_eq!(ran.code, 2, "{}", ran.stderr);
        assert!(ran.stderr.contains(said), "{}", ran.stderr);
    }
    let ran = ridge(&["serve", "--port", "0", "--api-keys", "no-such-file"]);
    assert!(ran.code == 1 && ran.stderr.contains("no-such-file: cannot read the keys"), "{}", ran.stderr);
}
