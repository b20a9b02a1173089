//! `ridge doctor`, run as users run it.

use crate::common::{json, stdout};

#[test]
fn json_has_the_machine_and_what_was_measured() {
    let object = json(&["doctor", "--json"]);
    assert!(object["usable_cores"].as_u64().unwrap() >= 1);
    for key in ["cpu", "usable_memory", "available_memory", "nvidia", "remedies", "ridge"] {
        assert!(object.get(key).is_some(), "{key}");
    }
    for key in ["architecture", "features", "caches", "model"] {
        assert!(object["cpu"].get(key).is_some(), "{key}");
    }
    for what in ["memory_read", "f32_matmul"] {
        for threads in ["one_thread", "all_threads"] {
            let figure = &object["measured"][format!("{what}_{threads}")];
            assert!(figure["value"].as_f64().unwrap() > 0.0, "{what}, {threads}");
            assert_eq!(figure["provenance"], "measured");
            assert!(figure["source"].as_str().unwrap().contains("median"));
        }
    }
    let libraries = object["nvidia"]["libraries"].as_array().unwrap();
    assert_eq!(libraries.len(), 4);
}

#[test]
fn every_rate_is_labelled() {
    let text = stdout(&["doctor"]);
    for part in ["usable by this process", "memory read, 1 thread ", "f32 matmul by Ridge's kernels, 1 thread ", "GPU"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(text.matches("measured: best of ").count(), 4, "{text}");
}
