//! Mistakes that the builder refuses, each named with its place.

use ridge_graph::{Arg, Bindings, Builder, DType, Precision, Tensor, Type, Value, evaluate};

fn state() -> Type {
    Type::state(DType::F32, [4usize])
}

#[test]
fn a_replaced_version_of_a_state_cannot_be_used() {
    let mut g = Builder::new();
    let old = g.state("s", state()).unwrap();
    let value = g.step_input("x", Type::tensor(DType::F32, [4usize])).unwrap();
    g.state_write(old, value).unwrap();
    let said = g.scoped("layer", |g| g.state_read(old)).unwrap_err().to_string();
    assert!(said.starts_with("layer: state_read") && said.contains("use the latest"), "{said}");
}

#[test]
fn a_weight_asked_for_twice_is_one_value_and_of_one_type() {
    let mut g = Builder::new();
    let ask = |g: &mut Builder, n: usize| g.scoped("mlp", |g| g.weight("w", Type::tensor(DType::F32, [n])));
    let first = ask(&mut g, 4).unwrap();
    assert_eq!(ask(&mut g, 4).unwrap(), first);
    let said = ask(&mut g, 5).unwrap_err().to_string();
    assert!(said.starts_with("mlp.w") && said.contains("f32[5]") && said.contains("f32[4]"), "{said}");
}

#[test]
fn a_value_of_another_function_is_refused() {
    let mut g = Builder::new();
    let outer = g.step_input("x", Type::tensor(DType::F32, [4usize])).unwrap();
    let said = g.function("f", |g| Ok(vec![g.neg(outer)?])).unwrap_err().to_string();
    assert!(said.contains("another function"), "{said}");
}

#[test]
fn a_late_input_is_one_wherever_it_is_asked_for() {
    let ty = || Type::tensor(DType::F32, [3]);
    let mut g = Builder::new();
    let masked = g
        .function("masked", |g| {
            let x = g.arg("x", ty());
            let mask = g.late_input("mask", ty())?;
            Ok(vec![g.add(x, mask)?])
        })
        .unwrap();
    let x = g.step_input("x", ty()).unwrap();
    let y = g.call(masked, &[x]).unwrap()[0];
    assert!(g.late_input("mask", ty()).is_ok());
    let said = g.step_input("mask", ty()).unwrap_err().to_string();
    assert!(said.contains("mask") && said.contains("a late step input elsewhere"), "{said}");
    let said = g.late_input("x", ty()).unwrap_err().to_string();
    assert!(said.contains("not late elsewhere"), "{said}");
    let graph = g.finish(vec![("y".into(), y)]).unwrap();
    let late: Vec<_> = graph.main().args.iter().map(|arg| (&*arg.name, arg.late)).collect();
    assert_eq!(late, [("x", false), ("mask", true)]);
    assert!(
        graph.to_string().contains("  late input mask: f32[3],") && graph.to_string().contains("  input x: f32[3],")
    );
}

#[test]
fn calls_that_give_one_name_share_a_weight_and_continue_a_state() {
    let mut g = Builder::new();
    let adds = g
        .function("adds", |g| {
            let (w, s) = (g.weight("w", Type::tensor(DType::F32, [4]))?, g.state("s", state())?);
            let own = g.weight("own", Type::tensor(DType::F32, [4]))?;
            let before = g.state_read(s)?;
            let sum = g.add(before, w)?;
            let sum = g.add(sum, own)?;
            g.state_write(s, sum)?;
            Ok(vec![sum])
        })
        .unwrap();
    let mut last = None;
    for layer in 0..2 {
        let shared = |name: &str| if name == "own" { format!("layers.{layer}.own") } else { format!("block.{name}") };
        last = Some(g.scoped("elsewhere", |g| g.call_named(adds, &[], shared)).unwrap()[0]);
    }
    let graph = g.finish(vec![("y".into(), last.unwrap())]).unwrap();
    let args: Vec<&str> = graph.main().args.iter().map(|arg| &*arg.name).collect();
    assert_eq!(args, ["block.w", "block.s", "layers.0.own", "layers.1.own"]);
    let value = |arg: &Arg| {
        let each = match &*arg.name {
            "block.w" => 1.0,
            "block.s" => 10.0,
            "layers.0.own" => 100.0,
            _ => 1000.0,
        };
        Some(Value::from(Tensor::float(DType::F32, &[4], vec![each; 4])))
    };
    let outputs = evaluate(&graph, &value, &Bindings::new(), Precision::Exact).unwrap();
    // 10 + 1 + 100, and of that 1 + 1000 more.
    assert!(outputs.iter().all(|(_, value)| value.tensor().floats() == [1112.0; 4]), "{outputs:?}");
}
