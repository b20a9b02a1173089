//! Every schedule against its closed forms, and what any schedule must keep with any times.

use std::collections::HashMap;

use super::*;

const UNIT: Stage = Stage { forward: 1.0, input: 1.0, weight: 1.0, activations: 1.0 };

fn simulated(schedule: Schedule, p: usize, v: usize, m: usize, stage: Stage) -> Timeline {
    Pipeline::uniform(schedule, p, v, m, stage).unwrap().simulate().unwrap()
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-9 * a.abs().max(b.abs()).max(1.0)
}

/// Numbers without end, the same in each run.
struct Random(u64);

impl Random {
    fn next(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

#[test]
fn gpipe_and_1f1b_lose_p_minus_1_of_m_plus_p_minus_1() {
    let stage = Stage { forward: 1.3, input: 1.1, weight: 0.9, activations: 5.0 };
    for (p, m) in [(1, 1), (2, 2), (4, 8), (8, 8), (8, 32), (5, 7), (16, 3)] {
        for schedule in [Schedule::GPipe, Schedule::OneFOneB] {
            let t = simulated(schedule, p, 1, m, stage);
            let (p, m) = (p as f64, m as f64);
            assert!(close(t.makespan, (m + p - 1.0) * 3.3), "{schedule} {p} {m}: {}", t.makespan);
            assert!(close(t.bubble, (p - 1.0) / (m + p - 1.0)), "{schedule} {p} {m}: {}", t.bubble);
        }
        let alive = |s| simulated(s, p, 1, m, stage).devices.iter().map(|d| d.peak_alive).collect::<Vec<_>>();
        assert_eq!(alive(Schedule::GPipe), vec![m; p]);
        assert_eq!(alive(Schedule::OneFOneB), (0..p).map(|d| (p - d).min(m)).collect::<Vec<_>>());
        let bytes = simulated(Schedule::OneFOneB, p, 1, m, stage).devices[0].peak_bytes;
        assert!(close(bytes, 5.0 * p.min(m) as f64));
    }
}

#[test]
fn interleaving_divides_the_bubble_and_keeps_more() {
    for (p, v, m) in [(2, 2, 2), (4, 2, 8), (4, 4, 8), (8, 3, 16), (8, 2, 64)] {
        let t = simulated(Schedule::Interleaved, p, v, m, UNIT);
        let wanted = 3.0 * (m as f64 + (p as f64 - 1.0) / v as f64);
        assert!(close(t.makespan, wanted), "{p} {v} {m}: {} {wanted}", t.makespan);
        // Korthikanti et al. 2022, section 4.2.3: p + (p - 1) / v micro-batches of a device's layers.
        let alive = (p + (p - 1) * 2 + (v - 1) * p + 1 - p).min(m * v);
        assert_eq!(t.devices[0].peak_alive, alive, "{p} {v} {m}");
        if m > 2 * p {
            assert!(close(t.devices[0].peak_bytes, p as f64 + (p as f64 - 1.0) / v as f64), "{p} {v} {m}");
        }
    }
}

#[test]
fn zb_h1_keeps_a_third_of_the_bubble_at_the_memory_of_1f1b() {
    for (p, m) in [(2, 4), (4, 4), (4, 8), (8, 16), (8, 40), (6, 13)] {
        let t = simulated(Schedule::ZeroBubbleH1, p, 1, m, UNIT);
        let (pf, mf) = (p as f64, m as f64);
        assert!(close(t.makespan, 3.0 * mf + (pf - 1.0)), "{p} {m}: {}", t.makespan);
        assert!(t.devices.iter().all(|d| d.peak_alive <= p), "{p} {m}: {:?}", t.devices);
    }
}

#[test]
fn zb_v_fills_every_device_at_the_memory_of_1f1b() {
    for (p, m) in [(2, 6), (4, 8), (4, 20), (6, 18), (8, 24), (8, 40)] {
        let t = simulated(Schedule::ZeroBubbleV, p, 2, m, UNIT);
        // The device where the V turns begins p - 1 half passes late and never waits: no schedule is shorter.
        assert!(close(t.makespan, 3.0 * m as f64 + 0.5 * (p as f64 - 1.0)), "{p} {m}: {}", t.makespan);
        assert!(t.waiting < 0.005, "{p} {m}: {}", t.waiting);
        assert!(t.devices.iter().all(|d| d.peak_bytes <= p as f64 + 1e-9), "{p} {m}: {:?}", t.devices);
    }
}

#[test]
fn dualpipe_waits_and_keeps_what_its_table_says() {
    // DeepSeek-AI 2024, table 2: (p / 2 - 1) (FB + B - 3 W) with B both gradients, p + 1 micro-batches in flight.
    for (p, m) in [(2, 4), (4, 8), (4, 16), (8, 16), (8, 20), (8, 40)] {
        let t = simulated(Schedule::DualPipe, p, 1, m, UNIT);
        let wanted = (p as f64 / 2.0 - 1.0) * (3.0 + 2.0 - 3.0);
        let waits = t.devices.iter().map(|d| t.makespan - d.busy).fold(0.0, f64::max);
        assert!(close(waits, wanted), "{p} {m}: {waits} {wanted}");
        assert!(t.devices.iter().all(|d| d.peak_alive <= p + 1), "{p} {m}: {:?}", t.devices);
        assert!(close(t.devices[0].busy, 3.0 * m as f64));
    }
    // A pair that takes less time than its passes one by one shortens the step.
    let mut pipeline = Pipeline::uniform(Schedule::DualPipe, 8, 1, 40, UNIT).unwrap();
    pipeline.paired = 0.8;
    assert!(pipeline.simulate().unwrap().makespan < 0.87 * simulated(Schedule::DualPipe, 8, 1, 40, UNIT).makespan);
}

#[test]
fn the_bubble_of_a_search_is_that_of_the_simulation() {
    let stage = Stage { forward: 1.0, input: 1.1, weight: 0.9, activations: 1.0 };
    for (p, v, m, message) in [(4, 1, 16, 0.0), (8, 1, 8, 0.0), (4, 2, 16, 0.0), (8, 4, 64, 0.0), (4, 1, 16, 0.01)] {
        let schedule = if v > 1 { Schedule::Interleaved } else { Schedule::OneFOneB };
        let mut pipeline = Pipeline::uniform(schedule, p, v, m, stage).unwrap();
        (pipeline.message, pipeline.blocking) = (message, true);
        let t = pipeline.simulate().unwrap();
        let planned = m as f64 * 3.0 + bubble(p, v, m, 3.0, message);
        if message == 0.0 {
            assert!(close(t.makespan, planned), "{p} {v} {m}: {} {planned}", t.makespan);
        } else {
            // Both ends of the pipeline send once a micro-batch, not twice.
            assert!((t.makespan / planned - 1.0).abs() < 2e-3, "{p} {v} {m}: {} {planned}", t.makespan);
        }
    }
}

/// All that any schedule must keep, whatever the times: each pass once, one slot at a time, nothing before its inputs.
fn holds(pipeline: &Pipeline, t: &Timeline) {
    let split = |k: PassKind| matches!(k, PassKind::Input | PassKind::Weight);
    let mut by: HashMap<(u8, usize, usize), PassEvent> = HashMap::new();
    let code = |kind| match kind {
        PassKind::Forward => 0,
        PassKind::Backward | PassKind::Input => 1,
        PassKind::Weight => 2,
    };
    for e in &t.events {
        assert_eq!(e.device, pipeline.device(e.pass.stage));
        assert!(by.insert((code(e.pass.kind), e.pass.micro, e.pass.stage), *e).is_none(), "{e:?} twice");
    }
    let per_micro = pipeline.stages.len();
    let count = |k: u8| by.keys().filter(|key| key.0 == k).count();
    assert_eq!(count(0), per_micro * pipeline.micro_batches);
    assert_eq!(count(1), per_micro * pipeline.micro_batches);
    assert_eq!(count(2), t.events.iter().filter(|e| split(e.pass.kind)).count() / 2);
    for d in 0..pipeline.devices {
        let of: Vec<&PassEvent> = t.events.iter().filter(|e| e.device == d).collect();
        for pair in of.windows(2) {
            let together = pair[0].start == pair[1].start && pair[0].end == pair[1].end;
            assert!(together || pair[1].start >= pair[0].end - 1e-9, "{:?} and {:?} overlap", pair[0], pair[1]);
        }
    }
    for e in &t.events {
        let after = |k: u8, stage: usize| {
            let input = by[&(k, e.pass.micro, stage)];
            let late = input.end + pipeline.delay(stage, e.pass.stage);
            assert!(e.start >= late - 1e-9, "{e:?} begins before {input:?} has arrived");
        };
        match e.pass.kind {
            PassKind::Forward => {
                if let Some(before) = pipeline.before(e.pass.stage) {
                    after(0, before);
                }
            }
            PassKind::Backward | PassKind::Input => {
                after(0, e.pass.stage);
                if let Some(behind) = pipeline.behind(e.pass.stage) {
                    after(1, behind);
                }
            }
            PassKind::Weight => after(1, e.pass.stage),
        }
    }
}

#[test]
fn every_schedule_keeps_its_dependencies_with_any_times() {
    let mut random = Random(7);
    for _ in 0..60 {
        for schedule in Schedule::ALL {
            let p = 2 * (1 + random.next(4) as usize);
            let m = match schedule {
                Schedule::Interleaved => p * (1 + random.next(3) as usize),
                Schedule::DualPipe => 2 * p + 2 * random.next(5) as usize,
                _ => 1 + random.next(20) as usize,
            };
            let chunks = if schedule == Schedule::Interleaved { 2 + random.next(3) as usize } else { 1 };
            let mut pipeline = Pipeline::uniform(schedule, p, chunks, m, UNIT).unwrap();
            for s in &mut pipeline.stages {
                let mut time = || random.next(9) as f64 / 4.0;
                *s = Stage { forward: time(), input: time(), weight: time(), activations: time() };
            }
            pipeline.message = random.next(5) as f64 / 4.0;
            pipeline.blocking = random.next(2) == 0;
            let t = pipeline.simulate().unwrap();
            holds(&pipeline, &t);
            assert!((0.0..=1.0).contains(&t.bubble) || t.makespan == 0.0, "{schedule}: {}", t.bubble);
        }
    }
}

#[test]
fn what_cannot_run_names_the_nearest_that_can() {
    let said = |s, p, v, m| Pipeline::uniform(s, p, v, m, UNIT).unwrap_err().to_string();
    assert!(said(Schedule::Interleaved, 4, 2, 10).contains("the nearest is 12"));
    assert!(said(Schedule::Interleaved, 4, 1, 8).contains("choose 2"));
    assert!(said(Schedule::DualPipe, 5, 1, 20).contains("the nearest is 6"));
    assert!(said(Schedule::DualPipe, 8, 1, 9).contains("the nearest is 16"));
    assert!(said(Schedule::OneFOneB, 4, 3, 8).contains("choose 1"));
    assert!(said(Schedule::GPipe, 0, 1, 8).contains("must be at least 1"));
    assert!(said(Schedule::GPipe, 1000, 1, 1_000_000).contains("at most"));
    let bad = Stage { forward: f64::NAN, ..UNIT };
    assert!(Pipeline::uniform(Schedule::GPipe, 2, 1, 2, bad).is_err());
}

#[test]
fn drawings_show_every_pass() {
    let t = simulated(Schedule::OneFOneB, 2, 1, 2, Stage { forward: 1.0, input: 1.0, weight: 1.0, activations: 0.0 });
    assert_eq!(t.text(18), "   0 F0F1....B0bb..B1bb\n   1 ..F0B0bbF1B1bb....\n");
    let trace = t.chrome_trace();
    let events = trace["traceEvents"].as_array().unwrap();
    assert_eq!(events.iter().filter(|e| e["ph"] == "X").count(), 8);
    let svg = crate::plot::draw(&[t.chart("a < b").into()]);
    assert_eq!(svg.matches("<title>").count(), 8);
    assert!(svg.contains("a &lt; b") && svg.ends_with("</svg>\n"));
}
