//! The launches of steps as a Chrome trace, with FLOPs and bytes of each. `ridge plan diagnose` compares them with the
//! measured or specified rates of the machine.

use std::path::Path;

use ridge_hw::roofline::Roofline;
use serde_json::{Value, json};

use super::ops::StepProfile;
use crate::error::Result;
use crate::output::write_file;

/// Steps of all tests, one test after the other.
#[derive(Default)]
pub(super) struct LaunchTrace {
    events: Vec<Value>,
    /// End of the last step, in seconds.
    end: f64,
}

impl LaunchTrace {
    /// Adds the steps of a test. A step is an event of the host; its launches are laid out back to back on the device from its
    /// start, and the remaining time is the host's.
    pub(super) fn add(&mut self, test: &str, profile: &StepProfile) {
        let origin = self.end;
        for step in &profile.steps {
            let mut at = origin + step.start;
            self.events.push(json!({
                "ph": "X", "cat": "user_annotation", "name": format!("step of {test}"), "pid": 1, "tid": 1,
                "ts": at * 1e6, "dur": step.seconds * 1e6,
            }));
            for (launch, seconds) in profile.launches.iter().zip(&step.launches) {
                self.events.push(json!({
                    "ph": "X", "cat": "kernel", "name": launch.name, "pid": 0, "tid": 0,
                    "ts": at * 1e6, "dur": seconds * 1e6,
                    "args": { "place": launch.place, "flops": launch.flops, "bytes": launch.bytes },
                }));
                at += seconds;
            }
            self.end = self.end.max(origin + step.start + step.seconds);
        }
    }

    /// Writes them, with the device's name and rates.
    pub(super) fn write(&self, path: &Path, device: &str, roofline: &Roofline) -> Result<()> {
        let named = |pid: usize, name: &str| json!({ "ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": { "name": name } });
        let mut events = vec![named(0, device), named(1, "host")];
        events.extend(self.events.iter().cloned());
        let whole = json!({
            "ridge": {
                "device": device,
                "flops_per_second": roofline.peak.as_f64(),
                "bytes_per_second": roofline.bandwidth.as_f64(),
            },
            "traceEvents": events,
        });
        write_file(path, &whole.to_string())
    }
}
