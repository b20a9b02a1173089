//! A thousand clients at a time, some of which leave: no error, every answer as it is alone, nothing left over.

use std::io::Read as _;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::common::server::{Answer, Server};
use serde_json::{Value, json};

const CLIENTS: usize = 1000;

/// Requests that differ in prompt, length and settings.
fn ask(i: usize) -> Value {
    const PROMPTS: [&str; 4] = ["Once upon a time", "Lily and the dog", "The sun was", "One day, a boy named Tim"];
    json!({
        "prompt": PROMPTS[i % 4], "max_tokens": 5 + i * 7 % 60, "temperature": i % 3, "seed": i, "stream": true,
        "top_k": 50, "stop": if i.is_multiple_of(5) { json!(["dog", "."]) } else { Value::Null },
    })
}

fn text(answer: &Answer) -> String {
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer
        .events()
        .iter()
        .map(|e| e["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{e}")).to_owned())
        .collect()
}

/// Bytes of memory that the server's process has.
fn resident(server: &Server) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()? << 10)
}

#[test]
#[ignore = "takes a minute and all cores: cargo test --release -p ridge-cli serve_soak:: -- --ignored --nocapture"]
fn a_thousand_clients_leave_nothing_behind() {
    let seconds = std::env::var("RIDGE_SOAK_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(60);
    let server = Server::start(&["--sequences", "64", "--max-requests", "4096", "--max-connections", "4096"]);
    let asks: Vec<Value> = (0..24).map(ask).collect();
    let alone: Vec<String> = asks.iter().map(|a| text(&server.post("/v1/completions", a))).collect();
    // Threads, buffers and programs that stay are there after a first crowd.
    crowd(&server, &asks, &alone, Duration::from_secs(5));
    let before = resident(&server);
    let (whole, left) = crowd(&server, &asks, &alone, Duration::from_secs(seconds));
    let after = resident(&server);
    println!("{whole} answers as alone, {left} clients left; resident {before:?} before, {after:?} after");
    assert!(whole > 0 && left > 0);
    for path in ["/health", "/ready"] {
        assert_eq!(server.get(path).status, 200);
    }
    if let (Some(before), Some(after)) = (before, after) {
        assert!(after < before + before / 5 + (16 << 20), "{before} bytes before, {after} after");
    }
}

/// A thousand clients for some time. How many answers were read whole, and how many clients left.
fn crowd(server: &Server, asks: &[Value], alone: &[String], time: Duration) -> (u64, u64) {
    let (whole, left) = (AtomicU64::new(0), AtomicU64::new(0));
    let until = Instant::now() + time;
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (whole, left) = (&whole, &left);
            let work = move || {
                let mut random = client as u64 + 1;
                while Instant::now() < until {
                    // Knuth's multiplier: any sequence that differs between clients will do.
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let (pick, fate) = ((random >> 33) as usize % asks.len(), (random >> 50) % 10);
                    if fate > 2 {
                        assert_eq!(text(&server.post("/v1/completions", &asks[pick])), alone[pick], "{}", asks[pick]);
                        whole.fetch_add(1, Relaxed);
                        continue;
                    }
                    // Leaves at once, or amid the answer.
                    let mut stream = server.begin("/v1/completions", &asks[pick]);
                    if fate > 0 {
                        let _ = stream.read(&mut vec![0; 100 + (random >> 40) as usize % 2000]);
                    }
                    drop(stream);
                    left.fetch_add(1, Relaxed);
                }
            };
            std::thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, work).unwrap();
        }
    });
    server.until("all has ended", |s| {
        s.metric("ridge:num_requests_running") + s.metric("ridge:num_requests_waiting") == 0.0
    });
    assert_eq!(server.metric("ridge:kv_cache_usage_perc"), 0.0);
    (whole.into_inner(), left.into_inner())
}
