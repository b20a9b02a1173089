//! Names of step inputs are checked when an engine starts.

use std::sync::Arc;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_engine::{Engine, EngineOptions};
use ridge_models::{BuildOptions, ModelFiles, WeightSource};
use ridge_runtime::Session;

#[test]
fn step_input_of_another_name_is_an_error() {
    let files = ModelFiles::open(None).expect("embedded");
    let mut model = files.config().expect("is supported").build(&BuildOptions::default()).expect("builds");
    let main = model.graph.main.index();
    let arg = model.graph.functions[main].args.iter_mut().find(|arg| &*arg.name == "temperature");
    arg.expect("every model reads it").name = "temprature".into();
    let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).expect("starts");
    let mut session = Session::new(Arc::new(cpu));
    let source = WeightSource::Checkpoint(Arc::new(files.checkpoint().expect("embedded")));
    source.load(&mut session, &model.graph, |_| ()).expect("loads");
    let options = EngineOptions { context: 64, sequences: 1, chunk: 64, blocks: None };
    let error = Engine::new(session, &model, options).err().expect("is not filled").to_string();
    assert!(error.starts_with("input `temprature`") && error.contains("temperature, top_k, top_p"), "{error}");
}
