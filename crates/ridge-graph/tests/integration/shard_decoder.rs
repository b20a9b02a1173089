//! A decoder over tensor-parallel ranks.

use crate::support::decoder::{HEAD, arguments, decoder};
use crate::support::sharding::{assert_same_at, collectives, tp};
use ridge_graph::shard::{MeshAxis, Placement, Sharded, shard};
use ridge_graph::{Arg, Bindings, Dim, Graph, Op, Role};

fn tokens() -> Dim {
    Dim::sym("tokens")
}

/// Megatron's placement (Shoeybi et al. 2019, section 3): columns of the first linear, rows of the second.
fn place(arg: &Arg) -> Placement {
    let ends = |parts: &[&str]| parts.iter().any(|p| arg.name.ends_with(&format!("{p}.weight")));
    let heads = |dim| Placement::Shard { dim, multiple: HEAD };
    match arg.role {
        Role::State => Placement::shard(2),
        _ if ends(&["q_proj", "k_proj", "v_proj"]) => heads(0),
        _ if ends(&["o_proj"]) => heads(1),
        _ if ends(&["gate_proj", "up_proj"]) => Placement::shard(0),
        _ if ends(&["down_proj"]) => Placement::shard(1),
        _ => Placement::Replicate,
    }
}

fn sharded(graph: &Graph, axis: &MeshAxis, place: &dyn Fn(&Arg) -> Placement) -> Sharded {
    shard(graph, axis, place, &|_| false).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn a_layer_reduces_twice_and_is_one_function_for_all_its_calls() {
    let graph = decoder(2, &tokens());
    let local = sharded(&graph, &tp(), &place);
    let bindings = Bindings::new().with("tokens", 5);
    let args = arguments(&graph, 5, &bindings);
    assert_same_at("tensor parallel", &graph, &local, &tp(), &args, &bindings);
    let layer = ("decoder_layer".to_owned(), vec!["all_reduce"; 2]);
    assert_eq!(collectives(&local.graph), [layer, ("main".into(), vec![])]);
}

#[test]
fn nodes_keep_scopes_and_arguments_their_names_and_order() {
    let graph = decoder(2, &tokens());
    let local = sharded(&graph, &tp(), &place);
    let names = |g: &Graph| g.main().args.iter().map(|a| (a.name.to_string(), a.role)).collect::<Vec<_>>();
    assert_eq!(names(&local.graph), names(&graph));
    let scopes = |g: &Graph| {
        let nodes = g.functions[0].nodes.iter();
        let kept = nodes.filter(|n| !matches!(n.op, Op::Arg(_)) && n.op_name() != "all_reduce");
        kept.map(|n| (n.op_name().to_owned(), n.scope.to_string())).collect::<Vec<_>>()
    };
    assert_eq!(scopes(&local.graph), scopes(&graph));
}

#[test]
fn an_input_cut_by_tokens_makes_the_layer_sequence_parallel() {
    // Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2.
    let graph = decoder(2, &(tokens() * 2));
    let by_tokens = |arg: &Arg| if &*arg.name == "x" { Placement::shard(0) } else { place(arg) };
    let local = sharded(&graph, &tp(), &by_tokens);
    let bindings = Bindings::new().with("tokens", 3);
    let args = arguments(&graph, 6, &bindings);
    assert_same_at("sequence parallel", &graph, &local, &tp(), &args, &bindings);
    let pattern = vec!["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"];
    assert_eq!(collectives(&local.graph)[0].1, pattern);
    assert_eq!(local.outputs[0], Placement::shard(0));

    let whole = shard(&graph, &tp(), &by_tokens, &|output| &*output.name == "hidden").expect("shards");
    assert_same_at("gathered at the end", &graph, &whole, &tp(), &args, &bindings);
    assert_eq!((whole.outputs[0], &collectives(&whole.graph)[1].1), (Placement::Replicate, &vec!["all_gather"]));
}

#[test]
fn layers_placed_alike_share_a_function_and_others_do_not() {
    let graph = decoder(2, &tokens());
    let half = |arg: &Arg| if arg.name.starts_with("layers.1.mlp") { Placement::Replicate } else { place(arg) };
    let local = sharded(&graph, &tp(), &half);
    let names: Vec<String> = collectives(&local.graph).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["decoder_layer", "decoder_layer.2", "main"]);
    let bindings = Bindings::new().with("tokens", 4);
    let args = arguments(&graph, 4, &bindings);
    assert_same_at("one layer's MLP replicated", &graph, &local, &tp(), &args, &bindings);
}

#[test]
fn fewer_kv_heads_than_ranks_is_refused_saying_so() {
    let error = shard(&decoder(1, &tokens()), &tp(), &place, &|_| false).expect_err("one head").to_string();
    assert_eq!(
        error,
        "layers.0.self_attn.k_proj.weight: f32[4, 16]: axis 0 is 1 piece of 4 elements, too few or uneven for 2 ranks of \
         `tp`; replicate it"
    );
    let three = MeshAxis::new("tp", 3);
    let error = shard(&decoder(2, &tokens()), &three, &place, &|_| false).expect_err("four heads").to_string();
    assert!(error.contains("self_attn.q_proj.weight") && error.contains("divides 4"), "{error}");
}

#[test]
fn a_wrongly_placed_weight_is_named_with_the_rules_of_its_op() {
    let wrong = |arg: &Arg| {
        if &*arg.name == "layers.1.post_attention_layernorm.weight" { Placement::shard(0) } else { place(arg) }
    };
    let error = shard(&decoder(2, &tokens()), &tp(), &wrong, &|_| false).expect_err("cut norm").to_string();
    let wanted = "layers.1.post_attention_layernorm: rms_norm(f32[tokens, 16], f32[16]): over 2 ranks of `tp`: no \
                  rule fits inputs placed (replicate, shard(0)); place `layers.1.post_attention_layernorm.weight` \
                  (shard(0)) otherwise. It runs as (shard(0), replicate) -> (shard(0)), or as (replicate, replicate) \
                  -> (replicate)";
    assert_eq!(error, wanted);
}

#[test]
fn a_state_that_cannot_stay_where_it_is_is_refused() {
    let wrong = |arg: &Arg| if arg.role == Role::State { Placement::shard(0) } else { place(arg) };
    let error = shard(&decoder(2, &(tokens() * 2)), &MeshAxis::new("tp", 3), &wrong, &|_| false);
    assert!(error.is_err());
    let cache = |arg: &Arg| if arg.role == Role::State { Placement::shard(4) } else { place(arg) };
    let error = shard(&decoder(2, &tokens()), &tp(), &cache, &|_| false).expect_err("no rule").to_string();
    assert!(error.contains("kv_write") && error.contains("place `layers.0.self_attn.kv` (shard(4))"), "{error}");
}

#[test]
fn a_graph_is_sharded_over_an_axis_once() {
    let graph = decoder(2, &tokens());
    let once = sharded(&graph, &tp(), &place);
    let again = shard(&once.graph, &tp(), &|_| Placement::Replicate, &|_| false).expect_err("twice").to_string();
    assert!(again.contains("sharded over `tp` already"), "{again}");
    let alone = sharded(&graph, &MeshAxis::new("tp", 1), &place);
    assert_eq!(alone.graph, graph);
}
