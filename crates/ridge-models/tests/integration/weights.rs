//! Weights on their way from a source to a session.

use std::sync::Arc;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_files::Checkpoint;
use ridge_graph::{Builder, DType, Dim, Graph, Shape, Type};
use ridge_models::WeightSource;
use ridge_runtime::Session;

/// A graph with one weight `w` of this shape.
fn graph(shape: Shape) -> Graph {
    let mut g = Builder::new();
    let weight = g.weight("w", Type::tensor(DType::F32, shape)).expect("is the first");
    g.finish(vec![("out".to_owned(), weight)]).expect("builds")
}

fn checkpoint() -> WeightSource {
    let data = [0u8; 16];
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![4], &data).expect("fits");
    let bytes = safetensors::serialize([("w", view)], None).expect("writes");
    WeightSource::Checkpoint(Arc::new(Checkpoint::from_bytes("test", bytes).expect("reads")))
}

#[test]
fn weight_whose_extents_are_no_numbers_is_refused_by_name() {
    let graph = graph([&Dim::sym("n")].into());
    for source in [checkpoint(), WeightSource::Random(DType::F32)] {
        let mut session = Session::new(Arc::new(Cpu::new(CpuOptions::default()).expect("a CPU")));
        let refused = source.load(&mut session, &graph, |_| ()).expect_err("has no size").to_string();
        assert!(refused.contains("the weight w has the shape [n]"), "{refused}");
    }
    let refused = checkpoint().retype(&graph, None).expect_err("has no size").to_string();
    assert!(refused.contains("the weight w has the shape [n]"), "{refused}");
}

#[test]
fn weight_that_the_checkpoint_lacks_is_refused_by_name() {
    let mut g = Builder::new();
    let weight = g.weight("v", Type::tensor(DType::F32, [4])).expect("is the first");
    let graph = g.finish(vec![("out".to_owned(), weight)]).expect("builds");
    let mut session = Session::new(Arc::new(Cpu::new(CpuOptions::default()).expect("a CPU")));
    let refused = checkpoint().load(&mut session, &graph, |_| ()).expect_err("is missing").to_string();
    assert_eq!(refused, "test: there is no tensor v; check that config.json belongs to this checkpoint");
}
