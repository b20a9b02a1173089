//! What the host takes for a step of 256 running sequences of some 4,000 tokens each, on a device that computes nothing:
//! `cargo run --release -p ridge-engine --example host_time`.

#[path = "../tests/integration/simulation/device.rs"]
#[allow(dead_code)]
mod device;

use std::sync::Arc;
use std::time::{Duration, Instant};

use device::Parrot;
use ridge_engine::service::{Policy, Request, Service, ServiceOptions};
use ridge_engine::{EngineOptions, row_widths};
use ridge_models::{BuildOptions, ModelFiles, RowTables, WeightSource};
use ridge_runtime::Session;

const SEQUENCES: usize = 256;
const CONTEXT: usize = 4096;

fn main() {
    let files = ModelFiles::open(None).expect("embedded");
    let mut model = files.config().expect("is supported").build(&BuildOptions::default()).expect("builds");
    let source = WeightSource::Checkpoint(Arc::new(files.checkpoint().expect("embedded")));
    model.graph = source.retype(&model.graph, None).expect("fits");
    // Only the host's side is run, which knows nothing of positions.
    model.max_context = CONTEXT;
    for policy in [Policy::FirstCome, Policy::Priority, Policy::Deadline, Policy::Fair] {
        let device = Parrot { blank: true, ..Parrot::default() };
        device.tables.get_or_init(|| RowTables::of(&model.graph, row_widths(CONTEXT / model.block_size)));
        let mut session = Session::new(Arc::new(device));
        source.load(&mut session, &model.graph, |_| ()).expect("loads");
        let engine = EngineOptions { context: CONTEXT, sequences: SEQUENCES, chunk: 8192, blocks: None };
        let options = ServiceOptions { engine, queue: SEQUENCES, policy, prefix_cache: true };
        let service = Service::new(session, &model, options).expect("starts");
        let mut service = service.made_ready().expect("the device has room");
        for i in 0..SEQUENCES as u32 {
            let prompt = (0..3800).map(|at| (i * 7 + at) % 512).collect();
            service.submit(Request::new(prompt, 280), Duration::ZERO).expect("taken");
        }
        let mut events = Vec::new();
        let mut times = Vec::new();
        for step in 0.. {
            let started = Instant::now();
            let rows = service.step(Duration::from_millis(step), &mut events).work.len();
            let tokens = events.len();
            if rows == SEQUENCES && tokens == SEQUENCES {
                times.push(started.elapsed().as_secs_f64() * 1e6);
            }
            events.clear();
            if times.len() == 150 || service.is_idle() {
                break;
            }
        }
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
        println!(
            "{policy:?}: {:.1} us a step of {SEQUENCES} sequences (median of {}), from {:.1} to {:.1} (99 %)",
            at(0.5),
            times.len(),
            at(0.0),
            at(0.99),
        );
    }
}
