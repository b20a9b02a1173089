//! What a user builds with a gradient of their own, as `torch.autograd.Function` and `jax.custom_vjp` have it: for what is
//! not smooth and is to be trained through, or has a better gradient than its parts.

use std::fmt;
use std::sync::Arc;

use super::require::takes;
use crate::cost::Cost;
use crate::error::{GraphError, Result};
use crate::graph::{Builder, Composite, CompositeRef, Gradient, Saved, Var};
use crate::types::Type;
use crate::why::Why;

type Build = dyn Fn(&mut Builder, &[Var]) -> Result<Vec<Var>> + Send + Sync;

/// A part of a graph with a gradient of its own. Two are equal if they share their functions, as clones do.
#[derive(Clone)]
pub struct UserGradient {
    name: &'static str,
    inputs: usize,
    /// Inputs that have cotangents: the first so many.
    wrt: usize,
    forward: Arc<Build>,
    backward: Arc<Build>,
}

/// The backward half: from inputs and cotangents of float outputs to cotangents of the first inputs.
#[derive(Clone, Debug, PartialEq)]
struct UserBackward(UserGradient);

impl fmt::Debug for UserGradient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UserGradient({})", self.name)
    }
}

impl PartialEq for UserGradient {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.forward, &other.forward) && Arc::ptr_eq(&self.backward, &other.backward)
    }
}

impl UserGradient {
    /// Of `inputs` inputs, `forward` builds the outputs; from the inputs, then a cotangent of each float output, `backward`
    /// builds the cotangents of the first `wrt` inputs, which must be plain floats, of their types. Neither may ask for
    /// weights, states or step inputs, and both must build the same each time.
    ///
    /// # Panics
    /// When `wrt` is more than `inputs` or 16.
    pub fn new(
        name: &'static str,
        [inputs, wrt]: [usize; 2],
        forward: impl Fn(&mut Builder, &[Var]) -> Result<Vec<Var>> + Send + Sync + 'static,
        backward: impl Fn(&mut Builder, &[Var]) -> Result<Vec<Var>> + Send + Sync + 'static,
    ) -> Self {
        assert!(wrt <= inputs, "{wrt} of {inputs} inputs have cotangents");
        Self { name, inputs, wrt, forward: Arc::new(forward), backward: Arc::new(backward) }
    }
}

/// The types of what `build` makes of values of these types.
fn types_of(build: &Build, inputs: &[Type]) -> Result<Vec<Type>, Why> {
    let mut g = Builder::new();
    let args: Vec<Var> = inputs.iter().enumerate().map(|(i, ty)| g.arg(&i.to_string(), ty.clone())).collect();
    let types =
        |g: &Builder, made: Vec<Var>| made.into_iter().map(|var| g.ty(var).cloned()).collect::<Result<Vec<_>>>();
    let types = build(&mut g, &args).and_then(|made| types(&g, made)).map_err(|error: GraphError| error.to_string())?;
    let asked = g.current().args.len() - inputs.len();
    if asked > 0 { Err(format!("it asks for {asked} weights, states or step inputs; pass them in")) } else { Ok(types) }
}

impl Composite for UserGradient {
    fn name(&self) -> &str {
        self.name
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        if inputs.len() != self.inputs {
            return Err(takes(&format!("{} values", self.inputs), inputs));
        }
        if let Some(at) = inputs.iter().position(|ty| ty.state) {
            return Err(format!("input {at} is a state; pass what it holds"));
        }
        let smooth = inputs.iter().take_while(|ty| ty.is_plain() && ty.dtype.is_float()).count();
        if smooth < self.wrt {
            return Err(format!("its first {} inputs have cotangents, and {smooth} are plain floats", self.wrt));
        }
        types_of(&*self.forward, inputs)
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        (self.forward)(g, inputs)
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        Cost::moving(inputs, outputs)
    }

    fn gradient(&self) -> Gradient {
        Gradient::Explicit {
            forward: CompositeRef::new(self.clone()),
            saved: (0..self.inputs).map(Saved::Input).collect(),
            backward: CompositeRef::new(UserBackward(self.clone())),
            wrt: (0..self.wrt).collect(),
        }
    }
}

impl Composite for UserBackward {
    fn name(&self) -> &str {
        "user_backward"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let types = types_of(&*self.0.backward, inputs)?;
        let wanted: Vec<Type> = inputs.iter().take(self.0.wrt).map(Type::plain).collect();
        if types == wanted {
            return Ok(types);
        }
        let text = |types: &[Type]| types.iter().map(Type::to_string).collect::<Vec<_>>().join(", ");
        Err(format!("the gradient of {} gives {}, which must be {}", self.0.name, text(&types), text(&wanted)))
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        (self.0.backward)(g, inputs)
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        Cost::moving(inputs, outputs)
    }
}
