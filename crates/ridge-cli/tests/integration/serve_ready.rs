//! What a server makes before its port opens: all that requests need.

use serde_json::{Value, json};

use crate::common::server::Server;

const COUNTERS: [&str; 3] = ["ridge:programs_compiled_total", "ridge:buckets_bound_total", "ridge:choices_timed_total"];

fn requests() -> Vec<Value> {
    let long = "One day, Lily went to the park. ".repeat(12);
    vec![
        json!({"prompt": "Once", "max_tokens": 30}),
        json!({"prompt": long, "max_tokens": 20, "temperature": 0}),
        json!({"prompt": "Tom", "max_tokens": 9, "logprobs": 5}),
        json!({"prompt": "Tom", "max_tokens": 9, "repetition_penalty": 1.2, "frequency_penalty": 0.5}),
        json!({"prompt": "Tom", "max_tokens": 9, "logit_bias": {"5": -100, "9": 2}}),
        json!({"prompt": "Tom", "max_tokens": 9, "dry_multiplier": 0.8}),
        json!({"prompt": "Tom", "max_tokens": 24, "guided_regex": "[a-z ]{3,12}"}),
        json!({"prompt": "Tom", "max_tokens": 24, "guided_regex": "(yes|no)", "logprobs": 20}),
        json!({"prompt": long, "max_tokens": 3, "echo": true, "logprobs": 0}),
        json!({"prompt": "Ben", "max_tokens": 12, "n": 7}),
        json!({"prompt": ["a", "b", "c", "d", "e"], "max_tokens": 12, "top_p": 0.5, "min_p": 0.1}),
    ]
}

fn nothing_is_made_while_serving(args: &[&str], most: f64) {
    let server = Server::start(args);
    let made = || COUNTERS.map(|name| server.metric(name));
    let before = made();
    assert!(before[1] <= most, "{} buckets", before[1]);
    for body in requests() {
        let answer = server.post("/v1/completions", &body);
        assert_eq!(answer.status, 200, "{body}: {}", answer.text());
    }
    std::thread::scope(|scope| {
        for turn in 0..requests().len() {
            let server = &server;
            scope.spawn(move || {
                let mut all = requests();
                all.rotate_left(turn);
                for body in all {
                    assert_eq!(server.post("/v1/completions", &body).status, 200, "{body}");
                }
            });
        }
    });
    assert_eq!(made(), before, "of {COUNTERS:?}");
}

#[test]
fn nothing_is_compiled_or_bound_or_timed_while_a_server_serves() {
    nothing_is_made_while_serving(&[], 48.0);
    nothing_is_made_while_serving(&["--speculate", "4", "--sequences", "6", "--chunk", "48"], 48.0);
}
