//! Which kernels are chosen.

use std::sync::Arc;

use super::{Candidate, best, body, candidates, claim};
use crate::dim::{Bindings, Dim};
use crate::dtype::DType;
use crate::graph::{Builder, Function, Graph, Node, Op};
use crate::passes::{Extents, Kernel, Numerics, Offer, OfferRequest, Pattern, Target, group_linears};
use crate::poly::Poly;
use crate::types::Type;

/// Memory traffic that a match saves when every symbol is 64: what kernels were compared by before they made offers.
fn saved_bytes(function: &Function, candidate: &Candidate<'_>) -> i128 {
    let nominal = |poly: &Poly| {
        let bindings = poly.symbols().fold(Bindings::new(), |b, s| b.with(s.name(), 64));
        poly.eval(&bindings).expect("is bound")
    };
    let alone = |node: &usize| {
        let node = &function.nodes[*node];
        let types = function.types(&node.inputs);
        match &node.op {
            Op::Prim(op) => nominal(&op.cost(&types, &node.outputs).bytes()),
            Op::Composite(op) => nominal(&op.cost(&types, &node.outputs).bytes()),
            _ => 0,
        }
    };
    let together = body(function, &candidate.found).cost_together().bytes();
    candidate.found.nodes.iter().map(alone).sum::<i128>() - nominal(&together)
}

fn kernel(name: &str, pattern: &str) -> Kernel {
    Kernel::at_roofline(name, Pattern::parse(pattern), |_| true)
}

/// A layer of a decoder but for its attention, in one function.
fn layer(dtype: DType, width: usize) -> Graph {
    let mut g = Builder::new();
    let rows = Type::tensor(dtype, [Dim::sym("tokens"), width.into()]);
    let (mut x, r) = (g.arg("x", rows.clone()), g.arg("r", rows));
    let matrix = |out: usize, inner: usize| Type::tensor(dtype, [out, inner]);
    for nth in 0..2 {
        let weight = |g: &mut Builder, name: &str, ty: Type| g.weight(&format!("{name}{nth}"), ty).expect("is new");
        x = g.add(x, r).expect("adds");
        let norm = weight(&mut g, "norm", Type::tensor(dtype, [width]));
        let y = g.rms_norm(x, norm, 1e-5).expect("normalises");
        let (gate, up) =
            (weight(&mut g, "gate", matrix(3 * width, width)), weight(&mut g, "up", matrix(3 * width, width)));
        let (gate, up) = (g.linear(y, gate).expect("fits"), g.linear(y, up).expect("fits"));
        let y = g.swiglu(gate, up).expect("fits");
        let down = weight(&mut g, "down", matrix(width, 3 * width));
        let y = g.linear(y, down).expect("fits");
        x = g.add(x, y).expect("adds");
    }
    let mut graph = g.finish(vec![("x".into(), x)]).expect("finishes");
    group_linears(&mut graph);
    graph
}

fn layer_kernels() -> Vec<Kernel> {
    [
        ("linear", "linear(x, w)"),
        ("linear_add", "add(r, linear(x, w))"),
        ("linear_group", "linear_group(x, ...)"),
        ("norm_linear_group", "linear_group(rms_norm(x, w), ...)"),
        ("linear_swiglu", "swiglu(g@linear_group(x, ...).0, g.1)"),
        ("norm_linear_swiglu", "swiglu(g@linear_group(rms_norm(x, w), ...).0, g.1)"),
        ("rms_norm", "rms_norm(x, w)"),
        ("add_rms_norm", "rms_norm(*add(x, r), w)"),
        ("swiglu", "swiglu(gate, up)"),
    ]
    .map(|(name, pattern)| kernel(name, pattern))
    .into()
}

fn names(graph: &Graph) -> Vec<&str> {
    graph.main().nodes.iter().filter(|n| matches!(n.op, Op::Group(_))).map(Node::op_name).collect()
}

/// At every root of a layer, whichever kernels there are and in whichever order.
#[test]
fn offers_at_the_roofline_choose_what_saves_the_most_traffic() {
    let mut compared = 0;
    for (dtype, width) in [(DType::F32, 64), (DType::BF16, 4096), (DType::BF16, 16384)] {
        let graph = layer(dtype, width);
        for rotated in 0..layer_kernels().len() {
            for left_out in 0..4 {
                let mut kernels = layer_kernels();
                kernels.rotate_left(rotated);
                kernels.truncate(9 - left_out);
                for root in 0..graph.main().nodes.len() {
                    if !matches!(graph.main().nodes[root].op, Op::Prim(_) | Op::Composite(_)) {
                        continue;
                    }
                    let mut wanted: Option<(i128, Arc<str>)> = None;
                    for candidate in candidates(graph.main(), root, &kernels, Extents::Any, |_| true) {
                        let saved = saved_bytes(graph.main(), &candidate);
                        if wanted.as_ref().is_none_or(|(most, _)| saved > *most) {
                            wanted = Some((saved, Arc::clone(&candidate.kernel.name)));
                        }
                    }
                    let got = best(graph.main(), root, &kernels, Extents::Any).map(|(k, _)| Arc::clone(&k.name));
                    assert_eq!(got, wanted.map(|(_, name)| name), "root {root} of a layer of {dtype} and {width}");
                    compared += usize::from(got.is_some());
                }
            }
        }
    }
    assert!(compared > 500, "{compared} choices are too few to say anything");
}

/// `y = linear(x, w) + r`.
fn product() -> Graph {
    let mut g = Builder::new();
    let rows = Type::tensor(DType::F32, [Dim::sym("tokens"), 64.into()]);
    let (x, r) = (g.arg("x", rows.clone()), g.arg("r", rows));
    let w = g.weight("w", Type::tensor(DType::F32, [64, 64])).expect("is new");
    let y = g.linear(x, w).expect("fits");
    let y = g.add(r, y).expect("adds");
    g.finish(vec![("y".into(), y)]).expect("finishes")
}

/// Reaches `efficiency` of the roofline, in `class` or in none.
fn at(name: &str, pattern: &str, efficiency: f64, class: Option<&'static str>) -> Kernel {
    Kernel::new(name, Pattern::parse(pattern), move |request: &OfferRequest<'_>| {
        let numerics = class.map_or(Numerics::ByExtents, |class| Numerics::Class(class.into()));
        Some(request.at_efficiency(efficiency, efficiency, numerics))
    })
}

fn chosen(kernels: &[Kernel], extents: Extents) -> Vec<String> {
    let mut graph = product();
    claim(&mut graph, kernels, extents);
    names(&graph).into_iter().map(str::to_owned).collect()
}

#[test]
fn cheapest_set_of_kernels_is_chosen() {
    let apart = at("linear", "linear(x, w)", 1.0, Some("a"));
    let fused = |efficiency| at("linear_add", "add(r, linear(x, w))", efficiency, Some("a"));
    let sum = at("sum", "add(a, b)", 1.0, Some("a"));
    assert_eq!(chosen(&[apart.clone(), sum.clone(), fused(1.0)], Extents::Any), ["linear_add"]);
    assert_eq!(chosen(&[apart.clone(), sum, fused(0.2)], Extents::Any), ["linear", "sum"]);
    // Where nobody offers to add alone, the fused kernel is the only one that matches at the sum.
    assert_eq!(chosen(&[apart, fused(0.2)], Extents::Any), ["linear_add"]);
}

#[test]
fn faster_offer_wins_and_of_equal_ones_the_first() {
    let offers = |a, b| {
        let kernels = [at("a", "linear(x, w)", a, Some("a")), at("b", "linear(x, w)", b, Some("b"))];
        chosen(&kernels, Extents::Any)
    };
    assert_eq!(offers(0.5, 0.9), ["b"]);
    assert_eq!(offers(0.9, 0.5), ["a"]);
    assert_eq!(offers(0.7, 0.7), ["a"]);
}

#[test]
fn offers_depend_on_extents() {
    let few = Kernel::new("few", Pattern::parse("linear(x, w)"), |request| {
        (request.extents.rows().1 <= 16).then(|| request.at_efficiency(1.0, 1.0, Numerics::Class("few".into())))
    });
    let kernels = [few, at("many", "linear(x, w)", 0.5, Some("many"))];
    assert_eq!(chosen(&kernels, Extents::Decode), ["few"]);
    for extents in [Extents::Any, Extents::Small, Extents::Prompt] {
        assert_eq!(chosen(&kernels, extents), ["many"], "{extents:?}");
    }
    // A deterministic target takes the class that serves any extents.
    let target = Arc::new(Target { deterministic: true, ..Target::default() });
    let kernels = kernels.map(|kernel| kernel.on(&target));
    for extents in Extents::ALL {
        assert_eq!(chosen(&kernels, extents), ["many"], "{extents:?}");
    }
}

#[test]
fn deterministic_target_refuses_sums_that_depend_on_extents() {
    let varies = at("varies", "linear(x, w)", 1.0, None);
    let fixed = at("fixed", "linear(x, w)", 0.5, Some("fixed"));
    let target = Arc::new(Target { deterministic: true, ..Target::default() });
    assert_eq!(chosen(&[varies.clone(), fixed.clone()], Extents::Any), ["varies"]);
    assert_eq!(chosen(&[varies.clone().on(&target), fixed.on(&target)], Extents::Any), ["fixed"]);
    assert!(chosen(&[varies.on(&target)], Extents::Any).is_empty());
}

#[test]
fn offers_without_room_or_a_time_are_dropped() {
    let offering = |seconds, workspace_bytes| {
        let numerics = Numerics::ByExtents;
        let offer = Offer { seconds, workspace_bytes, numerics, layouts: Vec::new(), accepts: Vec::new() };
        let target = Arc::new(Target { workspace_bytes: 1000, ..Target::default() });
        let kernel = Kernel::new("linear", Pattern::parse("linear(x, w)"), move |_| Some(offer.clone()));
        chosen(&[kernel.on(&target)], Extents::Any)
    };
    assert_eq!(offering(1.0, 1000), ["linear"]);
    assert!(offering(1.0, 1001).is_empty());
    assert!(offering(f64::NAN, 0).is_empty());
}

/// Two linears of `x`, of which the second is reshaped and negated; with `read`, its product is an output too.
fn two_products(read: bool) -> Graph {
    let mut g = Builder::new();
    let rows = Type::tensor(DType::F32, [Dim::sym("tokens"), 8.into()]);
    let x = g.arg("x", rows);
    let w = ["a", "b"].map(|name| g.weight(name, Type::tensor(DType::F32, [6, 8])).expect("is new"));
    let both = g.linear_group(x, &w, &[]).expect("fits");
    let y = g.reshape(both[1], [Dim::sym("tokens"), 2.into(), 3.into()]).expect("fits");
    let y = g.neg(y).expect("negates");
    let mut outputs = vec![("a".to_owned(), both[0]), ("y".to_owned(), y)];
    outputs.extend(read.then(|| ("b".to_owned(), both[1])));
    g.finish(outputs).expect("finishes")
}

#[test]
fn only_what_nobody_else_reads_stays_within_a_group() {
    let kernels = [kernel("both", "neg(reshape(g@linear_group(x, ...).1)), g.0")];
    let mut graph = two_products(false);
    claim(&mut graph, &kernels, Extents::Any);
    assert_eq!(names(&graph), ["both"]);
    let group = graph.main().nodes.iter().find(|n| matches!(n.op, Op::Group(_))).expect("is claimed");
    let shapes: Vec<String> = group.outputs.iter().map(ToString::to_string).collect();
    assert_eq!(shapes, ["f32[tokens, 2, 3]", "f32[tokens, 6]"]);
    let mut graph = two_products(true);
    claim(&mut graph, &kernels, Extents::Any);
    assert!(names(&graph).is_empty());
}

#[test]
fn views_between_the_ops_of_a_group_save_nothing() {
    let graph = two_products(false);
    let pattern = Pattern::parse("neg(reshape(g@linear_group(x, ...).1)), g.0");
    let found = (0..graph.main().nodes.len()).find_map(|root| pattern.find(graph.main(), root).next());
    let bytes = body(graph.main(), &found.expect("matches")).cost_together().bytes();
    // x, two weights, the first product and what is negated.
    let written = 4 * (8 * 10 + 2 * 6 * 8 + 6 * 10 + 6 * 10);
    assert_eq!(bytes.eval(&Bindings::new().with("tokens", 10)).expect("is bound"), written);
}

#[test]
fn same_graph_and_kernels_give_the_same_text() {
    let text = || {
        let mut graph = layer(DType::BF16, 64);
        claim(&mut graph, &layer_kernels(), Extents::Any);
        graph.to_string()
    };
    assert_eq!(text(), text());
}
