//! Mistakes that the builder refuses, each named with its place.

use ridge_graph::{Builder, DType, Type};

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
