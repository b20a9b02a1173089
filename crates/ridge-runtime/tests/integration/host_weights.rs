//! Weights in memory of the host: which they are, in which order, and when a plan copies them.

use std::collections::BTreeSet;

use ridge_graph::format::{self, Iq4Nl, Iq4Xs, Q2K, Q3K, Q8_0};
use ridge_graph::passes::{HostTraffic, fetch_weights, host_traffic, host_weights, retype};
use ridge_graph::{Arg, Bindings, FormatRef, Op, Precision, Prim, Role, Type, Value, evaluate};
use ridge_runtime::{Region, component_offsets, lower, plan};

use crate::mixture::{EXPERT_BYTES, EXPERTS, LAYERS, TOP_K, WIDTH, fetching, inputs, mixture, weight};

#[test]
fn weights_leave_the_device_by_the_share_that_a_token_reads() {
    let weights = host_weights(&mixture().expect("builds"));
    let names: Vec<&str> = weights.iter().map(|weight| &*weight.name).collect();
    // The embedding, of which a token reads a row; experts, of which it reads two; matrices. Neither norms, nor routers, nor
    // the output projection. Of each kind the same projection of all layers.
    let of = |what: &str| (0..LAYERS).rev().map(|i| format!("layers.{i}.{what}")).collect::<Vec<_>>();
    let kinds = ["experts.down", "experts.up", "experts.gate", "down", "up"].map(of);
    let expected: Vec<String> = std::iter::once("embed".to_owned()).chain(kinds.into_iter().flatten()).collect();
    assert_eq!(names, expected);
    assert_eq!(weights[0].token_bytes, WIDTH as u64 * 2);
    let experts: Vec<_> = weights.iter().filter(|weight| weight.name.contains("experts")).collect();
    assert!(experts.iter().all(|w| w.token_bytes * EXPERTS as u64 == w.bytes * TOP_K as u64));
    assert_eq!(experts.iter().map(|weight| weight.bytes).sum::<u64>(), LAYERS as u64 * EXPERT_BYTES);
    assert!(weights[1 + 3 * LAYERS..].iter().all(|weight| weight.token_bytes == weight.bytes));
}

#[test]
fn fetched_weights_mean_the_same_and_are_copied_for_many_rows_alone() {
    let graph = mixture().expect("builds");
    let (fetching, _) = fetching(&graph);
    let fetches =
        |g: &ridge_graph::Graph| g.main().nodes.iter().filter(|n| matches!(n.op, Op::Prim(Prim::Fetch(_)))).count();
    assert_eq!(fetches(&fetching), 5 * LAYERS, "the embedding is read in place");
    for tokens in [3, 20] {
        let value = |arg: &Arg| match arg.role {
            Role::Weight => Some(weight(arg)),
            _ => inputs(tokens).into_iter().find(|(name, _)| *name == &*arg.name).map(|(_, value)| value.into()),
        };
        let bindings = Bindings::new().with("tokens", tokens).with("reached", EXPERTS);
        let of = |graph| evaluate(graph, &value, &bindings, Precision::Exact).expect("evaluates");
        let tensors =
            |outputs: Vec<(String, Value)>| outputs.iter().map(|(_, v)| v.tensor().clone()).collect::<Vec<_>>();
        assert_eq!(tensors(of(&graph)), tensors(of(&fetching)));
    }
    let lowered = lower(&fetching, &["logits"], &[]).expect("lowers");
    assert_eq!(fetches(&lowered), 5 * LAYERS);
    let copies = |tokens: usize| {
        let bindings = Bindings::new().with("tokens", tokens);
        let plan = plan(&lowered, &bindings).expect("bound");
        let is_copy = |kernel: usize| {
            let of = &plan.kernels[kernel];
            matches!(lowered.function(of.func).nodes[of.node].op, Op::Prim(Prim::Fetch(_)))
        };
        let copies: Vec<_> = plan.launches.iter().filter(|launch| is_copy(launch.kernel)).collect();
        assert!(
            copies.iter().all(|launch| launch.communicates && matches!(launch.inputs[0].region, Region::Weight(_)))
        );
        (copies.len(), plan.arena_bytes as u64)
    };
    // Up to two rows of each expert on average, experts are read where they are.
    let most = 2 * EXPERTS / TOP_K;
    assert_eq!(copies(1).0, 2 * LAYERS);
    assert_eq!(copies(most).0, 2 * LAYERS);
    let (count, many) = copies(most + 1);
    assert_eq!(count, 5 * LAYERS);
    // Two layers are on the device at a time, not all of them; matrices add a tenth.
    let whole = lower(&graph, &["logits"], &[]).expect("lowers");
    let without = plan(&whole, &Bindings::new().with("tokens", most + 1)).expect("bound").arena_bytes as u64;
    let slots = many - without;
    assert!((EXPERT_BYTES..EXPERT_BYTES * 5 / 2).contains(&slots), "{slots} bytes for layers of {EXPERT_BYTES}");
}

#[test]
fn what_crosses_the_link_is_counted_as_plans_copy_it() {
    let graph = mixture().expect("builds");
    let names = BTreeSet::from(["layers.1.experts.up".to_owned(), "layers.2.up".to_owned(), "embed".to_owned()]);
    let mut fetching = graph.clone();
    fetch_weights(&mut fetching, &names);
    let bytes = |name: &str| {
        let arg = graph.args(Role::Weight).find(|arg| &*arg.name == name).expect("exists");
        component_offsets(&arg.ty, &Bindings::new()).expect("constant").1 as u64
    };
    let (stack, matrix) = (bytes("layers.1.experts.up"), bytes("layers.2.up"));
    let traffic = |tokens: usize, reached: usize| {
        let bindings = Bindings::new().with("tokens", tokens).with("reached", reached);
        host_traffic(&fetching, &bindings).expect("bound")
    };
    let half = HostTraffic { copied: matrix, in_place: stack / 2 };
    assert_eq!(traffic(3, EXPERTS / 2), half);
    assert_eq!(traffic(3, EXPERTS / 2).bytes(), matrix + stack / 2);
    assert_eq!(traffic(30, EXPERTS), HostTraffic { copied: matrix + stack, in_place: 0 });
    assert_eq!(host_traffic(&graph, &Bindings::new().with("tokens", 3)).expect("bound"), HostTraffic::default());
}

/// An embedding in a format is decoded as a whole, and so are stacks of experts of those formats that have no kernel for groups.
#[test]
fn what_is_decoded_as_a_whole_is_not_read_in_place() {
    let stored = |what: &str, format: &FormatRef| {
        retype(&mixture().expect("builds"), &|name: &str, ty: &Type| {
            name.contains(what).then(|| Type { format: Some(format.clone()), ..ty.clone() })
        })
        .expect("is another storage")
    };
    let formatted = host_weights(&stored("embed", &FormatRef::new(Q8_0)));
    assert!(!formatted.is_empty() && formatted.iter().all(|weight| &*weight.name != "embed"));
    let whole = [FormatRef::new(Q2K), FormatRef::new(Q3K), FormatRef::new(Iq4Nl), FormatRef::new(Iq4Xs)];
    let mut seen = 0;
    for format in format::all() {
        let graph = stored("experts.down", &format);
        let name = "layers.1.experts.down";
        let weights = host_weights(&graph);
        let weight = weights.iter().find(|weight| &*weight.name == name).expect("may leave the device");
        let mut fetching = graph.clone();
        fetch_weights(&mut fetching, &BTreeSet::from([name.to_owned()]));
        let bindings = Bindings::new().with("tokens", 1).with("reached", TOP_K);
        let traffic = host_traffic(&fetching, &bindings).expect("bound");
        let is_whole = whole.contains(&format);
        seen += usize::from(is_whole);
        let expected = match is_whole {
            true => HostTraffic { copied: weight.bytes, in_place: 0 },
            false => HostTraffic { copied: 0, in_place: weight.bytes * TOP_K as u64 / EXPERTS as u64 },
        };
        assert_eq!((traffic, weight.token_bytes), (expected, expected.bytes()), "{format:?}");
    }
    assert_eq!(seen, whole.len());
}
