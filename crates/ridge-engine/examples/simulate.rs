//! A million steps of a service with users who come and go, on a device that costs nothing:
//! `cargo run --release -p ridge-engine --example simulate -- [SEED [STEPS]]`.

#[path = "../tests/integration/simulation/device.rs"]
mod device;
#[path = "../tests/integration/simulation/world.rs"]
mod world;

use world::{Seen, World};

fn main() {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<u64>().expect("SEED and STEPS are numbers"));
    let (first, steps) = (args.next().unwrap_or(0), args.next().unwrap_or(1_000_000));
    let mut all = Seen::default();
    for seed in first.. {
        // Printed first: a failure is a panic.
        println!("seed {seed}, after {} steps", all.steps);
        all.add(&World::new(seed).run(10_000.min(steps)));
        if all.steps >= steps {
            break;
        }
    }
    println!("{all:#?}");
}
