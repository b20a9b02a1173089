//! Weights in another storage.

use crate::support::decoder::{arguments, decoder};
use crate::support::sharding::{assert_close, assert_same_at, tp};
use ridge_graph::passes::retype;
use ridge_graph::shard::{Placement, shard};
use ridge_graph::{Bindings, DType, Dim, FormatRef, Graph, Precision, Role, Type, Value, evaluate};

fn q8() -> FormatRef {
    FormatRef::from_name("q8_0").expect("known")
}

/// Only the last linear has rows of whole blocks of 32.
fn is_quantised(name: &str) -> bool {
    name.ends_with("down_proj.weight")
}

fn quantised(name: &str, ty: &Type) -> Option<Type> {
    is_quantised(name).then(|| ty.clone().stored_as(q8()))
}

fn bound() -> Bindings {
    Bindings::new().with("tokens", 5)
}

fn run(graph: &Graph, args: &[(String, Value)]) -> Vec<(String, Value)> {
    let find = |name: &str| args.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
    evaluate(graph, &|arg| find(&arg.name), &bound(), Precision::Exact).expect("evaluates")
}

fn stored(args: &[(String, Value)]) -> Vec<(String, Value)> {
    let store = |(name, v): &(String, Value)| {
        let value = if is_quantised(name) { Value::stored(v.tensor(), &q8()) } else { v.clone() };
        (name.clone(), value)
    };
    args.iter().map(store).collect()
}

/// What a stored weight decodes to, by the linear that does nothing else.
fn decoded(value: &Value) -> Value {
    let Value::Stored { .. } = value else { return value.clone() };
    let mut g = ridge_graph::Builder::new();
    let w = g.weight("w", value.ty()).expect("fresh");
    let w = g.decoded(w, DType::F32).expect("decodes");
    let graph = g.finish(vec![("w".into(), w)]).expect("finishes");
    let none = Bindings::new();
    evaluate(&graph, &|_| Some(value.clone()), &none, Precision::Exact).expect("evaluates")[0].1.clone()
}

#[test]
fn a_quantised_weight_computes_as_its_decoded_values_do() {
    let graph = decoder(2, &Dim::sym("tokens"));
    let smaller = retype(&graph, &quantised).expect("retypes");
    let args = stored(&arguments(&graph, 5, &bound()));
    let plain: Vec<(String, Value)> = args.iter().map(|(n, v)| (n.clone(), decoded(v))).collect();
    for ((name, got), (_, want)) in run(&smaller, &args).iter().zip(&run(&graph, &plain)) {
        assert_close(name, got.tensor(), want.tensor());
    }
}

#[test]
fn an_elementwise_primitive_computes_in_the_dtype_that_it_was_written_for() {
    let mut g = ridge_graph::Builder::new();
    let build = |g: &mut ridge_graph::Builder| {
        let w = g.weight("w", Type::tensor(DType::F32, [6]))?;
        let x = g.step_input("x", Type::tensor(DType::F32, [2, 3]))?;
        // The cast is none, since `w` has that dtype.
        let w = g.cast(w, DType::F32)?;
        let w = g.reshape(w, ridge_graph::Shape::new([2, 3]))?;
        let (product, power) = (g.mul(x, w)?, g.exp(w)?);
        Ok::<_, ridge_graph::GraphError>(vec![("product".into(), product), ("power".into(), power)])
    };
    let outputs = build(&mut g).expect("builds");
    let graph = g.finish(outputs).expect("finishes");
    let half = retype(&graph, &|_, ty| (ty.dtype == DType::F32).then(|| Type { dtype: DType::BF16, ..ty.clone() }));
    let half = half.expect("retypes");
    let main = half.main();
    assert_eq!(half.args(Role::Weight).next().expect("is there").ty.dtype, DType::BF16);
    assert!(main.outputs.iter().all(|output| main.ty(output.var).dtype == DType::F32));
    let rng = &mut ridge_graph::sample::Rng::new(1);
    let args: Vec<(String, Value)> =
        vec![("w".into(), rng.normal(DType::BF16, &[6]).into()), ("x".into(), rng.normal(DType::F32, &[2, 3]).into())];
    let wide: Vec<(String, Value)> = args
        .iter()
        .map(|(name, v)| {
            let tensor = v.tensor();
            let wide = ridge_graph::Tensor::float(DType::F32, &tensor.shape, tensor.floats().to_vec());
            (name.clone(), wide.into())
        })
        .collect();
    for ((name, got), (_, want)) in run(&half, &args).iter().zip(&run(&graph, &wide)) {
        assert_eq!(got.tensor().floats(), want.tensor().floats(), "{name}");
    }
}

#[test]
fn types_change_where_asked_and_names_roles_and_scopes_nowhere() {
    let graph = decoder(2, &Dim::sym("tokens"));
    let smaller = retype(&graph, &quantised).expect("retypes");
    assert_eq!(smaller.functions.len(), 2, "one layer function for both calls");
    for (new, old) in smaller.functions.iter().zip(&graph.functions) {
        assert_eq!(new.name, old.name);
        for (new, old) in new.args.iter().zip(&old.args) {
            assert_eq!((&new.name, new.role), (&old.name, old.role));
            let wanted = if is_quantised(&old.name) { old.ty.clone().stored_as(q8()) } else { old.ty.clone() };
            assert_eq!(new.ty, wanted, "{}", old.name);
        }
        let scopes = |f: &ridge_graph::Function| -> Vec<_> {
            f.nodes.iter().filter(|n| n.op_name() != "arg").map(|n| (n.op_name().to_owned(), n.scope.clone())).collect()
        };
        assert_eq!(scopes(new), scopes(old));
    }
    let text: Vec<String> = smaller.args(Role::Weight).map(|a| format!("{}: {}", a.name, a.ty)).collect();
    assert!(text.contains(&"layers.1.mlp.down_proj.weight: q8_0<f32>[16, 64]".into()), "{text:?}");
}

#[test]
fn layers_stored_differently_are_different_functions() {
    let graph = decoder(2, &Dim::sym("tokens"));
    let mixed = retype(&graph, &|name, ty| {
        let narrow = name.starts_with("layers.0") && ty.shape.rank() == 2;
        narrow.then(|| Type { dtype: DType::BF16, ..ty.clone() })
    })
    .expect("retypes");
    let names: Vec<&str> = mixed.functions.iter().map(|f| &*f.name).collect();
    assert_eq!(names, ["decoder_layer", "decoder_layer.2", "main"]);
}

#[test]
fn a_quantised_model_shards_by_whole_blocks() {
    let graph = retype(&decoder(2, &Dim::sym("tokens")), &quantised).expect("retypes");
    let place = |arg: &ridge_graph::Arg| match () {
        () if arg.name.ends_with("down_proj.weight") => Placement::shard(1),
        () if arg.name.ends_with("up_proj.weight") || arg.name.ends_with("gate_proj.weight") => Placement::shard(0),
        () => Placement::Replicate,
    };
    let args = stored(&arguments(&decoder(2, &Dim::sym("tokens")), 5, &bound()));
    let sharded = shard(&graph, &tp(), &place, &|_| false).expect("shards");
    assert_same_at("quantised", &graph, &sharded, &tp(), &args, &bound());
}

#[test]
fn what_cannot_be_stored_so_is_named() {
    let graph = decoder(2, &Dim::sym("tokens"));
    let all = |_: &str, ty: &Type| (ty.shape.rank() == 2).then(|| ty.clone().stored_as(q8()));
    let error = retype(&graph, &all).expect_err("rows of 16").to_string();
    assert!(error.contains("weight `layers.0.self_attn.q_proj.weight`") && error.contains("blocks of 32"), "{error}");

    let norms = |name: &str, ty: &Type| {
        (name == "layers.1.input_layernorm.weight").then(|| Type { dtype: DType::F16, ..ty.clone() })
    };
    assert!(retype(&graph, &norms).is_ok(), "a norm takes any float dtype");
    let other = |_: &str, ty: &Type| Some(ty.with_shape([1usize]));
    assert!(retype(&graph, &other).expect_err("shapes").to_string().contains("shapes must be equal"));

    let mut g = ridge_graph::Builder::new();
    let w = g.weight("w", Type::tensor(DType::F32, [4usize, 32])).expect("fresh");
    let y = g.exp(w).expect("builds");
    let graph = g.finish(vec![("y".into(), y)]).expect("finishes");
    // A primitive is given what the weight stands for.
    let decoded = retype(&graph, &|_, ty| Some(ty.clone().stored_as(q8()))).expect("is decoded");
    let exp = decoded.main().nodes.last().expect("a node");
    assert_eq!(exp.outputs, [Type::tensor(DType::F32, [4usize, 32])]);

    let mut g = ridge_graph::Builder::new();
    let w = g.weight("w", Type::tensor(DType::F32, [4usize, 32])).expect("fresh");
    let y = g.softmax(w).expect("builds");
    let graph = g.finish(vec![("y".into(), y)]).expect("finishes");
    let error = retype(&graph, &|_, ty| Some(ty.clone().stored_as(q8()))).expect_err("softmax").to_string();
    assert!(error.contains("weight `w` stored as q8_0<f32>[4, 32]") && error.contains("softmax"), "{error}");
}
