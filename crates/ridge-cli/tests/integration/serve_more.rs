//! `ridge serve` and what not every client asks for: tools, scores of prompts, least lengths, vectors, logs.

use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};

use crate::common::server::{Server, read_answer};
use crate::common::tools::{ask, content, tools, with_tools};
use crate::common::{binary, repository, ridge};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

#[test]
fn tools_that_may_be_called_leave_text_alone() {
    for marks in ["<tool_call>", "[TOOL_CALLS]", "<|python_tag|>"] {
        let (_folder, server) = with_tools(marks);
        let body = |more: &Value| {
            let mut body = ask(more);
            (body["temperature"], body["max_tokens"]) = (json!(0), json!(20));
            body
        };
        let auto = server.post(CHAT, &body(&json!({ "tools": tools() }))).json();
        assert!(content(&auto).len() > 10 && auto["choices"][0]["message"].get("tool_calls").is_none(), "{auto}");
        // Tools change the prompt, unless they may not be called.
        let plain = server.post(CHAT, &body(&json!({}))).json();
        let none = server.post(CHAT, &body(&json!({ "tools": tools(), "tool_choice": "none" }))).json();
        assert_eq!(content(&none), content(&plain));
        assert!(auto["usage"]["prompt_tokens"].as_u64() > plain["usage"]["prompt_tokens"].as_u64());
    }
}

#[test]
fn prompts_are_scored_where_they_are_given_back() {
    let server = Server::start(&[]);
    let body = json!({ "prompt": "Once upon a time", "echo": true, "logprobs": 0, "max_tokens": 4, "temperature": 0 });
    let whole = server.post(COMPLETIONS, &body).json();
    let logprobs = &whole["choices"][0]["logprobs"];
    let scores = logprobs["token_logprobs"].as_array().unwrap();
    assert_eq!(scores.len(), 5 + 4, "{whole}");
    assert!(scores[0].is_null() && scores[1..].iter().all(|s| s.as_f64().unwrap() < 0.0), "{whole}");
    let spelt: String = logprobs["tokens"].as_array().unwrap()[1..].iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(spelt.trim_start(), whole["choices"][0]["text"]);
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let events = server.post(COMPLETIONS, &streamed).events();
    let pieces = events.iter().filter_map(|e| e["choices"][0]["logprobs"]["token_logprobs"].as_array()).flatten();
    assert_eq!(scores, &pieces.cloned().collect::<Vec<_>>());
}

#[test]
fn answers_have_at_least_the_tokens_asked_for() {
    let server = Server::start(&[]);
    let ask = |more: Value| {
        let mut body =
            json!({ "prompt": "Once upon a time", "temperature": 0, "max_tokens": 30, "return_token_ids": true });
        for (key, value) in more.as_object().unwrap() {
            body[key] = value.clone();
        }
        server.post(COMPLETIONS, &body).json()["choices"][0]["token_ids"].clone()
    };
    let free = ask(json!({}));
    let stop = json!([free[5]]);
    assert_eq!(ask(json!({ "stop_token_ids": stop })).as_array().unwrap().len(), 5);
    let longer = ask(json!({ "stop_token_ids": stop, "min_tokens": 12 }));
    assert!(longer.as_array().unwrap().len() >= 12, "{longer}");
}

#[test]
fn encoders_make_vectors() {
    let bert = repository().join("fixtures/families/bert").display().to_string();
    let server = Server::start(&["--model", &bert, "--served-model-name", "bert"]);
    let embed = |more: Value| {
        let mut body = json!({ "model": "bert", "input": [[5, 6, 7], [8]] });
        for (key, value) in more.as_object().unwrap() {
            body[key] = value.clone();
        }
        server.post("/v1/embeddings", &body)
    };
    let both = embed(json!({})).json();
    assert_eq!((&both["object"], &both["usage"]["prompt_tokens"]), (&json!("list"), &json!(4)));
    let vector = |answer: &Value, i: usize| answer["data"][i]["embedding"].clone();
    let size = vector(&both, 0).as_array().unwrap().len();
    assert!(size > 8 && both["data"][1]["index"] == 1);
    // Alone as in company.
    assert_eq!(vector(&embed(json!({ "input": [8] })).json(), 0), vector(&both, 1));
    let coded = embed(json!({ "encoding_format": "base64" })).json();
    assert_eq!(vector(&coded, 0).as_str().unwrap().len(), (size * 4).div_ceil(3) * 4);
    assert_eq!(embed(json!({ "dimensions": size })).status, 200);
    for (more, param) in [
        (json!({ "dimensions": 3 }), "dimensions"),
        (json!({ "input": [] }), "input"),
        (json!({ "input": [[5], []] }), "input[1]"),
        (json!({ "input": "text" }), "input"),
        (json!({ "input": [99_999_999] }), "input"),
        (json!({ "input": vec![5; 1000] }), "input"),
        (json!({ "encoding_format": "hex" }), "encoding_format"),
    ] {
        assert_eq!(embed(more.clone()).refused(400), param, "{more}");
    }
    let generates = server.post(COMPLETIONS, &json!({ "prompt": [1] }));
    generates.refused(404);
    assert!(generates.text().contains("served for embeddings or scores"), "{}", generates.text());
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn the_log_has_no_prompts_unless_it_is_asked_to() {
    for (args, has) in [(&["--log-format", "json"][..], false), (&["--log-prompts", "--log-level", "debug"], true)] {
        let mut command = binary();
        command.args(["serve", "--port", "0", "--threads", "1", "--no-roofline"]).args(args);
        let mut child = command.env_remove("RIDGE_API_KEY").stderr(Stdio::piped()).spawn().unwrap();
        let (server, mut log) = Server::adopt(&mut child);
        let answer = server.post(COMPLETIONS, &json!({ "prompt": "SECRET", "max_tokens": 2 }));
        assert_eq!(answer.status, 200);
        child.kill().unwrap();
        let mut text = String::new();
        log.read_to_string(&mut text).unwrap();
        child.wait().unwrap();
        assert_eq!(text.contains("SECRET"), has, "{text}");
        assert!(text.contains("/v1/completions") && text.contains("req-"), "{text}");
        if args.contains(&"json") {
            for line in text.lines() {
                let line: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
                assert!(line["timestamp"].is_string());
            }
        }
    }
}

#[test]
fn log_that_nobody_reads_stops_no_answer() {
    let mut command = binary();
    command.args(["serve", "--port", "0", "--threads", "1", "--no-roofline", "--log-level", "debug"]);
    let mut child = command.env_remove("RIDGE_API_KEY").stderr(Stdio::piped()).spawn().unwrap();
    let (server, log) = Server::adopt(&mut child);
    // Whoever writes to the log from now on gets an error.
    drop(log);
    for _ in 0..3 {
        let answer = server.post(COMPLETIONS, &json!({ "prompt": "Once", "max_tokens": 2 }));
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    assert_eq!(server.get("/health").status, 200);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn server_that_ends_says_so_and_ends_streams_with_an_error() {
    let mut command = binary();
    command.args([
        "serve",
        "--port",
        "0",
        "--threads",
        "1",
        "--no-roofline",
        "--drain-timeout",
        "6",
        "--sequences",
        "1",
    ]);
    let mut child = command.env_remove("RIDGE_API_KEY").stderr(Stdio::piped()).spawn().unwrap();
    let (server, mut log) = Server::adopt(&mut child);
    // A thousand answers of 400 tokens, one after another, take longer than the server has on any machine.
    let body = json!({ "prompt": "Once", "max_tokens": 400, "n": 128, "ignore_eos": true, "stream": true });
    let streams: Vec<_> = (0..8).map(|_| server.begin(COMPLETIONS, &body)).collect();
    for stream in &streams {
        stream.peek(&mut [0; 256]).unwrap();
    }
    // Read as they come: a client that does not is cut for that.
    let read = |mut stream: std::net::TcpStream| std::thread::spawn(move || read_answer(&mut stream));
    let streams: Vec<_> = streams.into_iter().map(read).collect();
    let mut early = server.connect();
    // Connections are accepted in turn, so that one is accepted by now.
    assert_eq!(server.get("/ready").status, 200);
    let ended = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(ended.success());
    server.until("/ready says that the server ends", |s| s.get("/ready").status == 503);
    assert_eq!(server.get("/health").status, 200);
    server.post(COMPLETIONS, &json!({ "prompt": "Once", "max_tokens": 2 })).refused(503);
    early.write_all(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    assert_eq!(read_answer(&mut early).status, 503);
    for stream in streams {
        let answer = stream.join().unwrap();
        let events = answer.events();
        let last = events.last().unwrap();
        assert!(last["error"]["message"].as_str().is_some_and(|m| m.contains("the server shut down")), "{last}");
    }
    child.wait().unwrap();
    let mut text = String::new();
    log.read_to_string(&mut text).unwrap();
    assert_eq!(text.matches("outcome=\"failed\"").count(), 8, "{text}");
    assert!(!text.contains("outcome=\"left\""), "{text}");
}

#[test]
fn prompts_are_scored_without_an_answer() {
    let server = Server::start(&[]);
    let body = json!({ "prompt": "Once upon a time", "max_tokens": 0, "echo": true, "logprobs": 0 });
    let answer = server.post(COMPLETIONS, &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = answer.json();
    let choice = &answer["choices"][0];
    assert_eq!((&choice["text"], &answer["usage"]["completion_tokens"]), (&json!("Once upon a time"), &json!(0)));
    let scores = choice["logprobs"]["token_logprobs"].as_array().unwrap();
    assert!(scores[0].is_null() && scores[1..].iter().all(|s| s.as_f64().unwrap() < 0.0), "{scores:?}");
    // Where each token begins in the text that is given back.
    let offsets: Vec<u64> =
        choice["logprobs"]["text_offset"].as_array().unwrap().iter().map(|o| o.as_u64().unwrap()).collect();
    assert!(offsets.is_sorted() && offsets[offsets.len() - 1] < 16, "{offsets:?}");
    // With the most likely tokens in their places, among them those that are there, as lm-evaluation-harness reads them.
    let prompt = "Lily wänt to the park 日本. She";
    let body = json!({ "prompt": prompt, "max_tokens": 3, "echo": true, "logprobs": 2, "temperature": 0 });
    let answer = server.post(COMPLETIONS, &body).json();
    let logprobs = &answer["choices"][0]["logprobs"];
    let list = |name: &str| logprobs[name].as_array().unwrap().clone();
    let (tokens, scores, tops, offsets) =
        (list("tokens"), list("token_logprobs"), list("top_logprobs"), list("text_offset"));
    assert!(tops[0].is_null() && tops.len() == tokens.len() && offsets.len() == tokens.len(), "{answer}");
    for (i, top) in tops.iter().enumerate().skip(1) {
        let top = top.as_object().unwrap();
        let best = top.values().map(|v| v.as_f64().unwrap()).fold(f64::NEG_INFINITY, f64::max);
        let own = scores[i].as_f64().unwrap();
        assert!((1..=3).contains(&top.len()) && best >= own, "{top:?}");
        // Answers are greedy.
        assert!(i < tokens.len() - 3 || best == own, "{top:?}");
    }
    let text: Vec<char> = answer["choices"][0]["text"].as_str().unwrap().chars().collect();
    for (token, offset) in tokens.iter().zip(&offsets).skip(1) {
        let token = token.as_str().unwrap();
        let at = offset.as_u64().unwrap() as usize;
        let there: String = text[at..].iter().take(token.chars().count()).collect();
        // The first has lost its space; bytes of a character stand for the whole of it.
        assert!(token.contains('\u{fffd}') || at == 0 || there == token, "{token:?} at {at} of {text:?}");
    }
    server.post(CHAT, &json!({ "messages": [{ "role": "user", "content": "x" }], "max_tokens": 0 })).refused(400);
    let beyond = server.post(COMPLETIONS, &json!({ "prompt": "Once", "max_tokens": 100_000 }));
    assert_eq!(beyond.refused(400), "max_tokens");
}

#[test]
fn more_tokens_than_the_context_leaves_are_refused_and_not_cut() {
    let server = Server::start(&["--context", "64"]);
    let ids: Vec<u32> = (0..50).map(|i| 400 + i % 60).collect();
    let ask = |more: Value| {
        let mut body = json!({ "prompt": ids, "ignore_eos": true });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post(COMPLETIONS, &body)
    };
    let refused = ask(json!({ "max_tokens": 15 }));
    assert_eq!(refused.refused(400), "max_tokens");
    assert_eq!(refused.json()["error"]["code"], "context_length_exceeded");
    let says = "15 and the 50 tokens of the prompt exceed the context of 64 tokens; ask for at most 14";
    assert!(refused.text().contains(says), "{}", refused.text());
    // All that fit are given where they are asked for, and where nothing is: the default of 16 is no demand.
    for more in [json!({ "max_tokens": 14 }), json!({})] {
        let answer = ask(more);
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.json()["usage"]["completion_tokens"], 14);
    }
    for name in ["max_tokens", "max_completion_tokens"] {
        let chat = json!({ "messages": [{ "role": "user", "content": "x" }], name: 64 });
        let refused = server.post(CHAT, &chat);
        assert!(refused.refused(400) == name && refused.text().contains(&format!("{name}: 64")), "{}", refused.text());
    }
    // A least length that does not fit is refused in the same way.
    let least = ask(json!({ "min_tokens": 15 }));
    assert!(least.refused(400) == "min_tokens" && least.text().contains("at most 14"), "{}", least.text());
    let most = ask(json!({ "min_tokens": 14, "ignore_eos": true }));
    assert_eq!(most.json()["usage"]["completion_tokens"], 14, "{}", most.text());
}

#[test]
fn a_cache_of_less_than_the_context_bounds_it() {
    // Announced and enforced: 90 tokens in whole blocks of 16, and not the model's 512.
    let server = Server::start(&["--cache-tokens", "90"]);
    let models = server.get("/v1/models").json();
    assert_eq!(models["data"][0]["max_model_len"], 96, "{models}");
    let beyond = server.post(COMPLETIONS, &json!({ "prompt": vec![403; 90], "max_tokens": 7 }));
    assert_eq!(beyond.refused(400), "max_tokens");
    let all = server.post(COMPLETIONS, &json!({ "prompt": vec![403; 90], "max_tokens": 6, "ignore_eos": true }));
    assert_eq!(all.json()["usage"]["completion_tokens"], 6, "{}", all.text());
    // Asked for, it is as much, and more is an error.
    let same = ridge(&["serve", "--context", "96", "--cache-tokens", "90", "--dry-run"]);
    assert_eq!(same.code, 0, "{}", same.stderr);
    for dry in [&["--dry-run"][..], &["--port", "0"]] {
        let refused = ridge(&[&["serve", "--context", "128", "--cache-tokens", "90"], dry].concat());
        let says = "--cache-tokens 90";
        assert!(
            refused.code == 2 && refused.stderr.contains(says) && refused.stderr.contains("--context 128"),
            "{}",
            refused.stderr
        );
    }
}

#[test]
fn a_server_of_a_decoder_says_what_makes_embeddings() {
    let server = Server::start(&[]);
    let refused = server.post("/v1/embeddings", &json!({ "input": "x" }));
    refused.refused(404);
    for says in ["decoders whose files say how texts become vectors", "modules.json", "pooling_type", "`ridge embed`"] {
        assert!(refused.text().contains(says), "{}", refused.text());
    }
    for (path, body) in [
        ("/v1/rerank", json!({ "query": "x", "documents": ["y"] })),
        ("/v1/score", json!({ "text_1": "x", "text_2": "y" })),
    ] {
        let refused = server.post(path, &body);
        refused.refused(404);
        let says = ["served to generate text", "a decoder of embeddings", "`ridge serve --rerank`"];
        assert!(says.iter().all(|says| refused.text().contains(says)), "{}", refused.text());
    }
}

#[test]
fn one_server_listens_at_several_addresses_and_reads_its_keys_again() {
    let keys = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(keys.path(), "ann sk-1\n").unwrap();
    let path = keys.path().display().to_string();
    let server = Server::start(&["--host", "127.0.0.1", "--host", "127.0.0.2", "--api-keys", &path]);
    let second = std::net::SocketAddr::new("127.0.0.2".parse().unwrap(), server.address.port());
    drop(std::net::TcpStream::connect(second).expect("listens at both"));
    let with = |key: &str| server.post_with(COMPLETIONS, &format!("Authorization: bearer {key}\r\n"), b"{}").status;
    assert_eq!((with("sk-1"), with("sk-2")), (400, 401));
    std::fs::write(keys.path(), "bob sk-2\n").unwrap();
    server.signal("-HUP");
    server.until("the new key is accepted", |_| with("sk-2") == 400);
    assert_eq!(with("sk-1"), 401);
}

#[test]
fn prefixes_can_be_kept_to_the_key_that_they_came_with() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    std::fs::write(&keys, "one sk-one\ntwo sk-two\n").unwrap();
    let body = json!({ "prompt": "Lily and Tim went to the park. ".repeat(8), "max_tokens": 2 }).to_string();
    for (options, shared) in [(&[][..], true), (&["--prefix-cache-by-key"][..], false)] {
        let server = Server::start(&[&["--api-keys", keys.to_str().unwrap()], options].concat());
        let cached = |key: &str| {
            let header = format!("Authorization: Bearer {key}\r\n");
            let answer = server.post_with(COMPLETIONS, &header, body.as_bytes());
            assert_eq!(answer.status, 200, "{}", answer.text());
            answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
        };
        assert_eq!(cached("sk-one"), 0);
        assert!(cached("sk-one") > 0);
        assert_eq!(cached("sk-two") > 0, shared);
    }
}
