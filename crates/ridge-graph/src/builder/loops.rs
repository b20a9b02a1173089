//! Loops of calls: scans over the rows of tensors, and loops that end when a condition does not hold. Each turn is a call of one
//! function, so a loop is differentiated as calls are, once for all turns.

use crate::dim::Dim;
use crate::dtype::DType;
use crate::error::{GraphError, Result};
use crate::graph::{Builder, FuncId, Role, Var};
use crate::shape::Shape;
use crate::types::Type;

impl Builder {
    /// Calls `body` once for each row along the first axis of `rows`, in order, each call's scope being `turns.<i>`. It takes the
    /// carried values, which begin as `carried`, then a row of each of `rows`; it gives the next carried values, of the same
    /// types, then a row of each result. Gives the carried values behind the last turn, and the results with their rows
    /// stacked along a first axis. Weights that `body` asks for are each turn's own, by the scope.
    ///
    /// # Errors
    /// When `rows` is empty, the first extents are not one and the same constant above 0, or `body` does not fit.
    pub fn scan_function(&mut self, body: FuncId, carried: &[Var], rows: &[Var]) -> Result<(Vec<Var>, Vec<Var>)> {
        let fail = |g: &Self, why: String| Err(GraphError::usage(g.scope(), why));
        let mut shapes = Vec::with_capacity(rows.len());
        for row in rows {
            shapes.push(self.ty(*row)?.shape.clone());
        }
        let turns = shapes.first().and_then(|shape| shape.0.first()?.as_const()).filter(|turns| *turns > 0);
        let Some(turns) = turns else {
            return fail(self, "a scan is over tensors whose first extent is a constant above 0".into());
        };
        if let Some(other) = shapes.iter().find(|shape| shape.0.first() != Some(&Dim::from(turns))) {
            return fail(self, format!("a scan of {turns} turns cannot be over {other}"));
        }
        let mut carried = carried.to_vec();
        let mut results: Vec<Vec<Var>> = Vec::new();
        for turn in 0..turns {
            let mut inputs = carried.clone();
            for (row, shape) in rows.iter().zip(&shapes) {
                let row = self.slice(*row, 0, turn, 1)?;
                inputs.push(self.reshape(row, Shape(shape.0[1..].to_vec()))?);
            }
            let mut outputs = self.scoped(&format!("turns.{turn}"), |g| g.call(body, &inputs))?;
            if outputs.len() < carried.len() {
                let why = format!("a body of {} outputs does not give {} carried values", outputs.len(), carried.len());
                return fail(self, why);
            }
            let rest = outputs.split_off(carried.len());
            carried = outputs;
            results.resize(rest.len(), Vec::with_capacity(turns));
            for (result, value) in results.iter_mut().zip(rest) {
                let mut shape = self.ty(value)?.shape.clone();
                shape.0.insert(0, 1.into());
                result.push(self.reshape(value, shape)?);
            }
        }
        let stacked = results.iter().map(|result| self.concat(result, 0)).collect::<Result<_>>()?;
        Ok((carried, stacked))
    }

    /// Repeats `body`, which takes the carried values and gives the next ones of the same types, while `condition` of them, a
    /// Bool scalar, holds, at most `most` times. All turns are computed, and those behind the end change nothing: the carried
    /// values are selected, so gradients pass through the turns that count. A turn that does not count must still be finite
    /// where a gradient is asked for. Neither function may have states.
    ///
    /// # Errors
    /// When a function has a state, does not fit `carried`, or `condition` gives something else than a Bool scalar.
    pub fn while_loop(&mut self, condition: FuncId, body: FuncId, carried: &[Var], most: usize) -> Result<Vec<Var>> {
        for function in [condition, body] {
            let found = self.functions().get(function.index());
            if let Some(state) = found.and_then(|f| f.args.iter().find(|arg| arg.role == Role::State)) {
                let why = "is a state, and a turn that does not count would update it";
                return Err(GraphError::usage(&state.name, why));
            }
        }
        let mut carried = carried.to_vec();
        let mut goes_on: Option<Var> = None;
        for turn in 0..most {
            let (next, holds) = self.scoped(&format!("turns.{turn}"), |g| {
                let holds = g.scoped("condition", |g| g.call(condition, &carried))?;
                Ok::<_, GraphError>((g.call(body, &carried)?, holds))
            })?;
            let [holds] = holds[..] else {
                return Err(GraphError::usage(self.scope(), "the condition of a loop must give one value"));
            };
            let wanted = Type::tensor(DType::Bool, Shape::default());
            if *self.ty(holds)? != wanted {
                let why = format!("the condition of a loop must be {wanted}, got {}", self.ty(holds)?);
                return Err(GraphError::usage(self.scope(), why));
            }
            if next.len() != carried.len() {
                let why = format!("a body of {} outputs does not give {} carried values", next.len(), carried.len());
                return Err(GraphError::usage(self.scope(), why));
            }
            let holds = match goes_on {
                Some(before) => self.and(before, holds)?,
                None => holds,
            };
            goes_on = Some(holds);
            for (old, new) in carried.iter_mut().zip(next) {
                let shape = self.ty(new)?.shape.clone();
                let chosen = self.broadcast(holds, shape)?;
                *old = self.select(chosen, new, *old)?;
            }
        }
        Ok(carried)
    }
}
