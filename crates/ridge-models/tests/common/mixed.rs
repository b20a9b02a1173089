//! Training in mixed precision: forward and backward from copies of masters, which the optimiser updates in f32.
#![allow(unreachable_pub)] // part of test binaries of two crates

use ridge_graph::grad::{Differentiated, float_weights};
use ridge_graph::ops::AdamW;
use ridge_graph::{Builder, DType, Graph, Result, Shape, Type};

/// The name of the master of the weight `name`.
pub fn master(name: &str) -> String {
    format!("master.{name}")
}

/// The recipe of the copy `name`, of type `ty`: its master, rounded.
pub fn copy_of_master(name: &str, ty: &Type) -> Result<Graph> {
    let mut g = Builder::new();
    let master = g.weight(&master(name), Type { dtype: DType::F32, ..ty.clone() })?;
    let copy = g.cast(master, ty.dtype)?;
    let state = g.state(name, ty.clone())?;
    g.state_write(state, copy)?;
    g.finish(Vec::new())
}

/// A step of `adamw` on the masters of all weights of `loss`: inputs `lr` and `step` are added to its own. If `fused`,
/// the step writes the copies too, else it only reads them.
pub fn mixed_step(loss: &Graph, adamw: AdamW, fused: bool) -> Result<Graph> {
    let weights = float_weights(loss);
    let mut step = match fused {
        true => Differentiated::training(loss, "loss", &weights)?,
        false => Differentiated::new(loss, "loss", &weights)?,
    };
    let scalar = Type::tensor(DType::F32, Shape::default());
    let (lr, count) = (step.g.step_input("lr", scalar.clone())?, step.g.step_input("step", scalar)?);
    for p in step.parameters.clone() {
        let ty = step.g.ty(p.value)?.clone();
        let gradient = step.g.cast(p.gradient, DType::F32)?;
        let names = [master(&p.name), format!("adamw.m.{}", p.name), format!("adamw.v.{}", p.name)];
        let mut inputs = Vec::new();
        for name in &names {
            let state = step.g.state(name, Type { dtype: DType::F32, ..ty.clone() })?;
            inputs.push(step.g.state_read(state)?);
        }
        let next = step.g.composite(adamw, &[inputs[0], gradient, inputs[1], inputs[2], lr, count])?;
        for (name, value) in names.iter().zip(&next) {
            step.update(name, *value)?;
        }
        if fused {
            let copy = step.g.cast(next[0], ty.dtype)?;
            step.update(&p.name, copy)?;
        }
    }
    step.finish(Vec::new())
}
