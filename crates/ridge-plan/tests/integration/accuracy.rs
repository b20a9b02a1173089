//! Published measurements: what is reached today stays reached.

use std::path::Path;

#[test]
fn targets_that_are_reached_stay_reached() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    let sections = ridge_plan::accuracy::report(&fixtures.join("planner"), &fixtures.join("configs")).unwrap();
    for title in [
        "Korthikanti et al. 2022, A100, seconds",
        "Korthikanti et al. 2022, A100, memory",
        "Narayanan",
        "Megatron-LM on H100",
        "peak memory",
        "Collectives of NCCL",
        "Bus bandwidth",
        "Serving, dense: time per output token",
        "Serving, dense: time to first token",
    ] {
        let section = sections.iter().find(|s| s.title.contains(title)).unwrap();
        assert!(section.reached(), "{section}");
        assert!(section.rows.len() >= 4, "{title}");
    }
    // Not reached: these keep their errors from growing unseen.
    for (title, most) in [("experts: time per output token", 0.12), ("experts: time to first token", 0.40)] {
        let section = sections.iter().find(|s| s.title.contains(title)).unwrap();
        let [_, median, _] = section.errors(|_| true).unwrap();
        assert!(median < most, "{title}: {median}");
    }
}
