//! What every backend promises of steps in flight: order, kept inputs, outputs of their own, and late inputs.
#![allow(unreachable_pub)] // each test binary uses its part

use std::sync::Arc;

use ridge_graph::{Bindings, Builder, DType, Graph, Type};
use ridge_runtime::{Backend, Bucket, Compiled, SLOTS, Session, Slot, Ticket, plan};

const ROWS: usize = 50;
const COLUMNS: usize = 40;
const BYTES: usize = ROWS * COLUMNS * 4;

fn ty() -> Type {
    Type::tensor(DType::F32, [ROWS, COLUMNS])
}

/// `sum' = sum + x + list`, given as `y`, and with `late`, the same sorted and times the late input `mask`, as `masked`.
fn graph(late: bool) -> Graph {
    let mut g = Builder::new();
    let [x, list] = ["x", "list"].map(|name| g.step_input(name, ty()).expect("fresh"));
    let state = g.state("sum", ty()).expect("fresh");
    let before = g.state_read(state).expect("reads");
    let by = g.add(x, list).expect("types");
    let after = g.add(before, by).expect("types");
    g.state_write(state, after).expect("writes");
    let mut outputs = vec![("y".into(), after)];
    if late {
        let mask = g.late_input("mask", ty()).expect("fresh");
        let sorted = g.sort(after, 1, true, COLUMNS).expect("types").0;
        outputs.push(("masked".into(), g.mul(sorted, mask).expect("types")));
    }
    g.finish(outputs).expect("finishes")
}

/// A session over a sum of zeros, and `graph` compiled with all outputs.
fn compiled(backend: &Arc<dyn Backend>, graph: &Graph) -> (Session, Compiled) {
    let mut session = Session::new(Arc::clone(backend));
    session.allocate_states(graph, &Bindings::new()).expect("fits");
    let outputs: Vec<&str> = graph.main().outputs.iter().map(|o| &*o.name).filter(|name| *name != "sum").collect();
    let compiled = session.compile(graph, &outputs).expect("compiles");
    (session, compiled)
}

fn bucket(compiled: &Compiled) -> Bucket {
    compiled.bucket(&Bindings::new()).expect("binds")
}

fn fill(bytes: &mut [u8], value: f32) {
    bytes.as_chunks_mut::<4>().0.fill(value.to_le_bytes());
}

fn index(bucket: &Bucket, name: &str) -> usize {
    bucket.input_index(name).expect("is declared").expect("is read")
}

/// Stages `value` for the step input `name`.
fn stage(bucket: &mut Bucket, slot: &Slot, name: &str, value: f32) {
    let index = index(bucket, name);
    fill(bucket.steps().input(slot, index), value);
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|c| f32::from_le_bytes(*c)).collect()
}

/// Requires that output `name` is `value` everywhere.
fn gives(bucket: &mut Bucket, ticket: &Ticket, name: &str, value: f32) {
    let index = bucket.output_index(name).expect("is computed");
    let got = floats(bucket.steps().output(ticket, index));
    assert!(got.iter().all(|x| *x == value), "{name}: wants {value}, got {:?}", &got[..8]);
}

/// Checks all of it.
pub fn holds(backend: &Arc<dyn Backend>) {
    states_go_from_step_to_step(backend);
    buckets_take_turns(backend);
    inputs_stay(backend);
    late_inputs_are_waited_for(backend);
    slots_are_counted(backend);
}

fn states_go_from_step_to_step(backend: &Arc<dyn Backend>) {
    let (_session, compiled) = compiled(backend, &graph(false));
    let mut bucket = bucket(&compiled);
    let mut sum = 0.0;
    let mut flying: Vec<(Ticket, f32)> = Vec::new();
    for step in 0..60 {
        // All slots in flight; of each full ring the newer step is waited for first.
        if flying.len() == SLOTS {
            if step % 4 == 0 {
                flying.reverse();
            }
            for (ticket, sum) in flying.drain(..) {
                if step % 3 == 0 {
                    while !bucket.steps().poll(&ticket).expect("runs") {
                        std::thread::yield_now();
                    }
                } else {
                    bucket.steps().wait(&ticket).expect("runs");
                }
                gives(&mut bucket, &ticket, "y", sum);
                gives(&mut bucket, &ticket, "y", sum);
            }
        }
        let slot = bucket.steps().stage().expect("is free");
        stage(&mut bucket, &slot, "x", step as f32);
        stage(&mut bucket, &slot, "list", 1.0);
        let ticket = bucket.steps().submit(slot).expect("is queued");
        sum += step as f32 + 1.0;
        flying.push((ticket, sum));
    }
}

fn buckets_take_turns(backend: &Arc<dyn Backend>) {
    let (session, plain) = compiled(backend, &graph(false));
    let with_late = session.compile(&graph(true), &["masked"]).expect("compiles");
    let mut buckets = [bucket(&plain), bucket(&with_late), bucket(&plain)];
    let mut sum = 0.0;
    for round in 0..10 {
        let mut flying = Vec::new();
        for nth in 0..SLOTS {
            for (b, bucket) in buckets.iter_mut().enumerate() {
                let slot = bucket.steps().stage().expect("is free");
                let add = (round + 10 * b + 40 * nth) as f32;
                stage(bucket, &slot, "x", add);
                sum += add;
                if b == 1 {
                    // Late inputs that are there in time do not hold the step up.
                    stage(bucket, &slot, "mask", 2.0);
                }
                let ticket = bucket.steps().submit(slot).expect("is queued");
                assert!(!bucket.steps().is_held(&ticket));
                flying.push((b, ticket, sum));
            }
        }
        for (b, ticket, sum) in flying.into_iter().rev() {
            buckets[b].steps().wait(&ticket).expect("runs");
            let (name, wanted) = if b == 1 { ("masked", 2.0 * sum) } else { ("y", sum) };
            gives(&mut buckets[b], &ticket, name, wanted);
        }
    }
}

fn inputs_stay(backend: &Arc<dyn Backend>) {
    let (_session, compiled) = compiled(backend, &graph(false));
    let (mut bucket, mut other) = (bucket(&compiled), bucket(&compiled));
    let list = index(&bucket, "list");
    let mut sum = 0.0;
    // Nothing staged: zeros. Then what the step before of this bucket had, whatever another bucket has.
    for (x, wanted) in [(None, 0.0), (Some(3.0), 3.0), (None, 3.0), (None, 3.0), (Some(5.0), 5.0), (None, 5.0)] {
        let slot = bucket.steps().stage().expect("is free");
        if let Some(x) = x {
            stage(&mut bucket, &slot, "x", x);
        }
        sum += wanted;
        let ticket = bucket.steps().submit(slot).expect("is queued");
        let slot = other.steps().stage().expect("is free");
        stage(&mut other, &slot, "x", 100.0);
        let its = other.steps().submit(slot).expect("is queued");
        gives_after(&mut bucket, &ticket, sum);
        sum += 100.0;
        gives_after(&mut other, &its, sum);
    }
    // The front of a list: the rest stays.
    let before = sum + 5.0;
    for (front, value) in [(BYTES, 7.0), (8, 9.0), (0, 11.0)] {
        let slot = bucket.steps().stage().expect("is free");
        fill(bucket.steps().input_part(&slot, list, front).expect("fits"), value);
        let ticket = bucket.steps().submit(slot).expect("is queued");
        bucket.steps().wait(&ticket).expect("runs");
        let got = floats(bucket.steps().output(&ticket, 0));
        let wanted = match front {
            BYTES => (before + 7.0, before + 7.0),
            8 => (before + 7.0 + 5.0 + 9.0, before + 7.0 + 5.0 + 7.0),
            _ => (before + 7.0 + 2.0 * (5.0 + 9.0), before + 7.0 + 2.0 * (5.0 + 7.0)),
        };
        assert_eq!((got[1], got[2]), wanted, "{front} bytes");
    }
    let slot = bucket.steps().stage().expect("is free");
    assert!(bucket.steps().input_part(&slot, list, BYTES + 1).is_err());
}

fn gives_after(bucket: &mut Bucket, ticket: &Ticket, sum: f32) {
    bucket.steps().wait(ticket).expect("runs");
    gives(bucket, ticket, "y", sum);
}

fn late_inputs_are_waited_for(backend: &Arc<dyn Backend>) {
    let graph = graph(true);
    let (session, compiled) = compiled(backend, &graph);
    let planned = plan(compiled.graph(), &Bindings::new()).expect("plans");
    assert!(planned.cut > 0 && planned.cut < planned.launches.len(), "the update does not need the mask");
    let (mut bucket, mut other) = (bucket(&compiled), bucket(&compiled));
    let mask = index(&bucket, "mask");
    let bytes = |value: f32, len: usize| -> Vec<u8> { value.to_le_bytes().repeat(len / 4) };
    let mut sum = 0.0;
    let mut before: Option<(Ticket, f32)> = None;
    for step in 0..20 {
        // A step in flight before it, which reads its mask while this one is held.
        let slot = bucket.steps().stage().expect("is free");
        stage(&mut bucket, &slot, "x", 1.0);
        let ticket = bucket.steps().submit(slot).expect("is queued");
        sum += 1.0;
        assert!(bucket.steps().is_held(&ticket) && !bucket.steps().poll(&ticket).expect("runs"));
        assert!(bucket.steps().wait(&ticket).is_err(), "would wait for ever");
        // Nothing goes behind it, and nothing that is refused breaks or changes anything.
        let refused = other.steps().stage().expect("is free");
        assert!(other.steps().submit(refused).is_err_and(|e| e.to_string().contains("release it first")));
        assert!(backend.read(&session.state("sum").expect("is there")).is_err());
        if let Some((ticket, wanted)) = before.take() {
            bucket.steps().wait(&ticket).expect("runs");
            gives(&mut bucket, &ticket, "masked", wanted);
        }
        let value = (step % 7) as f32;
        assert!(bucket.steps().release(&ticket, &[(mask + 100, &bytes(1.0, BYTES))]).is_err());
        assert!(bucket.steps().release(&ticket, &[(mask, &bytes(1.0, BYTES + 4))]).is_err());
        assert!(bucket.steps().release(&ticket, &[(index(&other, "x"), &[])]).is_err());
        assert!(bucket.steps().is_held(&ticket));
        if step % 5 == 4 {
            // Without a new mask, the one of the step before.
            bucket.steps().release(&ticket, &[]).expect("is queued");
            before = Some((ticket, ((step - 1) % 7) as f32 * sum));
        } else {
            bucket.steps().release(&ticket, &[(mask, &bytes(value, BYTES))]).expect("is queued");
            assert!(bucket.steps().release(&ticket, &[(mask, &bytes(value, BYTES))]).is_err(), "is released");
            before = Some((ticket, value * sum));
        }
        assert!(backend.read(&session.state("sum").expect("is there")).is_ok_and(|b| floats(&b)[0] == sum));
    }
    drop(before);
    // A held step whose ticket is dropped is released when its slot is needed.
    let slot = bucket.steps().stage().expect("is free");
    drop(bucket.steps().submit(slot).expect("is queued"));
    let slots: Vec<Slot> = (0..SLOTS).map(|_| bucket.steps().stage().expect("is free")).collect();
    assert!(other.submit().and_then(|()| other.wait()).is_ok());
    drop(slots);
    // Or with its bucket.
    let slot = bucket.steps().stage().expect("is free");
    let _ticket = bucket.steps().submit(slot).expect("is queued");
    drop(bucket);
    assert!(other.submit().and_then(|()| other.wait()).is_ok());
}

fn slots_are_counted(backend: &Arc<dyn Backend>) {
    let (_session, compiled) = compiled(backend, &graph(false));
    let mut bucket = bucket(&compiled);
    let slots: Vec<Slot> = (0..SLOTS).map(|_| bucket.steps().stage().expect("is free")).collect();
    let said = bucket.steps().stage().expect_err("there are no more").to_string();
    assert!(said.contains("all 2 slots"), "{said}");
    let tickets: Vec<Ticket> = slots.into_iter().map(|slot| bucket.steps().submit(slot).expect("is queued")).collect();
    assert!(bucket.steps().stage().is_err());
    drop(tickets);
    // The steps run on, whether or not somebody holds their tickets.
    let slot = bucket.steps().stage().expect("is free");
    stage(&mut bucket, &slot, "x", 4.0);
    let ticket = bucket.steps().submit(slot).expect("is queued");
    gives_after(&mut bucket, &ticket, 4.0);
}
