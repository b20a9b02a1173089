//! Traces whose limits are known (`fixtures/diagnose`), and such as cannot be.

use super::*;

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(format!("{}/../../fixtures/diagnose/{name}.json", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

fn of(name: &str) -> Diagnosis {
    diagnose(&fixture(name)[..], None).unwrap()
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() < 0.01
}

#[test]
fn each_trace_has_the_verdict_that_it_was_made_for() {
    for (name, verdict) in [
        ("launch", Verdict::Launch),
        ("host", Verdict::Host),
        ("scheduler", Verdict::Scheduler),
        ("communication", Verdict::Communication),
        ("compute", Verdict::Compute),
        ("memory", Verdict::Memory),
    ] {
        let found = of(name);
        assert_eq!(found.verdict, verdict, "{name}: {found:?}");
        assert_eq!(found.sure, Confidence::High, "{name}: {}", found.because);
    }
}

#[test]
fn the_time_divides_without_rest() {
    for name in ["launch", "host", "scheduler", "communication", "compute", "memory", "cpu"] {
        let m = of(name).measured;
        let sum = m.matmul + m.attention + m.other + m.copies + m.communication + m.idle;
        assert!((sum - 1.0).abs() < 1e-6, "{name}: {m:?}");
    }
}

#[test]
fn the_numbers_are_those_of_the_events() {
    let launch = of("launch").measured;
    // 60 kernels of 3 us, one each 14 us.
    assert_eq!((launch.kernels, launch.gaps), (60, 59));
    assert!((launch.seconds - 829e-6).abs() < 1e-9 && (launch.mean_kernel - 3e-6).abs() < 1e-9, "{launch:?}");
    assert!(near(launch.idle, 59.0 * 11.0 / 829.0) && launch.short_gaps == 1.0);
    assert!((launch.queue.unwrap() - 6e-6).abs() < 1e-9);
    // Sums of 150 us alone, and of 50 behind a product.
    let sums = of("communication").measured;
    assert!(near(sums.communication, 150.0 / 273.0) && sums.idle < 0.02, "{sums:?}");
    assert!(near(sums.hidden_communication, 50.0 / 273.0), "{sums:?}");
    // Products of 8192^3 in 1.6 ms: 687 TFLOP/s.
    let compute = of("compute").measured;
    assert!((compute.flops_per_second.unwrap() / 687.2e12 - 1.0).abs() < 1e-3);
    assert_eq!(compute.compute_floor, Some(1.0));
    assert_eq!(of("memory").measured.compute_floor, Some(0.0));
    // The loader is what the host was in.
    assert!(of("host").measured.in_gaps[0].name.contains("DataLoader"));
}

#[test]
fn a_trace_of_torch_on_a_cpu_is_judged_by_its_operators() {
    let found = of("cpu");
    assert!(found.measured.on_cpu);
    assert_eq!(found.measured.longest[0].name, "aten::mm");
    assert!(found.measured.matmul > found.measured.other);
    assert_eq!(found.verdict, Verdict::Compute, "{found:?}");
}

fn event(rest: &str) -> String {
    format!("{{\"ph\":\"X\",\"cat\":\"kernel\",\"name\":\"gemm\",{rest}}}")
}

fn judged(text: &str) -> Result<Diagnosis, PlanError> {
    diagnose(text.as_bytes(), None)
}

#[test]
fn a_list_of_events_and_odd_kinds_of_values_are_read() {
    let text = format!(
        "[{},{},null_event]",
        event("\"ts\":0,\"dur\":10,\"args\":\"none\""),
        event("\"ts\":\"20\",\"dur\":10,\"args\":{\"device\":null,\"Input Dims\":[[1,[2,{}]],7]}"),
    )
    .replace(",null_event", "");
    let m = judged(&text).unwrap().measured;
    assert_eq!((m.kernels, m.gaps), (2, 1));
    assert!(near(m.idle, 1.0 / 3.0));
}

#[test]
fn ridges_own_profile_is_judged_by_its_rates() {
    let profile = |bytes: f64| {
        let one =
            |i: u32| event(&format!("\"ts\":{},\"dur\":9.9,\"args\":{{\"flops\":1e9,\"bytes\":{bytes}}}", 10 * i));
        let events: Vec<String> = (0..30).map(one).collect();
        let own = "\"ridge\":{\"flops_per_second\":2e14,\"bytes_per_second\":1e12,\"device\":\"this\"}";
        judged(&format!("{{{own},\"traceEvents\":[{}]}}", events.join(","))).unwrap()
    };
    let (compute, memory) = (profile(1e4), profile(9e6));
    assert_eq!((compute.verdict, memory.verdict), (Verdict::Compute, Verdict::Memory));
    assert_eq!((compute.sure, memory.sure), (Confidence::High, Confidence::High));
    assert!(memory.evidence.iter().any(|e| e.contains("% of the device's bandwidth")), "{:?}", memory.evidence);
}

#[test]
fn what_is_no_trace_is_refused_with_what_to_do() {
    let deep = format!("[{{\"name\":{}", "[".repeat(100_000));
    let good = event("\"ts\":0,\"dur\":10");
    for (text, wanted) in [
        ("", "truncated"),
        ("{}", "has no traceEvents"),
        ("7", "a trace: an object with traceEvents"),
        ("[7]", "an event, which is an object"),
        (&*format!("{{\"traceEvents\":[{good},"), "after 1 events; the file is truncated"),
        (&format!("{{\"traceEvents\":[{good}]}} more"), "trailing characters"),
        (&deep, "recursion limit"),
        ("{\"traceEvents\":[]}", "no kernels or operators"),
        (&format!("[{}]", event("\"ts\":0,\"dur\":0")), "have zero duration"),
        (&format!("[{}]", event("\"ts\":0,\"dur\":-5")), "no kernels or operators"),
        (&format!("[{}]", event("\"ts\":1e300,\"dur\":5")), "no kernels or operators"),
        (&format!("[{}]", event("\"ts\":1e999,\"dur\":5")), "out of range"),
        ("not json", "expected"),
    ] {
        let said = judged(text).unwrap_err().to_string();
        assert!(said.starts_with("the trace: ") && said.contains(wanted), "{said}");
    }
    let odd = format!("[{good},{},{}]", event("\"ts\":5,\"dur\":-5"), event("\"ts\":5"));
    assert_eq!(judged(&odd).unwrap().measured.ignored, 2);
}

#[test]
fn no_cut_of_a_trace_makes_it_panic() {
    let whole = fixture("launch");
    for cut in (0..whole.len()).step_by(487) {
        assert!(diagnose(&whole[..cut], None).is_err());
    }
}
