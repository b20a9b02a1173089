//! Graphs for many inputs at once give, row by row, what graphs for one give: every op of the registry and every primitive.

use crate::support::gradients::{Inputs, floats, run, total};
use ridge_graph::conformance::all_samples;
use ridge_graph::grad::gradient;
use ridge_graph::passes::vmap;
use ridge_graph::sample::{Rng, Sample};
use ridge_graph::{Bindings, Builder, DType, Data, Graph, Tensor, Type, Value};

const ROWS: usize = 3;

/// The graph of a sample, its inputs being `input.<i>`, its outputs `output.<i>`.
fn graph_of(sample: &Sample) -> Graph {
    let mut g = Builder::new();
    let mut inputs = Vec::new();
    for (i, value) in sample.inputs.iter().enumerate() {
        let name = format!("input.{i}");
        let var = match value {
            Value::Plain(_) => g.step_input(&name, value.ty()),
            Value::Stored { .. } => g.weight(&name, value.ty()),
        };
        inputs.push(var.expect("is new"));
    }
    let outputs = g.emit(sample.op.clone(), &inputs).expect("fits");
    let plain = outputs.into_iter().filter(|var| g.ty(*var).expect("is its own").is_plain()).collect::<Vec<_>>();
    g.finish(plain.into_iter().enumerate().map(|(i, var)| (format!("output.{i}"), var)).collect()).expect("finishes")
}

/// Row `row` of an input: floats are other ones in each row, integers turned around, since others may mean nothing.
fn of_row(tensor: &Tensor, row: usize) -> Tensor {
    let mut tensor = tensor.clone();
    match &mut tensor.data {
        Data::Float(data) => {
            data.iter_mut().enumerate().for_each(|(i, x)| *x *= 1.0 + 0.1 * (row * (i % 3 + 1)) as f64);
        }
        Data::Int(data) => {
            if data.len() > 1 && row > 0 {
                data.reverse();
            }
        }
    }
    tensor
}

fn stacked(rows: &[Tensor]) -> Tensor {
    let mut all = rows[0].clone();
    all.shape.insert(0, rows.len());
    for row in &rows[1..] {
        match (&mut all.data, &row.data) {
            (Data::Float(all), Data::Float(row)) => all.extend(row),
            (Data::Int(all), Data::Int(row)) => all.extend(row),
            _ => unreachable!("rows are of one dtype"),
        }
    }
    all
}

fn elements(tensor: &Tensor) -> Vec<f64> {
    match &tensor.data {
        Data::Float(data) => data.clone(),
        Data::Int(data) => data.iter().map(|x| *x as f64).collect(),
    }
}

/// Compares both graphs with the inputs at `batched` batched; false if an op has no rule.
fn compare(what: &str, graph: &Graph, inputs: &Inputs, batched: &[String]) -> bool {
    let all = match vmap(graph, ROWS, batched) {
        Ok(all) => all,
        Err(error) if error.to_string().contains("has no rule for many inputs at once") => return false,
        Err(error) => panic!("{what}: {error}"),
    };
    let of = |row: Option<usize>| -> Inputs {
        let value = |(name, value): &(String, Value)| {
            let (Value::Plain(tensor), true) = (value, batched.contains(name)) else {
                return (name.clone(), value.clone());
            };
            let rows: Vec<Tensor> = (0..ROWS).map(|row| of_row(tensor, row)).collect();
            (name.clone(), row.map_or_else(|| stacked(&rows), |row| rows[row].clone()).into())
        };
        inputs.iter().map(value).collect()
    };
    let together = run(&all, &of(None), &Bindings::new()).unwrap_or_else(|e| panic!("{what}: {e}"));
    for row in 0..ROWS {
        let alone = run(graph, &of(Some(row)), &Bindings::new()).unwrap_or_else(|e| panic!("{what}: {e}"));
        for ((name, got), (_, wanted)) in together.iter().zip(&alone) {
            let (got, wanted) = (got.tensor(), wanted.tensor());
            assert_eq!(got.shape[1..], wanted.shape, "{what}: shape of {name}");
            let count = wanted.len();
            let got = &elements(got)[row * count..][..count];
            for (a, b) in got.iter().zip(&elements(wanted)) {
                let same = a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= 1e-9 * b.abs().max(1e-3);
                assert!(same, "{what}: row {row} of {name} is {a}, and alone {b}");
            }
        }
    }
    true
}

#[test]
fn rows_of_every_op_and_primitive_are_what_each_is_alone() {
    let (mut checked, mut without) = (0, std::collections::BTreeSet::new());
    let mut last = (String::new(), 0);
    for (name, sample) in all_samples(DType::F32, 5) {
        let of_name = if last.0 == *name { last.1 + 1 } else { 0 };
        last = (name.to_string(), of_name);
        let (states, stored) =
            (sample.types().iter().any(|ty| ty.state), sample.types().iter().any(|ty| ty.format.is_some()));
        if of_name >= 10 || states || stored && of_name > 2 {
            continue;
        }
        let graph = graph_of(&sample);
        let inputs: Inputs =
            sample.inputs.iter().enumerate().map(|(i, value)| (format!("input.{i}"), value.clone())).collect();
        let plain = |(_, value): &&(String, Value)| matches!(value, Value::Plain(_));
        let names: Vec<String> = inputs.iter().filter(plain).map(|(name, _)| name.clone()).collect();
        // All, each alone, and all but the first.
        let mut sets: Vec<Vec<String>> = names.iter().map(|name| vec![name.clone()]).collect();
        sets.push(names.clone());
        sets.push(names.iter().skip(1).cloned().collect());
        for set in sets {
            if compare(&format!("{name} sample {of_name}, {set:?} batched"), &graph, &inputs, &set) {
                checked += 1;
            } else {
                without.insert(name.to_string());
            }
        }
    }
    println!("{checked} comparisons; without a rule: {without:?}");
    let known = ["linear_recurrence", "assemble", "quantize", "fp8_linears_backward"];
    assert!(without.iter().all(|name| known.iter().any(|known| name.contains(known))), "{without:?}");
}

/// A function called twice, once for what is batched and once for what is not, in a gradient of each row.
#[test]
fn gradients_of_each_row_come_from_one_graph() {
    let row = || Type::tensor(DType::F32, [4]);
    let mut g = Builder::new();
    let layer = g.function("layer", |g| {
        let x = g.arg("x", row());
        let w = g.weight("w", Type::tensor(DType::F32, [4, 4]))?;
        let y = g.linear(x, w)?;
        Ok(vec![g.tanh(y)?])
    });
    let layer = layer.unwrap();
    let (x, shared) = (g.step_input("x", row()).unwrap(), g.step_input("shared", row()).unwrap());
    let y = g.scoped("0", |g| g.call(layer, &[x])).unwrap()[0];
    let z = g.scoped("1", |g| g.call(layer, &[shared])).unwrap()[0];
    let product = g.mul(y, z).unwrap();
    let loss = total(&mut g, product).unwrap();
    let graph = g.finish(vec![("loss".into(), loss)]).unwrap();
    let graph = gradient(&graph, "loss", &["0.w", "x"]).unwrap();
    let mut rng = Rng::new(5);
    let inputs: Inputs = [("x", vec![4]), ("shared", vec![4]), ("0.w", vec![4, 4]), ("1.w", vec![4, 4])]
        .map(|(name, shape)| (name.to_owned(), rng.normal(DType::F32, &shape).into()))
        .to_vec();
    assert!(compare("a gradient of each row", &graph, &inputs, &["x".to_owned()]));
    // What no batched input reaches is in every row.
    let all = vmap(&graph, ROWS, &["shared"]).unwrap();
    let shared = inputs.iter().map(|(name, value)| match (&**name, value) {
        ("shared", Value::Plain(tensor)) => (name.clone(), stacked(&vec![tensor.clone(); ROWS]).into()),
        _ => (name.clone(), value.clone()),
    });
    let losses = floats(&run(&all, &shared.collect(), &Bindings::new()).unwrap(), "loss");
    assert!(losses.len() == ROWS && losses.iter().all(|loss| *loss == losses[0]), "{losses:?}");
    let error = vmap(&graph, ROWS, &["0.w"]).expect_err("is a weight").to_string();
    assert!(error.contains("is no plain step input"), "{error}");
}
