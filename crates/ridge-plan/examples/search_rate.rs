//! How many layouts a core judges in a second.

use std::path::Path;
use std::time::Instant;

use ridge_hw::spec::Precision;
use ridge_plan::efficiency::Machine;
use ridge_plan::reading::Reading;
use ridge_plan::search::{SearchSpace, judge, layouts};
use ridge_plan::train::Workload;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for (name, gpus) in [("Meta-Llama-3.1-405B", 1024), ("DeepSeek-V3", 2048)] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../fixtures/configs/{name}.json"));
        let model = Reading::from_json(name, &std::fs::read_to_string(path)?)?;
        let machine = Machine::find("H100", Precision::Bf16)?;
        let work = Workload { global_batch: 2048, ..Workload::default() };
        let (mut seen, mut judged, mut fit) = (0, 0, 0);
        let start = Instant::now();
        layouts(&model, &SearchSpace::new(gpus, 8), |layout| {
            seen += 1;
            if layout.check(&model, work.seq, work.global_batch).is_ok() {
                judged += 1;
                // Every valid layout is timed, whether or not it fits.
                fit += usize::from(judge(&model, &machine, &work, &layout, f64::INFINITY).is_ok());
            }
        });
        let seconds = start.elapsed().as_secs_f64();
        println!(
            "{name}, {gpus} GPUs: {seen} layouts in {seconds:.3} s, {fit} of {judged} timed: {:.0} a second",
            f64::from(judged) / seconds
        );
    }
    Ok(())
}
