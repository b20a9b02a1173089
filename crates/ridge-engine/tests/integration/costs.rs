//! What a step costs as it runs, against what `ridge inspect` tells of the model as it was written.

use ridge_cpu::{Cpu, CpuOptions};
use ridge_engine::costs::StepCost;
use ridge_models::{BuildOptions, ModelFiles, Summary};
use ridge_runtime::Backend as _;

#[test]
fn a_step_multiplies_what_inspect_tells_and_moves_no_more_bytes() {
    let config = ModelFiles::open(None).and_then(|files| files.config()).expect("embedded");
    let model = config.build(&BuildOptions::default()).expect("builds");
    let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).expect("starts");
    let cost = StepCost::new(&model, 512, cpu.kernels()).expect("lowers");
    for context in [1, 17, 512] {
        let told = Summary::new(&model, context).expect("sums up").token;
        let step = cost.at(&[(context - 1, 1)]).expect("bound");
        assert_eq!(step.matrix_flops, told.step.matrix_flops as f64);
        let (least, most) = (
            Summary::new(&model, 1).expect("sums up").module.weight_bytes,
            told.step.bytes_read + told.step.bytes_written,
        );
        assert!(step.bytes <= most, "{} bytes as it runs, {most} as it is written", step.bytes);
        // The one row of the embedding that is read is also read as a row of the output.
        assert!(step.bytes >= least, "{} bytes, and {least} of weights", step.bytes);
    }
}

#[test]
fn a_prompt_in_two_steps_computes_the_same_products_but_for_what_each_step_computes_of_its_last_token() {
    let config = ModelFiles::open(None).and_then(|files| files.config()).expect("embedded");
    let model = config.build(&BuildOptions::default()).expect("builds");
    let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).expect("starts");
    let cost = StepCost::new(&model, 512, cpu.kernels()).expect("lowers");
    let flops = |sequences: &[(usize, usize)]| cost.at(sequences).expect("bound").matrix_flops;
    // The output, and of the last layer attention to 37 positions, its projection and the MLP.
    let output = 2.0 * 64.0 * 512.0;
    let last = 4.0 * 64.0 * 37.0 + 2.0 * 64.0 * (64.0 + 3.0 * 172.0);
    assert_eq!(flops(&[(0, 100)]) + output + last, flops(&[(0, 37)]) + flops(&[(37, 63)]));
    assert_eq!(flops(&[(0, 100), (5, 1)]), flops(&[(0, 100)]) + flops(&[(5, 1)]));
}

#[test]
fn the_last_token_of_a_prompt_sees_its_window_in_the_last_layer() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/families/mistral");
    let config = ModelFiles::open(Some(folder.as_ref())).and_then(|files| files.config()).expect("is there");
    let model = config.build(&BuildOptions::default()).expect("builds");
    let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).expect("starts");
    let cost = StepCost::new(&model, 128, cpu.kernels()).expect("lowers");
    let flops = |sequences: &[(usize, usize)]| cost.at(sequences).expect("bound").matrix_flops;
    let (hidden, mlp, window) = (config.hidden_size, config.intermediate_size, 8);
    let queries = config.num_attention_heads * config.head_dim;
    let of_token = 2 * hidden * config.vocab_size + 2 * queries * hidden + 6 * hidden * mlp + 4 * queries * window;
    // What both parts of a prompt compute of their last token, both behind more tokens than a window.
    assert_eq!(flops(&[(0, 90)]) + of_token as f64, flops(&[(0, 40)]) + flops(&[(40, 50)]));
}

#[test]
fn every_token_that_a_step_verifies_sees_those_before_it_in_all_layers() {
    let config = ModelFiles::open(None).and_then(|files| files.config()).expect("embedded");
    let model = config.build(&BuildOptions::default()).expect("builds");
    let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).expect("starts");
    let cost = StepCost::of_verifying(&model, 512, cpu.kernels()).expect("lowers");
    let flops = |sequences: &[(usize, usize)]| cost.at(sequences).expect("bound").matrix_flops;
    let alone: f64 = (50..54).map(|cached| flops(&[(cached, 1)])).sum();
    assert_eq!(flops(&[(50, 4)]), alone);
}

#[test]
fn a_step_of_a_recurrent_model_reads_the_state_of_its_sequences() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/families/mamba2");
    let config = ModelFiles::open(Some(folder.as_ref())).and_then(|files| files.config()).expect("is there");
    let model = config.build(&BuildOptions::default()).expect("builds");
    let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).expect("starts");
    let cost = StepCost::new(&model, 512, cpu.kernels()).expect("lowers");
    let bytes = |sequences: &[(usize, usize)]| cost.at(sequences).expect("bound").bytes;
    assert!(bytes(&[(10, 1), (20, 1)]) > bytes(&[(10, 1)]));
}
