//! The text form of graphs.

use std::sync::Arc;

use ridge_graph::{Builder, DType, Dim, Graph, Group, GroupKind, Op, Result, Type};

/// Two calls of a layer that normalises, multiplies, counts its calls in a state and gives two values.
fn two_layers() -> Result<Graph> {
    let mut g = Builder::new();
    let ty = Type::tensor(DType::F32, [Dim::sym("tokens"), Dim::from(64)]);
    let layer = g.function("decoder_layer", |g| {
        let x = g.arg("x", ty.clone());
        let norm = g.weight("input_layernorm.weight", Type::tensor(DType::F32, [64]))?;
        let h = g.scoped("input_layernorm", |g| g.rms_norm(x, norm, 1e-5))?;
        let w = g.weight("proj.weight", Type::tensor(DType::F32, [64, 64]))?;
        let y = g.scoped("proj", |g| g.matmul(h, w, false, true, DType::F32))?;
        let calls = g.state("calls", Type::state(DType::I32, [1]))?;
        let now = g.state_read(calls)?;
        let next = g.add(now, now)?;
        g.state_write(calls, next)?;
        Ok(vec![g.add(x, y)?])
    })?;
    let mut x = g.step_input("hidden", ty)?;
    for i in 0..2 {
        x = g.scoped(&format!("layers.{i}"), |g| g.call(layer, &[x]))?[0];
    }
    let (values, indices) = g.sort(x, 1, true, 4)?;
    g.finish(vec![("values".into(), values), ("indices".into(), indices)])
}

#[test]
fn a_graph_of_two_functions_reads_as_one_line_a_node() {
    insta::assert_snapshot!(two_layers().unwrap().to_string(), @r"
    fn decoder_layer(
      x: f32[tokens, 64],
      weight input_layernorm.weight: f32[64],
      weight proj.weight: f32[64, 64],
      calls: state i32[1],
    ) {
      %2 = rms_norm(x, input_layernorm.weight) {eps: 1e-5} : f32[tokens, 64]  # input_layernorm
      %4 = matmul(%2, proj.weight) {trans_b} : f32[tokens, 64]  # proj
      %6 = state_read(calls) : i32[1]
      %7 = add(%6, %6) : i32[1]
      %8 = state_write(calls, %7) : state i32[1]
      %9 = add(x, %4) : f32[tokens, 64]
      -> 0: %9
      -> state calls: %8
    }

    fn main(
      input hidden: f32[tokens, 64],
      weight layers.0.input_layernorm.weight: f32[64],
      weight layers.0.proj.weight: f32[64, 64],
      layers.0.calls: state i32[1],
      weight layers.1.input_layernorm.weight: f32[64],
      weight layers.1.proj.weight: f32[64, 64],
      layers.1.calls: state i32[1],
    ) {
      %4, %4.1 = call decoder_layer(hidden, layers.0.input_layernorm.weight, layers.0.proj.weight, layers.0.calls) : f32[tokens, 64], state i32[1]  # layers.0
      %8, %8.1 = call decoder_layer(%4, layers.1.input_layernorm.weight, layers.1.proj.weight, layers.1.calls) : f32[tokens, 64], state i32[1]  # layers.1
      %9, %9.1 = sort(%8) {axis=1, descending, keep=4} : f32[tokens, 4], i32[tokens, 4]
      -> values: %9
      -> indices: %9.1
      -> state layers.0.calls: %4.1
      -> state layers.1.calls: %8.1
    }
    ");
}

/// `x + x`, squared, as one group, with arguments that go by numbers.
fn grouped() -> Result<Graph> {
    let ty = Type::tensor(DType::F32, [8]);
    let mut body = Builder::new();
    let a = body.arg("0", ty.clone());
    let b = body.arg("1", ty.clone());
    let sum = body.add(a, b)?;
    let square = body.mul(sum, sum)?;
    let body = body.finish(vec![("0".into(), square)])?.main().clone();
    let mut g = Builder::new();
    let x = g.arg("x", ty.clone());
    let y = g.step_input("0", ty)?;
    let negated = g.neg(y)?;
    let group = Group { kind: GroupKind::Kernel("add_square".into()), body };
    let z = g.scoped("mlp", |g| g.emit(Op::Group(Arc::new(group)), &[x, negated]))?[0];
    g.finish(vec![("z".into(), z)])
}

#[test]
fn a_group_shows_its_nodes_with_the_names_outside_it() {
    insta::assert_snapshot!(grouped().unwrap().to_string(), @r"
    fn main(
      x: f32[8],
      input 0 as %1: f32[8],
    ) {
      %2 = neg(%1) : f32[8]
      %3 = group add_square(x, %2) : f32[8]  # mlp
        $2 = add(x, %2) : f32[8]
        $3 = mul($2, $2) : f32[8]
        -> 0: $3
      -> z: %3
    }
    ");
}

#[test]
fn functions_of_one_name_are_told_apart_and_a_function_alone_calls_by_number() -> Result<()> {
    let ty = Type::tensor(DType::F32, [1]);
    let mut g = Builder::new();
    let first = g.function("f", |g| {
        let x = g.arg("x", ty.clone());
        Ok(vec![g.neg(x)?])
    })?;
    let second = g.function("f", |g| {
        let x = g.arg("x", ty.clone());
        g.call(first, &[x])
    })?;
    let x = g.arg("x", ty.clone());
    let y = g.call(second, &[x])?[0];
    let graph = g.finish(vec![("y".into(), y)])?;
    let text = graph.to_string();
    assert!(
        text.contains("fn f@0(") && text.contains("%1 = call f@0(x)") && text.contains("%1 = call f@1(x)"),
        "{text}"
    );
    assert!(graph.main().to_string().contains("%1 = call @1(x)"));
    Ok(())
}
