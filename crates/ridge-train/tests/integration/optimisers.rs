//! Twenty steps of each optimiser on the CPU beside torch or reference code (`fixtures/optimisers.py`).

use std::path::Path;

use ridge_graph::ops::{Adafactor, AdamW, AdamW8, Lion, Muon, Sgd};
use ridge_graph::{Bindings, Builder, DType, Shape, Tensor, Type};
use ridge_runtime::{Session, WeightData};
use ridge_train::UpdateOp;
use safetensors::SafeTensors;

use crate::common::cpu;

const STEPS: usize = 20;

fn file() -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/optimisers.safetensors");
    std::fs::read(path).expect("is committed")
}

fn bytes_of<'a>(file: &SafeTensors<'a>, name: &str) -> &'a [u8] {
    file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")).data()
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f64> {
    DType::F32.decode(bytes_of(file, name))
}

fn doubles(file: &SafeTensors<'_>, name: &str) -> Vec<f64> {
    bytes_of(file, name).as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect()
}

/// The parameter after 20 steps of `op`.
fn trained(op: &UpdateOp, start: &[f64], gradients: &[f64], shape: &[usize]) -> Vec<f64> {
    let shape = Shape::new(shape.iter().copied());
    let ty = Type::tensor(DType::F32, shape.clone());
    let states = op.states("w", &shape);
    let mut g = Builder::new();
    let scalar = || Type::tensor(DType::F32, Shape::default());
    let build = |g: &mut Builder| {
        let (lr, step) = (g.step_input("lr", scalar())?, g.step_input("step", scalar())?);
        let grad = g.step_input("grad", ty.clone())?;
        let all: Vec<(&str, &Type)> =
            std::iter::once(("w", &ty)).chain(states.iter().map(|s| (&*s.name, &s.ty))).collect();
        let mut read = Vec::new();
        for (name, ty) in &all {
            let state = g.state(name, (*ty).clone())?;
            read.push(g.state_read(state)?);
        }
        let next = op.apply(g, [read[0], grad], &read[1..], lr, step)?;
        for ((name, ty), value) in all.iter().zip(next) {
            let state = g.state(name, (*ty).clone())?;
            g.state_write(state, value)?;
        }
        Ok::<_, ridge_graph::GraphError>(())
    };
    build(&mut g).expect("builds");
    let graph = g.finish(Vec::new()).expect("builds");
    let mut session = Session::new(cpu(1));
    session.load("w", &ty, vec![WeightData::Owned(DType::F32.encode(start.iter().copied()))]).expect("fits");
    for state in &states {
        let bytes = state.ty.bytes().as_const().expect("constant") as usize;
        session.load(&state.name, &state.ty, vec![WeightData::Owned(vec![state.fill; bytes])]).expect("fits");
    }
    session.allocate_states(&graph, &Bindings::new()).expect("fits");
    let mut bucket =
        session.compile(&graph, &[]).and_then(|c| c.bucket(&Bindings::new())).unwrap_or_else(|e| panic!("{e}"));
    let extents = shape.as_const().expect("constant");
    for (step, gradient) in gradients.chunks(start.len()).enumerate() {
        bucket.set("lr", &Tensor::float(DType::F32, &[], vec![1e-2])).expect("is one");
        bucket.set("step", &Tensor::float(DType::F32, &[], vec![(step + 1) as f64])).ok();
        bucket.set("grad", &Tensor::float(DType::F32, &extents, gradient.to_vec())).expect("is one");
        bucket.submit().expect("runs");
        bucket.wait().expect("completes");
    }
    let bytes = session.backend().read(&session.state("w").expect("is there")).expect("reads");
    DType::F32.decode(&bytes)
}

#[test]
fn twenty_steps_end_where_those_of_the_reference_do() {
    let bytes = file();
    let file = SafeTensors::deserialize(&bytes).expect("is one");
    let adamw = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let cases: [(&str, UpdateOp, &[&str]); 6] = [
        ("adamw", UpdateOp::AdamW(adamw), &["matrix", "vector"]),
        ("sgd", UpdateOp::Sgd(Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.1 }), &["matrix", "vector"]),
        ("adafactor", UpdateOp::Adafactor(Adafactor { weight_decay: 0.1, ..Adafactor::USUAL }), &["matrix", "vector"]),
        ("lion", UpdateOp::Lion(Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.1 }), &["matrix", "vector"]),
        ("muon", UpdateOp::Muon(Muon { momentum: 0.95, nesterov: true, weight_decay: 0.1 }), &["matrix"]),
        ("adamw8", UpdateOp::AdamW8(AdamW8 { adamw }), &["block"]),
    ];
    for (name, op, parameters) in cases {
        for parameter in parameters {
            let start = floats(&file, parameter);
            let gradients = floats(&file, &format!("{parameter}.gradients"));
            assert_eq!(gradients.len(), STEPS * start.len());
            let shape = file.tensor(parameter).expect("is there").shape().to_vec();
            let wanted = doubles(&file, &format!("{name}.{parameter}"));
            let got = trained(&op, &start, &gradients, &shape);
            let norm = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt();
            let off = norm(&got, &wanted) / norm(&start, &wanted);
            println!("{name}, {parameter}: {off:.1e} of the way off");
            // Roundings to f32 of 20 steps that each go a hundredth of a parameter's size.
            assert!(off < 3e-5, "{name}, {parameter}: {off:e} of the way off");
        }
    }
}
