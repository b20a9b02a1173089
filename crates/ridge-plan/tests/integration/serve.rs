//! Points of a server, held to what no server can exceed.

use std::path::Path;

use ridge_hw::spec::Precision;
use ridge_plan::efficiency::Machine;
use ridge_plan::ledger::Quantisation;
use ridge_plan::reading::Reading;
use ridge_plan::serve::{ServeLayout, Software, Traffic, prefill, simulated};

#[test]
fn prompts_bound_the_requests_that_a_server_takes() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/configs/Meta-Llama-3.1-8B.json");
    let reading = Reading::from_json("8B", &std::fs::read_to_string(path).expect("a file")).expect("reads");
    let machine = Machine::find("H200", Precision::Bf16).expect("has a sheet").in_a_server();
    let weights = Quantisation::Bf16;
    let layout = ServeLayout { tp: 1, pp: 1, attention_dp: 1, ep: 1, weights, cache_bytes: 2.0, speculation: None };
    let software = Software::find("vllm", "").expect("is in the table");
    // One prompt after another; steps of several are a little faster.
    let most = 1.0 / prefill(&reading, &machine, &layout, 1024);
    for answer in [1, 2, 256] {
        let mut before = 0.0;
        for batch in [1, 16, 256] {
            let traffic = Traffic { prompt: 1024, answer, batch };
            let point = simulated(&reading, &machine, &layout, &traffic, (1e6, software));
            let rate = point.requests_per_second;
            assert!(rate < 1.2 * most, "{rate} requests/s with answers of {answer}, and prompts alone allow {most}");
            assert!(rate > 0.99 * before, "{rate} requests/s of {batch} clients, {before} of fewer");
            assert!(point.ttft > 0.0 && point.tpot.is_finite());
            before = rate;
        }
    }
}
