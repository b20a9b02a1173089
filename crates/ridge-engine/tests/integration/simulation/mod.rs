//! A service on a device that costs nothing, driven by a clock that is none, with everything that may happen to it.

mod cache;
mod device;
mod world;

use world::World;

/// Printed with each failure; `cargo run --release --example simulate -- SEED` runs longer.
const SEEDS: std::ops::Range<u64> = 0..24;

#[test]
fn every_answer_is_the_one_it_has_alone_and_nothing_is_left_behind() {
    let mut all = world::Seen::default();
    for seed in SEEDS {
        println!("seed {seed}");
        all.add(&World::new(seed).run(400));
    }
    println!("{all:#?}");
    // A simulation in which nothing happens shows nothing.
    assert!(all.done > 100 && all.cancelled > 10 && all.failed > 10 && all.stats.failed_steps > 3);
    assert!(all.stats.preemptions > 50 && all.stats.prefix_hits > 1000);
    assert!(all.stats.accepted > 10 && all.stats.candidates > all.stats.accepted);
}

/// A world in which a candidate stood behind a prompt's last token, where another graph computes tokens of answers.
#[test]
fn candidates_are_computed_as_tokens_of_answers_are() {
    let seen = World::new(13).run(2600);
    assert!(seen.stats.accepted > 1000);
}
