//! Gradients through functions, calls and states, and training steps made of them.

use crate::support::gradients::{Inputs, adamw_step, check, floats, run, total};
use ridge_graph::grad::{Differentiated, Recompute, float_weights, gradient, weights_as_states};
use ridge_graph::ops::AdamW;
use ridge_graph::sample::Rng;
use ridge_graph::{
    Bindings, Builder, DType, FormatRef, Function, Graph, Op, Prim, Result, Role, Tensor, Type, Value, format::Q8_0,
};

const HIDDEN: usize = 4;
const VOCAB: usize = 7;

/// Two layers of one function between an embedding and the same matrix as output weights. A layer keeps the mean of
/// its inputs as a state, which it writes, then reads.
fn tied(layers: usize) -> Result<Graph> {
    let mut g = Builder::new();
    let x_ty = Type::tensor(DType::F32, [3, HIDDEN]);
    let layer = g.function("layer", |g| {
        let x = g.arg("x", x_ty.clone());
        let mean = g.state("mean", Type::state(DType::F32, [1, HIDDEN]))?;
        let norm = g.weight("norm", Type::tensor(DType::F32, [HIDDEN]))?;
        let w = g.weight("w", Type::tensor(DType::F32, [HIDDEN, HIDDEN]))?;
        let old = g.state_read(mean)?;
        let h = g.rms_norm(x, norm, 1e-5)?;
        let sum = g.reduce_sum(h, 0)?;
        let next = g.add(sum, old)?;
        let mean = g.state_write(mean, next)?;
        let kept = g.state_read(mean)?;
        let product = g.matmul(h, w, false, true, DType::F32)?;
        let gate = g.sigmoid(product)?;
        let h = g.mul(gate, kept)?;
        Ok(vec![g.add(x, h)?])
    })?;
    let embedding = g.weight("embedding", Type::tensor(DType::F32, [VOCAB, HIDDEN]))?;
    let tokens = g.step_input("tokens", Type::tensor(DType::I32, [3]))?;
    let targets = g.step_input("targets", Type::tensor(DType::I32, [3]))?;
    let mut x = g.gather(embedding, tokens, 0)?;
    for i in 0..layers {
        x = g.scoped(&format!("layers.{i}"), |g| g.call(layer, &[x]))?[0];
    }
    let logits = g.matmul(x, embedding, false, true, DType::F32)?;
    let losses = g.cross_entropy(logits, targets)?;
    let loss = total(&mut g, losses)?;
    g.finish(vec![("loss".into(), loss), ("logits".into(), logits)])
}

fn inputs_for(graph: &Graph, rng: &mut Rng) -> Inputs {
    let value = |ty: &Type, rng: &mut Rng| -> Value {
        let shape = ty.shape.as_const().unwrap();
        if ty.dtype.is_float() { rng.normal(ty.dtype, &shape) } else { rng.integers(ty.dtype, &shape, 0, VOCAB as i64) }
            .into()
    };
    graph.main().args.iter().map(|a| (a.name.to_string(), value(&a.ty, rng))).collect()
}

fn function<'a>(graph: &'a Graph, name: &str) -> &'a Function {
    let found: Vec<&Function> = graph.functions.iter().filter(|f| &*f.name == name).collect();
    assert_eq!(found.len(), 1, "functions called {name}");
    found[0]
}

fn matmuls(function: &Function) -> usize {
    function.nodes.iter().filter(|n| matches!(n.op, Op::Prim(Prim::MatMul { .. }))).count()
}

fn calls(function: &Function) -> usize {
    function.nodes.iter().filter(|n| matches!(n.op, Op::Call(_))).count()
}

#[test]
fn a_tied_weight_states_and_two_calls_of_a_layer() {
    let graph = tied(2).unwrap();
    let mut rng = Rng::new(1);
    let inputs = inputs_for(&graph, &mut rng);
    let mut wrt = float_weights(&graph);
    assert_eq!(wrt.len(), 5);
    wrt.push("layers.0.mean".into());
    check("tied", &graph, &inputs, &wrt, &Bindings::new(), &mut rng);
}

#[test]
fn a_layer_called_often_is_differentiated_once() {
    let graph = tied(5).unwrap();
    let with_gradient = gradient(&graph, "loss", &float_weights(&graph)).unwrap();
    let names: Vec<&str> = with_gradient.functions.iter().map(|f| &*f.name).collect();
    assert_eq!(names, ["layer_bwd", "layer_fwd", "main"]);
    assert_eq!(calls(with_gradient.main()), 10);
    let outputs: Vec<&str> = with_gradient.main().outputs.iter().map(|o| &*o.name).collect();
    assert_eq!(outputs[..3], ["loss", "logits", "grad.embedding"]);
}

#[test]
fn frozen_weights_cost_nothing() {
    let graph = tied(2).unwrap();
    let backward = |wrt: &[&str]| matmuls(function(&gradient(&graph, "loss", wrt).unwrap(), "layer_bwd"));
    assert_eq!(backward(&["layers.0.norm", "layers.0.w", "layers.1.norm", "layers.1.w", "embedding"]), 2);
    assert_eq!(backward(&["embedding"]), 1, "only the gradient for the layer's input");

    let last = gradient(&graph, "loss", &["layers.1.w"]).unwrap();
    assert_eq!(matmuls(function(&last, "layer_bwd")), 1, "only the gradient for the layer's weight");
    assert_eq!(calls(last.main()), 3, "the first layer has no backward half");
    assert_eq!(function(&last, "layer"), &graph.functions[0], "and its forward is as it was");
}

#[test]
fn residuals_are_only_what_is_costly_to_have_again() {
    let mut g = Builder::new();
    let layer = g.function("mlp", |g| {
        let x = g.arg("x", Type::tensor(DType::BF16, [5, 8]));
        let up = g.weight("up", Type::tensor(DType::BF16, [16, 8]))?;
        let down = g.weight("down", Type::tensor(DType::BF16, [8, 16]))?;
        let mask = g.step_input("mask", Type::tensor(DType::I32, [5, 1]))?;
        let product = g.matmul(x, up, false, true, DType::BF16)?;
        let wide = g.cast(product, DType::F32)?;
        let gate = g.sigmoid(wide)?;
        let silu = g.mul(wide, gate)?;
        let zero = g.constant_like(mask, 0.0)?;
        let keep = g.gt(mask, zero)?;
        let zero = g.full_like(silu, 0.0)?;
        let silu = g.select(keep, silu, zero)?;
        let silu = g.cast(silu, DType::BF16)?;
        Ok(vec![g.matmul(silu, down, false, true, DType::BF16)?])
    });
    let layer = layer.unwrap();
    let x = g.step_input("x", Type::tensor(DType::BF16, [5, 8])).unwrap();
    let y = g.call(layer, &[x]).unwrap()[0];
    let y = g.cast(y, DType::F32).unwrap();
    let loss = total(&mut g, y).unwrap();
    let graph = g.finish(vec![("loss".into(), loss)]).unwrap();
    let with_gradient = gradient(&graph, "loss", &["up", "down"]).unwrap();
    let args: Vec<(&str, Role)> = function(&with_gradient, "mlp_bwd").args.iter().map(|a| (&*a.name, a.role)).collect();
    let saved = [
        ("x", Role::Data),
        ("down", Role::Weight),
        ("mask", Role::StepInput),
        ("saved.3", Role::Data),
        ("grad.0", Role::Data),
    ];
    assert_eq!(args, saved);
    let forward = function(&with_gradient, "mlp_fwd");
    let kept = forward.ty(forward.outputs[1].var);
    assert_eq!(*kept, Type::tensor(DType::BF16, [5, 16]), "the product, before it was widened");
    let mut rng = Rng::new(5);
    check("mlp", &graph, &inputs_for(&graph, &mut rng), &["up".into(), "down".into()], &Bindings::new(), &mut rng);
}

/// The graph with gradients for all float weights, whose backward halves recompute.
fn recomputing(graph: &Graph, recompute: Vec<Recompute>) -> Graph {
    let step = Differentiated::recomputing(graph, "loss", &float_weights(graph), recompute).unwrap();
    let outputs: Vec<_> = step.parameters.iter().map(|p| (format!("grad.{}", p.name), p.gradient)).collect();
    step.finish(outputs).unwrap()
}

fn arg_names(function: &Function) -> Vec<&str> {
    function.args.iter().map(|a| &*a.name).collect()
}

#[test]
fn what_is_recomputed_changes_residuals_and_no_gradient() {
    use Recompute::{All, Cheap, Passes};
    let graph = tied(3).unwrap();
    let inputs = inputs_for(&graph, &mut Rng::new(3));
    let plain = run(&gradient(&graph, "loss", &float_weights(&graph)).unwrap(), &inputs, &Bindings::new()).unwrap();
    for recompute in [vec![Passes; 3], vec![All; 3], vec![All, Cheap, Passes], vec![All]] {
        let outputs = run(&recomputing(&graph, recompute.clone()), &inputs, &Bindings::new()).unwrap();
        for (name, value) in &plain {
            assert_eq!(floats(&outputs, name), value.tensor().floats(), "{name}, {recompute:?}");
        }
    }

    let residuals = |recompute| {
        let graph = recomputing(&graph, vec![recompute; 3]);
        let backward = function(&graph, "layer_bwd");
        let saved = backward.args.iter().filter(|a| a.name.starts_with("saved."));
        (saved.map(|a| a.ty.to_string()).collect::<Vec<_>>(), matmuls(backward))
    };
    // The norm, what the state held, and the product.
    let (cheap, products) = residuals(Cheap);
    assert_eq!((cheap, products), (["f32[3, 4]", "f32[1, 4]", "f32[3, 4]"].map(str::to_owned).to_vec(), 2));
    let (passes, products) = residuals(Passes);
    assert_eq!((passes, products), (["f32[1, 4]", "f32[3, 4]"].map(str::to_owned).to_vec(), 2));
    // What a state held cannot be read again.
    let (all, products) = residuals(All);
    assert_eq!((all, products), (["f32[1, 4]"].map(str::to_owned).to_vec(), 3));

    let mixed = recomputing(&graph, vec![All, All, Cheap]);
    let names: Vec<&str> = mixed.functions.iter().map(|f| &*f.name).collect();
    assert_eq!(names, ["layer_bwd", "layer_fwd", "layer_bwd_2", "layer_fwd_2", "main"]);
    assert!(arg_names(function(&mixed, "layer_bwd")).len() < arg_names(function(&mixed, "layer_bwd_2")).len());
}

#[test]
fn functions_call_functions_and_pass_several_values() {
    let mut g = Builder::new();
    let ty = Type::tensor(DType::F32, [3]);
    let inner = g
        .function("inner", |g| {
            let (a, b) = (g.arg("a", ty.clone()), g.arg("b", ty.clone()));
            Ok(vec![g.mul(a, b)?, g.exp(b)?, a])
        })
        .unwrap();
    let outer = g
        .function("outer", |g| {
            let x = g.arg("x", ty.clone());
            let w = g.weight("w", ty.clone())?;
            let first = g.scoped("first", |g| g.call(inner, &[x, w]))?;
            let second = g.scoped("second", |g| g.call(inner, &[first[1], first[0]]))?;
            Ok(vec![second[0], first[2], second[1]])
        })
        .unwrap();
    let x = g.step_input("x", ty).unwrap();
    let once = g.scoped("a", |g| g.call(outer, &[x])).unwrap();
    let twice = g.scoped("b", |g| g.call(outer, &[once[0]])).unwrap();
    let sum = g.mul(twice[0], once[1]).unwrap();
    let loss = total(&mut g, sum).unwrap();
    let graph = g.finish(vec![("loss".into(), loss)]).unwrap();
    let mut rng = Rng::new(2);
    let small = |rng: &mut Rng| (0..3).map(|_| 0.3 * rng.gauss()).collect();
    let names = ["x", "a.w", "b.w"];
    let inputs: Inputs =
        names.iter().map(|n| ((*n).into(), Tensor::float(DType::F32, &[3], small(&mut rng)).into())).collect();
    let wrt: Vec<String> = names.iter().map(|n| (*n).into()).collect();
    check("nested", &graph, &inputs, &wrt, &Bindings::new(), &mut rng);
    check("nested, a weight", &graph, &inputs, &wrt[1..2], &Bindings::new(), &mut rng);
}

#[test]
fn a_weight_that_the_loss_ignores_has_a_gradient_of_zeros() {
    let mut g = Builder::new();
    let ty = Type::tensor(DType::BF16, [2]);
    let (used, unused) = (g.weight("used", ty.clone()).unwrap(), g.weight("unused", ty.clone()).unwrap());
    let wide = g.cast(used, DType::F32).unwrap();
    let loss = total(&mut g, wide).unwrap();
    let graph = g.finish(vec![("loss".into(), loss), ("other".into(), unused)]).unwrap();
    let with_gradient = gradient(&graph, "loss", &["used", "unused"]).unwrap();
    let outputs = run(&with_gradient, &inputs_for(&graph, &mut Rng::new(1)), &Bindings::new()).unwrap();
    assert_eq!((floats(&outputs, "grad.used"), floats(&outputs, "grad.unused")), (vec![1.0; 2], vec![0.0; 2]));
    assert!(outputs[2..].iter().all(|(_, value)| value.ty() == ty));
}

const ADAMW: AdamW = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };

#[test]
fn a_training_step_updates_weights_and_moments() {
    let forward = tied(2).unwrap();
    let step = adamw_step(&forward, ADAMW).unwrap();
    assert_eq!(step.args(Role::Weight).count(), 0, "every weight is a state now");
    let mut rng = Rng::new(4);
    let mut inputs = inputs_for(&step, &mut rng);
    let set = |inputs: &mut Inputs, name: &str, value: f64| {
        let found = inputs.iter_mut().find(|(n, _)| n == name).unwrap();
        found.1 = Tensor::float(DType::F32, &[], vec![value]).into();
    };
    set(&mut inputs, "lr", 0.01);
    for (name, value) in inputs.iter_mut().filter(|(n, _)| n.starts_with("adamw.")) {
        assert!(step.args(Role::State).any(|a| *a.name == **name));
        *value = Tensor::zeros(DType::F32, &value.tensor().shape).into();
    }
    let with_gradient = gradient(&forward, "loss", &["layers.1.w"]).unwrap();
    let slopes = floats(&run(&with_gradient, &inputs, &Bindings::new()).unwrap(), "grad.layers.1.w");
    let before = floats(&inputs, "layers.1.w");

    let mut losses = Vec::new();
    for count in 1..=20 {
        set(&mut inputs, "step", f64::from(count));
        let outputs = run(&step, &inputs, &Bindings::new()).unwrap();
        losses.push(floats(&outputs, "loss")[0]);
        if count == 1 {
            // With the moments corrected, the first step is the sign of the gradient, and decay.
            let after = floats(&outputs, "layers.1.w");
            for ((after, before), slope) in after.iter().zip(&before).zip(&slopes) {
                let expected = before * (1.0 - 0.01 * 0.1) - 0.01 * slope / (slope.abs() + 1e-8);
                assert!((after - expected).abs() < 1e-9, "{after} is not {expected}");
            }
        }
        for (name, value) in outputs {
            // The layers' own state stays as it was, so that the loss can be compared.
            if let Some(found) = inputs.iter_mut().find(|(n, _)| *n == name && !n.ends_with("mean")) {
                found.1 = value;
            }
        }
    }
    assert!(losses.windows(2).all(|w| w[1] < w[0]), "the loss falls: {losses:?}");
}

#[test]
fn weights_become_states_without_changing_a_result() {
    let graph = tied(2).unwrap();
    let as_states = weights_as_states(&graph, &["embedding"]).unwrap();
    assert!(as_states.args(Role::State).any(|a| &*a.name == "embedding"));
    let inputs = inputs_for(&graph, &mut Rng::new(9));
    let (before, after) =
        (run(&graph, &inputs, &Bindings::new()).unwrap(), run(&as_states, &inputs, &Bindings::new()).unwrap());
    assert_eq!(floats(&before, "logits"), floats(&after, "logits"));
}

#[test]
fn mistakes_are_named() {
    let graph = tied(1).unwrap();
    let fail = |loss: &str, wrt: &str| gradient(&graph, loss, &[wrt]).unwrap_err().to_string();
    assert_eq!(fail("logits", "embedding"), "logits: is f32[3, 7]; a loss must be f32[], a scalar: sum or average it");
    assert_eq!(fail("lass", "embedding"), "graph: no output `lass` to differentiate; the graph has `loss`, `logits`");
    assert_eq!(
        fail("loss", "layers.0.v"),
        "graph: no argument `layers.0.v` to differentiate for; weights and states are `embedding`, `layers.0.mean`, \
         `layers.0.norm`, `layers.0.w`",
    );
    assert_eq!(fail("loss", "tokens"), "tokens: is i32[3]; a gradient needs a float tensor in plain storage");

    let mut g = Builder::new();
    let stored = Type::tensor(DType::F32, [2, 32]).stored_as(FormatRef::new(Q8_0));
    let w = g.weight("w", stored).unwrap();
    let plain = g.decoded(w, DType::F32).unwrap();
    let loss = total(&mut g, plain).unwrap();
    let graph = g.finish(vec![("loss".into(), loss)]).unwrap();
    let error = gradient(&graph, "loss", &["w"]).unwrap_err().to_string();
    assert_eq!(error, "w: is q8_0<f32>[2, 32]; a gradient needs a float tensor in plain storage");
    let error = weights_as_states(&graph, &["w"]).unwrap_err().to_string();
    assert_eq!(error, "w: is q8_0<f32>[2, 32]; only a weight in plain storage can become a state");
}
