//! Parameters are read by one program and updated by another, in the same memory.

use crate::common::poisoned;
use ridge_graph::{Bindings, Builder, DType, Graph, Result, Tensor, Type};
use ridge_runtime::{Bucket, Recipe, Refresh, Session, WeightData};

const N: usize = 4;

fn ty(dtype: DType) -> Type {
    Type::tensor(dtype, [N])
}

/// `name' = name + x`.
fn adds(name: &str) -> Result<Graph> {
    let mut g = Builder::new();
    let x = g.step_input("x", ty(DType::F32))?;
    let state = g.state(name, ty(DType::F32))?;
    let old = g.state_read(state)?;
    let new = g.add(old, x)?;
    g.state_write(state, new)?;
    g.finish(Vec::new())
}

/// `y` is twice the weight `name`.
fn reads(name: &str, dtype: DType) -> Result<Graph> {
    let mut g = Builder::new();
    let w = g.weight(name, ty(dtype))?;
    let w = g.cast(w, DType::F32)?;
    let y = g.add(w, w)?;
    g.finish(vec![("y".into(), y)])
}

/// `copy` is `w`, rounded to bf16.
fn rounds() -> Result<Graph> {
    let mut g = Builder::new();
    let w = g.weight("w", ty(DType::F32))?;
    let rounded = g.cast(w, DType::BF16)?;
    let copy = g.state("copy", ty(DType::BF16))?;
    g.state_write(copy, rounded)?;
    g.finish(Vec::new())
}

fn bucket(session: &Session, graph: &Graph, outputs: &[&str]) -> Bucket {
    let compiled = session.compile(graph, outputs).unwrap_or_else(|e| panic!("{e}"));
    compiled.bucket(&Bindings::new()).unwrap_or_else(|e| panic!("{e}"))
}

fn value(x: f64) -> Tensor {
    Tensor::float(DType::F32, &[N], vec![x; N])
}

fn add(bucket: &mut Bucket, x: f64) {
    bucket.set("x", &value(x)).expect("fits");
    bucket.submit().unwrap_or_else(|e| panic!("{e}"));
    bucket.wait().expect("runs");
}

fn twice(bucket: &mut Bucket) -> f64 {
    bucket.submit().unwrap_or_else(|e| panic!("{e}"));
    bucket.wait().expect("runs");
    bucket.tensor("y").expect("asked for").floats()[0]
}

fn load(session: &mut Session, x: f64) {
    session.load("w", &ty(DType::F32), vec![WeightData::Owned(value(x).to_bytes())]).unwrap_or_else(|e| panic!("{e}"));
}

/// A session with `w = 1`, the programs that add to it and read it, and what was loaded made writable.
fn session(recipe: Option<(Refresh, bool)>) -> Session {
    let mut session = Session::new(poisoned(2));
    load(&mut session, 1.0);
    if let Some((refresh, evictable)) = recipe {
        session.derive(&Recipe { graph: rounds().expect("builds"), refresh, evictable }).expect("is new");
    }
    session.allocate_states(&adds("w").expect("builds"), &Bindings::new()).unwrap_or_else(|e| panic!("{e}"));
    session
}

#[test]
fn an_update_by_one_program_is_read_by_another_and_moves_the_version() {
    let mut session = session(None);
    let (adds, reads) = (adds("w").expect("builds"), reads("w", DType::F32).expect("builds"));
    let mut reading = bucket(&session, &reads, &["y"]);
    let mut adding = bucket(&session, &adds, &[]);
    let mut versions = session.versions(&reads);
    assert_eq!(twice(&mut reading), 2.0);
    assert!(!versions.changed());
    let before = session.version("w");
    add(&mut adding, 2.0);
    assert_eq!(twice(&mut reading), 6.0);
    assert!(versions.changed() && session.version("w") > before);
    assert!(versions.update() && !versions.update() && !versions.changed());
    // Loaded again, in the same memory.
    load(&mut session, 5.0);
    assert_eq!(twice(&mut reading), 10.0);
    assert!(versions.changed());
}

#[test]
fn a_weight_that_programs_read_in_place_is_not_updated() {
    let mut session = Session::new(poisoned(1));
    load(&mut session, 1.0);
    let reading = bucket(&session, &reads("w", DType::F32).expect("builds"), &["y"]);
    let updates = adds("w").expect("builds");
    let said = session.allocate_states(&updates, &Bindings::new()).expect_err("is read in place").to_string();
    assert!(said.contains("`w`") && said.contains("before compiling"), "{said}");
    assert!(session.compile(&updates, &[]).is_err());
    drop(reading);
    session.allocate_states(&updates, &Bindings::new()).unwrap_or_else(|e| panic!("{e}"));
    assert!(session.compile(&updates, &[]).is_ok());
}

#[test]
fn equal_names_of_two_models_are_two_parameters() {
    let mut policy = session(None);
    let mut other = policy.model("reward");
    other.load("w", &ty(DType::F32), vec![WeightData::Owned(value(7.0).to_bytes())]).expect("fits");
    let reads = reads("w", DType::F32).expect("builds");
    let (mut of_policy, mut of_other) = (bucket(&policy, &reads, &["y"]), bucket(&other, &reads, &["y"]));
    load(&mut policy, 3.0);
    assert_eq!((twice(&mut of_policy), twice(&mut of_other)), (6.0, 14.0));
    assert_eq!(twice(&mut bucket(&policy.share(), &reads, &["y"])), 6.0);
}

#[test]
fn a_lazy_copy_follows_its_source() {
    let session = session(Some((Refresh::Lazy, false)));
    let mut reading = bucket(&session, &reads("copy", DType::BF16).expect("builds"), &["y"]);
    let mut adding = bucket(&session, &adds("w").expect("builds"), &[]);
    assert_eq!(twice(&mut reading), 2.0, "made before its first use");
    add(&mut adding, 0.001);
    let before = session.version("copy");
    assert_eq!(twice(&mut reading), 2.0, "rounded");
    assert_eq!(session.version("copy"), before, "its version is that of its sources");
    add(&mut adding, 0.5);
    assert_eq!(twice(&mut reading), 3.0);
    assert!(session.version("copy") > before);
}

#[test]
fn a_stale_copy_that_is_refreshed_explicitly_is_an_error_that_names_it_and_its_source() {
    let session = session(Some((Refresh::Explicit, false)));
    let mut reading = bucket(&session, &reads("copy", DType::BF16).expect("builds"), &["y"]);
    let mut adding = bucket(&session, &adds("w").expect("builds"), &[]);
    session.refresh("copy").unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(twice(&mut reading), 2.0);
    add(&mut adding, 1.0);
    let said = reading.submit().expect_err("is stale").to_string();
    assert!(said.contains("`copy`") && said.contains(" w,"), "{said}");
    session.refresh("copy").unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(twice(&mut reading), 4.0);
}

#[test]
fn a_fused_copy_is_written_with_its_source_and_made_again_where_it_was_not() {
    let mut session = session(Some((Refresh::Fused, false)));
    let step = || -> Result<Graph> {
        let (mut g, _) = Builder::reopen(adds("w")?);
        let w = g.state("w", ty(DType::F32))?;
        let new = g.state_read(w)?;
        let rounded = g.cast(new, DType::BF16)?;
        let copy = g.state("copy", ty(DType::BF16))?;
        g.state_write(copy, rounded)?;
        g.finish(Vec::new())
    };
    let mut adding = bucket(&session, &step().expect("builds"), &[]);
    let mut reading = bucket(&session, &reads("copy", DType::BF16).expect("builds"), &["y"]);
    assert_eq!(twice(&mut reading), 2.0);
    add(&mut adding, 1.0);
    let bytes = session.backend().read(&session.state("copy").expect("exists")).expect("reads");
    assert_eq!(DType::BF16.decode(&bytes), [2.0; N], "without a reader");
    load(&mut session, 8.0);
    assert_eq!(twice(&mut reading), 16.0);
    // A program that updates the copy alone would leave it without a meaning.
    let alone = || -> Result<Graph> {
        let mut g = Builder::new();
        let x = g.step_input("x", ty(DType::BF16))?;
        let copy = g.state("copy", ty(DType::BF16))?;
        g.state_write(copy, x)?;
        g.finish(Vec::new())
    };
    let said = session.compile(&alone().expect("builds"), &[]).err().expect("is refused").to_string();
    assert!(said.contains("`copy`") && said.contains(" w,"), "{said}");
}

#[test]
fn an_evicted_copy_is_made_again() {
    let mut session = session(Some((Refresh::Lazy, true)));
    let graph = reads("copy", DType::BF16).expect("builds");
    let mut reading = bucket(&session, &graph, &["y"]);
    assert_eq!(twice(&mut reading), 2.0);
    assert!(session.evict("copy").expect_err("is used").to_string().contains("`copy`"));
    drop(reading);
    let before = session.weight_bytes();
    assert_eq!(session.evict("copy").expect("is not used"), 2 * N);
    assert_eq!(session.weight_bytes(), before - 2 * N);
    load(&mut session, 4.0);
    assert_eq!(twice(&mut bucket(&session, &graph, &["y"])), 8.0);
    assert!(session.evict("w").is_err(), "is no copy");
}

/// A stash of three slots of accumulators: one program adds to the slot that an input names, another reads one.
#[test]
fn a_slot_of_a_stash_that_one_program_writes_is_read_by_another() {
    let stash = Type::tensor(DType::F32, [3, N]);
    let at = |g: &mut Builder| g.step_input("slot", Type::tensor(DType::I32, [1]));
    let writes = || -> Result<Graph> {
        let mut g = Builder::new();
        let (x, slot) = (g.step_input("x", ty(DType::F32))?, at(&mut g)?);
        let row = g.reshape(x, ridge_graph::Shape::new([1, N]))?;
        let state = g.state("stash", stash.clone())?;
        let old = g.state_read(state)?;
        let new = g.scatter_add(old, slot, row, 0)?;
        g.state_write(state, new)?;
        g.finish(Vec::new())
    };
    let reads = || -> Result<Graph> {
        let mut g = Builder::new();
        let slot = at(&mut g)?;
        let all = g.weight("stash", stash.clone())?;
        let row = g.gather(all, slot, 0)?;
        g.finish(vec![("y".into(), row)])
    };
    let (writes, reads) = (writes().expect("builds"), reads().expect("builds"));
    let mut session = Session::new(poisoned(2));
    session.allocate_states(&writes, &Bindings::new()).expect("fits");
    let mut writing = bucket(&session, &writes, &[]);
    let mut reading = bucket(&session, &reads, &["y"]);
    let slot = |slot: i64| Tensor::int(DType::I32, &[1], vec![slot]);
    for (at, x) in [(2, 1.0), (0, 5.0), (2, 2.5)] {
        writing.set("slot", &slot(at)).expect("fits");
        add(&mut writing, x);
    }
    for (at, sum) in [(0, 5.0), (1, 0.0), (2, 3.5)] {
        reading.set("slot", &slot(at)).expect("fits");
        assert_eq!(twice(&mut reading), sum, "slot {at}");
    }
}

/// `change = new - old`, where `new` is read after the write: the old value takes a copy.
#[test]
fn a_value_that_outlives_its_update_is_copied_and_right() {
    let mut g = Builder::new();
    let state = g.state("w", ty(DType::F32)).expect("fresh");
    let x = g.step_input("x", ty(DType::F32)).expect("fresh");
    let old = g.state_read(state).expect("reads");
    let sum = g.mul(old, x).expect("f32");
    let state = g.state_write(state, sum).expect("writes");
    let new = g.state_read(state).expect("reads");
    let change = g.sub(new, old).expect("f32");
    let graph = g.finish(vec![("y".into(), change)]).expect("finishes");
    let mut session = session(None);
    load(&mut session, 3.0);
    let compiled = session.compile(&graph, &["y"]).unwrap_or_else(|e| panic!("{e}"));
    let copies = ridge_runtime::plan(compiled.graph(), &Bindings::new()).expect("plans").copies;
    assert_eq!(copies, [("w".to_owned(), 4 * N)]);
    let mut bucket = compiled.bucket(&Bindings::new()).expect("binds");
    for wanted in [12.0, 60.0] {
        bucket.set("x", &value(5.0)).expect("fits");
        assert_eq!(twice(&mut bucket), wanted);
    }
}
