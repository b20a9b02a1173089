//! `ridge plan`: JSON, and what mistaken input is told.

use std::process::Output;

use serde_json::Value;

use crate::common::binary;

pub(crate) fn ridge(line: &str) -> Output {
    let configs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/configs");
    binary().args(line.split_whitespace()).current_dir(configs).output().unwrap()
}

pub(crate) fn json(line: &str) -> Value {
    let output = ridge(line);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn json_has_the_figures_and_where_they_come_from() {
    let fit = json("plan fit DeepSeek-V3.json --device H200 --tp 8 --weights fp8 --json");
    assert_eq!(fit["parameters"], 671_026_419_200_u64);
    assert_eq!(fit["fit"]["per_token"], 70_272);
    assert_eq!(fit["sources"]["device"], "specified");
    let train = json("plan train Qwen3-8B.json --gpus 16 --top 3 --tokens 1T --price 2 --json");
    assert_eq!(train["ranked"].as_array().unwrap().len(), 3);
    assert!(train["run"]["dollars"].as_f64().unwrap() > 1e3);
    assert!(train["rejected"].as_object().unwrap().keys().any(|why| why.contains("GiB")));
    let serve = json("plan serve Meta-Llama-3.1-8B.json --device H200 --batch 1 --json");
    // A step reads 15 GB at 4.8 TB/s at best.
    let step = serve["point"]["decode_step"].as_f64().unwrap();
    assert!((0.0031..0.006).contains(&step), "{step}");
    let kernel = json("plan kernel --capability 8.0 --threads 256 --registers 128 --stride 4096 --json");
    assert_eq!((&kernel["occupancy"]["warps"], &kernel["access"]["sectors"]), (&16.into(), &32.into()));
    assert_eq!(kernel["sources"]["limits"], "specified");
}

#[test]
fn communication_and_pipelines_are_written_as_json_plots_and_traces() {
    let comm = json("plan comm all-reduce 1GiB --gpus 8 --device H200 --json");
    assert_eq!(comm["nccl"]["algorithm"], "ring");
    let bus = comm["bus_bytes_per_second"].as_f64().unwrap();
    assert!((3.2e11..3.7e11).contains(&bus), "{bus}");
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (plot, trace) = (at("p.svg"), at("p.json"));
    let pipeline = json(&format!(
        "plan pipeline --stages 4 --micro-batches 8 --schedule 1f1b --plot {plot} --trace {trace} --json"
    ));
    // (p - 1) / (m + p - 1)
    assert!((pipeline["timeline"]["bubble"].as_f64().unwrap() - 3.0 / 11.0).abs() < 1e-9);
    assert!(std::fs::read_to_string(&plot).unwrap().starts_with("<svg"));
    let events: Value = serde_json::from_slice(&std::fs::read(&trace).unwrap()).unwrap();
    assert_eq!(events["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "X").count(), 2 * 4 * 8);
    let (plot, trace) = (at("c.svg"), at("c.json"));
    let comm = json(&format!(
        "plan comm all-reduce 16GB --gpus 64 --compute 300ms --buckets 10 --plot {plot} --trace {trace} --json"
    ));
    let beside = &comm["overlap"];
    assert!(beside["hidden"].as_f64().unwrap() > beside["exposed"].as_f64().unwrap());
    assert!(std::fs::read_to_string(&plot).unwrap().contains("<polyline"));
    let events: Value = serde_json::from_slice(&std::fs::read(&trace).unwrap()).unwrap();
    assert_eq!(events["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "X").count(), 20);
    let none = json("plan comm all-reduce 1GB --gpus 8 --compute 0ms --json");
    assert_eq!(none["overlap"]["hidden"], 0.0);
    let all = json("plan pipeline --stages 4 --micro-batches 6 --json");
    let rejected: Vec<_> = all["schedules"].as_array().unwrap().iter().filter(|s| s["rejected"].is_string()).collect();
    assert_eq!(rejected.len(), 2, "{all}");
}

#[test]
fn every_plan_is_drawn_and_written_as_one_page() {
    let folder = tempfile::tempdir().unwrap();
    for (i, line) in [
        "plan fit DeepSeek-V3.json --device H200 --tp 8 --weights fp8",
        "plan train Qwen3-8B.json --gpus 16 --batch 64 --tokens 1T --top 3",
        "plan train Meta-Llama-3.1-70B.json --gpus 64 --batch 128 --tp 4 --pp 4 --zero 1",
        "plan serve Meta-Llama-3.1-8B.json --device H200",
        "plan comm all-reduce 1GiB --gpus 64",
        "plan pipeline --stages 4 --micro-batches 8",
        "plan kernel --matmul 4096x4096x4096",
        "plan kernel --model Mixtral-8x7B-v0.1.json --new 512 --context 512",
        "plan kernel --threads 128 --registers 64",
    ]
    .into_iter()
    .enumerate()
    {
        let at = |kind: &str| folder.path().join(format!("{i}.{kind}"));
        let (svg, html) = (at("svg"), at("html"));
        let output = ridge(&format!("{line} --plot {} --html {}", svg.display(), html.display()));
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        let (svg, html) = (std::fs::read_to_string(svg).unwrap(), std::fs::read_to_string(html).unwrap());
        let figure = roxmltree::Document::parse(&svg).unwrap_or_else(|e| panic!("{line}: {e}"));
        assert!(figure.descendants().filter(|n| n.has_tag_name("text")).count() > 10, "{line}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{line}");
        // Its figures are in the page, which asks for nothing.
        assert!(html.contains("<svg ") && html.contains("<h2>Sources</h2>"), "{line}");
        assert!(!["src=", "href=", "url(", "@import"].iter().any(|asks| html.contains(asks)), "{line}");
        for line in String::from_utf8_lossy(&output.stdout).lines().take(1) {
            assert!(html.contains(&format!("<h1>{line}")), "{line}");
        }
    }
}

#[test]
fn a_model_is_placed_under_the_roofline_op_by_op() {
    let line = "plan kernel --model Meta-Llama-3.1-8B.json --device H200 --batch 64 --json";
    let roofline = &json(line)["roofline"];
    let rows = roofline["rows"].as_array().unwrap();
    let of = |scope: &str, key: &str| rows.iter().find(|r| r["scope"] == scope).unwrap()[key].as_f64().unwrap();
    // 32 layers of 4096 x 14336 and 64 tokens.
    assert!((of("mlp.up_proj", "flops") - 2.0 * 64.0 * 32.0 * 4096.0 * 14336.0).abs() < 1.0);
    assert!(rows.iter().all(|r| r["floor"].as_f64().unwrap() <= r["expected"].as_f64().unwrap() * (1.0 + 1e-9)));
    let sums = roofline["sums"].as_array().unwrap();
    let total: f64 = rows.iter().map(|r| r["floor"].as_f64().unwrap()).sum();
    assert!((sums.last().unwrap()["floor"].as_f64().unwrap() / total - 1.0).abs() < 1e-9);
    assert!((roofline["ridge_point"].as_f64().unwrap() - 989e12 / 4.8e12).abs() < 1e-9);
}

#[test]
fn a_topology_is_placed_and_a_trace_is_judged() {
    let placed = json("plan topology --file ../topology/4-a6000-bridges.txt --tp 2 --json");
    let gpus: Vec<_> = placed["advice"]["best"]["seats"].as_array().unwrap().iter().map(|s| &s["gpu"]).collect();
    assert_eq!(gpus, ["GPU0", "GPU2", "GPU1", "GPU3"]);
    assert_eq!(placed["advice"]["degrees"]["dp"], 2, "all remaining GPUs");
    let judged = json("plan diagnose ../diagnose/communication.json --json");
    assert_eq!(judged["diagnosis"]["verdict"], "communication");
    assert_eq!(judged["diagnosis"]["sure"], "high");
}

#[test]
fn ridges_own_trace_is_judged_with_rates() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step.json").display().to_string();
    let bench = ridge(&format!("bench --prompt 64 --generate 0 --repeat 4 --trace {path} --json"));
    assert!(bench.status.success(), "{}", String::from_utf8_lossy(&bench.stderr));
    let bench: Value = serde_json::from_slice(&bench.stdout).unwrap();
    let judged = json(&format!("plan diagnose {path} --json"));
    let (measured, evidence) = (&judged["diagnosis"]["measured"], judged["diagnosis"]["evidence"].to_string());
    // Four steps of the launches that the model has, with their FLOPs.
    let trace: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let kernels: Vec<_> = trace["traceEvents"].as_array().unwrap().iter().filter(|e| e["cat"] == "kernel").collect();
    assert_eq!(measured["kernels"].as_u64().unwrap() as usize, kernels.len());
    let flops: f64 = kernels.iter().map(|k| k["args"]["flops"].as_f64().unwrap()).sum();
    let step = bench["results"][0]["modelled"]["flops"].as_f64().unwrap();
    assert!((flops / (4.0 * step) - 1.0).abs() < 1e-6, "{flops} {step}");
    assert!(measured["compute_floor"].is_number() && evidence.contains("of the device's bandwidth"), "{evidence}");
}

#[test]
fn money_is_that_of_the_gpus_a_rate_needs() {
    let line = "plan serve Meta-Llama-3.1-8B.json --device H200 --batch 64 --answer 300 --price 3.5 --json";
    let (full, rate) = (json(line), json(&format!("{line} --rate 50")));
    let gpus = rate["gpus_for_rate"].as_f64().unwrap();
    let dollars = |of: &Value| of["dollars_per_million_output_tokens"].as_f64().unwrap();
    assert!((dollars(&rate) - 3.5 * gpus / 3600.0 / (50.0 * 300.0) * 1e6).abs() < 1e-9);
    assert!(dollars(&full) < dollars(&rate), "GPUs that idle cost too");
    assert_eq!((&full["dollars_are_at"], &rate["dollars_are_at"]), (&"full load".into(), &"the rate".into()));
}

#[test]
fn prediction_modules_are_planned_with_an_acceptance_rate() {
    let number = |of: &Value, pointer: &str| of.pointer(pointer).and_then(Value::as_f64).expect(pointer);
    let fit = "plan fit DeepSeek-V3.json --device H200 --tp 8 --weights fp8 --json";
    let (plain, module) = (json(fit), json(&format!("{fit} --speculate mtp")));
    assert_eq!(module["prediction_parameters"], 11_610_068_224_u64);
    // One layer's latent more than the 61.
    assert_eq!(number(&module, "/fit/per_token") - number(&plain, "/fit/per_token"), f64::from(2 * (512 + 64)));
    let entries = module["fit"]["ledger"]["entries"].as_array().unwrap();
    let of_module = entries.iter().find(|entry| entry["what"] == "prediction module").unwrap();
    let bytes = number(of_module, "/bytes");
    // Each has an eighth of the experts, and the projection of both inputs, which is not cut, in 16 bits.
    let share = bytes / (11_610_068_224.0 / 8.0 + 2.0 * 2.0 * 7168.0 * 7168.0);
    assert!((1.0..1.03).contains(&share), "{bytes} on each of 8 ranks");

    let serve = "plan serve DeepSeek-V3.json --device H200 --weights fp8 --tp 8 --batch 4 --json";
    let plain = json(serve);
    let with = |drafts: usize, rate: f64| json(&format!("{serve} --speculate mtp:{drafts} --acceptance {rate}"));
    let step = |of: &Value| number(of, "/point/decode_step");
    let tpot = |of: &Value| number(of, "/point/tpot");
    let (never, often, always) = (with(1, 0.0), with(1, 0.85), with(1, 1.0));
    // A step takes longer, whatever is accepted of it; what is accepted saves steps.
    assert!(step(&never) > step(&plain) && step(&never) < 1.6 * step(&plain), "{} {}", step(&never), step(&plain));
    assert_eq!((step(&often), step(&always)), (step(&never), step(&never)));
    assert!((number(&often, "/tokens_per_step") - 1.85).abs() < 1e-9);
    assert!(tpot(&never) > tpot(&plain) && tpot(&often) < tpot(&plain), "{} {}", tpot(&often), tpot(&plain));
    assert!((tpot(&never) / tpot(&always) - 2.0).abs() < 0.05, "{} {}", tpot(&never), tpot(&always));
    let rate = |of: &Value| number(of, "/point/tokens_per_second");
    assert!(rate(&often) > rate(&plain) && rate(&never) < rate(&plain));
    assert!(step(&with(3, 0.5)) > step(&never));
    for (line, wanted) in [
        ("plan serve DeepSeek-V3.json --speculate mtp", "--acceptance"),
        ("plan serve DeepSeek-V3.json --acceptance 0.5", "--speculate"),
        ("plan serve DeepSeek-V3.json --speculate mtp --acceptance 1.5", "from 0 to 1"),
        ("plan fit Qwen3-8B.json --speculate mtp", "has no module that drafts tokens"),
        ("plan fit DeepSeek-V3.json --speculate 4", "lookup"),
    ] {
        let output = ridge(line);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains(wanted), "{line}: {said}");
    }
}

#[test]
fn a_cache_of_8_bits_is_planned_with_its_scales() {
    let bytes = |line: &str, pointer: &str| json(line).pointer(pointer).and_then(Value::as_u64).expect(line);
    for (model, per_token) in [("Qwen3-8B", 36 * 2 * 8 * (128 + 4)), ("Meta-Llama-3.1-8B", 32 * 2 * 8 * (128 + 4))] {
        let config = format!("inspect {model}.json --cache-dtype int8 --json");
        assert_eq!(bytes(&config, "/summary/kv_bytes_per_token"), per_token);
        let fit = format!("plan fit {model}.json --cache-bits 8 --json");
        assert_eq!(bytes(&fit, "/fit/per_token"), per_token);
        // What admission counts, with the history of tokens.
        let fit = format!("{fit} --gpu-memory 40GiB --context 4096");
        assert_eq!(bytes(&fit, "/cache_bytes"), 4096 * (per_token + 4));
    }
    // A step reads them: of 8,192 tokens so many bytes more than of 1.
    let of = |context: usize| {
        let line = format!("plan kernel --model Qwen3-8B.json --cache-bits 8 --context {context} --json");
        let sums = json(&line)["roofline"]["sums"].as_array().expect("a list").clone();
        sums.iter().find(|row| row["scope"] == "step").and_then(|row| row["bytes"].as_f64()).expect("a step")
    };
    let more = (of(8192) - of(1)) / 8191.0;
    assert!((more / f64::from(36 * 2 * 8 * (128 + 4)) - 1.0).abs() < 1e-9, "{more} bytes a token");
}

#[test]
fn what_does_not_fit_is_said_with_what_would() {
    let line = "plan fit Meta-Llama-3.1-70B.json --device H200 --tp 2 --context 131072";
    assert_eq!(json(&format!("{line} --json"))["fits"], true);
    // The answer of an exit code of its own, and no error.
    let answer = |line: &str| {
        let output = ridge(line);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), said.as_str()), (Some(3), ""), "{line}");
        String::from_utf8(output.stdout).unwrap()
    };
    for (line, wanted) in [
        ("plan fit Meta-Llama-3.1-70B.json --device A100", "does not fit: tp = 1 is too small"),
        (
            "plan fit Meta-Llama-3.1-8B.json --device L4 --context 131072",
            "less than one sequence of 131,072: use tp 2 to fit one",
        ),
        ("plan serve Meta-Llama-3.1-70B.json --device A100", "the smallest sufficient degree is tp 2"),
        ("plan serve Qwen3-8B.json --batch 100000", "fit next to the weights"),
        ("plan serve Meta-Llama-3.1-70B.json --device H100 --tp 2 --prompt 100000", "does not fit: no sequence"),
        ("plan train Meta-Llama-3.1-405B.json --gpus 1 --tp 1", "does not fit"),
        ("plan fit Qwen3-30B-A3B.json --gpu-memory 1GiB", "does not fit: what stays on the GPU"),
        (
            "plan fit Qwen3-30B-A3B.json --gpu-memory 1GiB",
            "may be allocated; raise --gpu-memory, or lower --context or --step-tokens",
        ),
    ] {
        assert!(answer(line).contains(wanted), "{line}");
        if !line.starts_with("plan train") {
            let object: Value = serde_json::from_str(&answer(&format!("{line} --json"))).unwrap();
            assert_eq!(object["fits"], false, "{line}");
        }
    }
    // Of the layouts that are too large, the one that needs least.
    let said = answer("plan train Meta-Llama-3.1-70B.json --gpus 8");
    assert!(said.contains("the closest is ") && said.contains("recompute-full"), "{said}");
    assert!(!said.contains("compute-optimal"), "{said}");
}

#[test]
fn failures_that_leave_no_time_are_no_percentage() {
    let line = "plan train Qwen3-8B.json --gpus 8 --tokens 1T --price 2 --gpu-mtbf 0.01";
    let said = String::from_utf8(ridge(line).stdout).unwrap();
    assert!(said.contains("the run makes no progress") && !said.contains(" dollars"), "{said}");
    assert!(json(&format!("{line} --json"))["run"]["days_with_failures"].is_null());
}

#[test]
fn mistaken_input_is_refused_with_the_nearest_right_thing() {
    for (line, wanted) in [
        ("plan fit Qwen3-8B.json --device H10", "did you mean \"H100\"?"),
        ("plan fit Qwen3-8B.json --tp 3", "tp = 3 does not divide 32 heads; the nearest divisor is 2"),
        ("plan fit Qwen3-8B.json --device 80gb", "did you mean \"A100-80GB\"?"),
        ("plan fit Qwen3-8B.json --ep 2", "the model has no experts; set ep to 1"),
        ("plan fit Qwen3-8B.json --context 32k", "write 32k out: 32000 or 32768"),
        ("plan train Qwen3-8B.json --gpus 8 --tp 0", "must be a whole number from 1"),
        ("plan comm all-reduce 80gb", "did you mean GB?"),
        ("plan comm all-reduce 1GB --network 400Gb", "did you mean Gb/s?"),
        ("plan fit Qwen3-8B.json --context 1000000", "the longest is 40960"),
        ("plan fit Qwen3-8B.json --weights int5", "choose one of bf16, fp8, q8, int4, nvfp4, mxfp4"),
        ("plan fit nowhere.json", "give a folder with a config.json"),
        ("plan train Qwen3-8B.json --gpus 8 --pp 8", "the nearest valid pp is 9"),
        ("plan train Qwen3-8B.json --gpus 8 --tp 3", "= 3; the nearest is 9"),
        ("plan train Qwen3-8B.json --gpus 8 --tp 2 --dp 8", "is not tp x pp x cp x dp = 16"),
        ("plan train Qwen3-8B.json --gpus 8 --zero 4", "ZeRO stages are 0 to 3"),
        ("plan train Qwen3-8B.json --gpus 8 --tokens 15tb", "15T (K, M, B, T)"),
        ("plan serve Qwen3-8B.json --device A100 --weights fp8", "gives no dense fp8 rate; it gives: f16, bf16, int8"),
        ("plan fit --shape D=4096,L=32 --device H100", "lacks N"),
        ("plan fit", "MODEL"),
        ("plan fit Qwen3-8B.json --rope-scaling yarn", "is not JSON"),
        ("plan fit Qwen3-8B.json --html Qwen3-8B.json", "is an input of this command"),
        ("plan fit Qwen3-8B.json --plot=../configs/Qwen3-8B.json", "is an input of this command"),
        ("plan serve Qwen3-8B.json --rate 1e300", "at most 1e9"),
        ("plan serve Qwen3-8B.json --device cpu", "ridge bench --calibrate"),
        ("plan train Qwen3-8B.json --gpus 8 --tokens 1e300", "at most 1e18"),
        ("plan train Qwen3-8B.json --gpus 8 --seq 1000000", "maximum of 40960"),
        ("plan comm all-reduce 1e30GB", "the maximum is 1000000 TB"),
        ("plan pipeline --stages 4 --micro-batches 8 --paired 5", "must be above 0"),
        ("plan kernel --threads 128 --registers 300", "the nearest is 255"),
        ("plan kernel --matmul 4096x4096", "3 whole numbers"),
        ("plan kernel --matmul 64x64x64 --device A100 --dtype fp8", "it gives: f16, bf16, int8"),
        ("plan kernel --model Qwen3-8B.json --context 1000000", "maximum of 40960"),
        ("plan kernel --model Qwen3-8B.json --new 512 --context 64", "the 64 tokens of --context"),
        ("plan kernel --device H100", "--matmul"),
        ("plan kernel --device MI300X --threads 64 --registers 32", "give --capability"),
        ("plan kernel --capability 8.8 --threads 128 --registers 30", "the nearest is 8.9"),
        ("plan kernel --threads 128 --registers 30 --stride 6", "the nearest below is 4"),
        ("plan serve Mixtral-8x7B-v0.1.json --tp 4 --ep 3", "which share the experts"),
        ("plan comm all-reduce 64Mb", "b means bits"),
        ("plan fit Qwen3-8B.json --gpu-memory 24", "add its unit, as in 64MiB"),
        ("plan fit Qwen3-8B.json --gpu-memory 0GiB", "must be above 0"),
        ("plan fit Qwen3-8B.json --gpu-memory 8GiB --tp 2", "plans are for one GPU"),
        ("plan fit Qwen3-8B.json --gpu-memory 8GiB --cache-bits 4", "the cache is one that the engine has"),
        ("plan fit Qwen3-8B.json --gpu-memory 8GiB --weights int4", "as the model's files or its config have them"),
        ("plan fit Qwen3-8B.json --gpu-memory 8GiB --weights bf16", "as the model's files or its config have them"),
        ("plan fit Qwen3-8B.json --gpu-memory 200GiB", "exceeds the memory of H100-SXM, 79.6 GiB"),
        ("plan fit Qwen3-8B.json --gpu-memory 8GiB --device B200", "give --host-link, such as 55GB/s"),
        ("plan fit Qwen3-8B.json --gpu-memory 8GiB --context 50000", "the longest is 40960"),
        ("plan fit Qwen3-8B.json --gpu-memory 8GiB --host-link 0GB/s", "must be above 0"),
        ("plan fit Qwen3-8B.json --host-link 55GB/s", "--gpu-memory"),
        ("plan comm all-reduce 64", "add its unit, as in 64MiB"),
        ("plan comm all-reduce 64MiB --network 400Gbps", "write Gb/s for bits, GB/s for bytes"),
        ("plan comm allreduce 64MiB", "must be one of all-reduce, all-gather"),
        ("plan comm all-reduce 1GB --device H20O", "did you mean \"H200\"?"),
        ("plan comm send-recv 1GB --gpus 8", "send-recv has two ranks"),
        ("plan pipeline --stages 4 --micro-batches 7 --schedule interleaved", "the nearest is 8"),
        ("plan pipeline --stages 5 --micro-batches 20 --schedule dualpipe", "the nearest is 6"),
        ("plan topology --file ../topology/dgx-h100.txt --tp 16 --dp 1 --nodes 1", "set nodes = 2"),
        ("plan topology --file ../topology/dgx-h100.txt --tp 4 --dp 2 --ep 3", "the nearest below is 2"),
        ("plan topology --file Qwen3-8B.json", "topology, line 1: no line lists GPU0"),
        ("plan topology --file ../topology/dgx-h100.txt --device H20O", "did you mean \"H200\"?"),
        ("plan diagnose ../diagnose/launch.json --device H20O", "did you mean \"H200\"?"),
        ("plan pipeline --stages 4 --micro-batches 8 --forward 10", "add its unit"),
        ("plan pipeline --stages 4 --micro-batches 8 --paired 0 --schedule dualpipe", "must be above 0"),
    ] {
        let output = ridge(line);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{line}: {said}");
        assert!(said.contains(wanted), "{line}: {said}");
        assert!(!said.contains("panicked"), "{said}");
    }
}

#[test]
fn training_by_ridge_is_planned_by_its_own_gradient() {
    let own = json("plan train Qwen3-8B.json --gpus 8 --batch 64 --seq 256 --software ridge --top 2 --json");
    let ranked = own["ranked"].as_array().unwrap();
    assert!(ranked.iter().all(|r| r["layout"]["recompute"] == "none" && r["layout"]["sequence_parallel"] == false));
    let refused = ridge("plan train DeepSeek-V3.2.json --gpus 8 --software ridge");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("no form without a cache"), "{said}");
}

#[test]
fn training_by_ridge_on_one_gpu_is_planned_by_its_compiled_programs() {
    let plan =
        json("plan train Meta-Llama-3.1-8B.json --device H200 --gpus 1 --batch 1 --seq 8192 --software ridge --json");
    let choices = plan["choices"].as_array().unwrap();
    let of = |recomputation: &str, offload: &str| {
        let is = |c: &&Value| c["recomputation"] == recomputation && c["offload"] == offload;
        let choice = choices.iter().find(is).unwrap();
        ["device_bytes", "host_bytes", "seconds"].map(|key| choice[key].as_f64().unwrap())
    };
    assert_eq!(choices.len(), 12);
    // 16 bytes a parameter, in states, of which 12 are the optimiser's alone.
    let parameters = plan["parameters"].as_f64().unwrap();
    let states = plan["best"]["memory"]["states"].as_f64().unwrap();
    assert!((states / (16.0 * parameters) - 1.0).abs() < 1e-3, "{states}");
    let host = of("none", "optimizer")[1];
    assert!((host / (12.0 * parameters) - 1.0).abs() < 1e-3, "{host}");
    let [[whole, _, fast], [full, _, slow], [moved, held, _]] =
        [of("none", "none"), of("full", "none"), of("none", "activations")];
    assert!(full < 0.9 * whole && moved < 0.9 * whole && held > 20e9 && slow > fast, "{plan}");
    assert_eq!((&plan["best"]["fits"], &plan["best"]["recomputation"]), (&true.into(), &"full".into()));
    // As one run has it: an H100 needs the host.
    let small = json("plan train Meta-Llama-3.1-8B.json --gpus 1 --batch 1 --seq 8192 --software ridge --json");
    assert!(["optimizer", "all"].contains(&small["best"]["offload"].as_str().unwrap()), "{small}");
    let model = "plan train Meta-Llama-3.1-8B.json --gpus 1 --software ridge";
    for (with, wanted) in [
        ("--tp 2", "is one GPU"),
        ("--top 3", "--top"),
        ("--recompute products", "give none or full"),
        ("--batch 1000000 --micro-batch 1000000 --seq 131072", "is too many sequences of 131072 tokens"),
    ] {
        let refused = ridge(&format!("{model} {with}"));
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains(wanted), "{with}: {said}");
    }
}

#[test]
fn a_run_of_ridge_on_one_gpu_takes_the_time_and_money_of_its_steps() {
    let plan = |with: &str| {
        let of = "plan train Meta-Llama-3.1-8B.json --device H200 --gpus 1 --batch 1 --seq 2048 --software ridge";
        json(&format!("{of} --tokens 1B --price 2.5 {with} --json"))
    };
    let number = |value: &Value| value.as_f64().unwrap();
    let own = plan("--recompute full");
    let choices = own["choices"].as_array().unwrap();
    assert!(choices.len() == 4 && choices.iter().all(|choice| choice["recomputation"] == "full"), "{own}");
    let days = number(&own["best"]["seconds"]) * 1e9 / 2048.0 / 86400.0;
    let run = &own["run"];
    assert!(
        (number(&run["days"]) / days - 1.0).abs() < 1e-9 && run["days_with_failures"].as_f64() > Some(days),
        "{run}"
    );
    assert!((number(&run["dollars"]) / (24.0 * 2.5 * number(&run["days_with_failures"])) - 1.0).abs() < 1e-9, "{run}");
    let failing = plan("--recompute full --gpu-mtbf 100 --checkpoint 300");
    assert!(number(&failing["run"]["dollars"]) > 1.03 * number(&run["dollars"]), "{failing}");
}

#[test]
fn devices_are_listed_and_models_of_a_few_numbers_are_planned() {
    let devices = json("plan devices --json");
    assert!(devices["devices"].as_array().unwrap().len() >= 16, "{devices}");
    let listed = String::from_utf8(ridge("plan devices").stdout).unwrap();
    for name in ["RTX3090", "RTX5090", "A10 ", "L40S", "M4-Max"] {
        assert!(listed.contains(name), "{listed}");
    }
    // Llama 3.1 8B by its sizes.
    let fit = json("plan fit --shape D=4096,L=32,V=128256,m=3.5,N=32,K=8 --device M4-Max --json");
    assert_eq!(fit["parameters"], json("plan fit Meta-Llama-3.1-8B.json --json")["parameters"]);
    let scaled = [
        "plan",
        "fit",
        "Qwen3-8B.json",
        "--context",
        "131072",
        "--json",
        "--rope-scaling",
        r#"{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}"#,
    ];
    let configs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/configs");
    let output = binary().args(scaled).current_dir(configs).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
