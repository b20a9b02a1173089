//! Keys of random numbers: one for each place in the model and each step.

use crate::builder::join;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Arg, Builder, CompositeRef, Op, Role, Var};
use crate::ops::FoldKey;
use crate::shape::Shape;
use crate::types::Type;

impl Builder {
    /// The step input that all keys of a graph come from: I64 scalar.
    pub const RANDOM_SEED: &str = "random.seed";
    /// The number of the step, which keys differ by: a step input, I64 scalar.
    pub const RANDOM_STEP: &str = "random.step";

    /// A key for random numbers, an I64 scalar: a function of the step inputs [`Builder::RANDOM_SEED`] and
    /// [`Builder::RANDOM_STEP`], of the calls that lead here and of the scope. Asked for again in the same scope it is
    /// another key, and so is it in another call of the function, even within one scope. In a function it comes from a
    /// hidden argument of role [`Role::Key`], which [`Builder::call`] fills in. All of it is pure: what computes it again,
    /// such as a backward half, gets the same key.
    ///
    /// # Errors
    /// When a step input of one of these names is of another type.
    pub fn random_key(&mut self) -> Result<Var> {
        let scope = self.scope().to_owned();
        let fold = CompositeRef::new(FoldKey);
        // Keys of one scope are told apart by how many there are before.
        let before = self.current().nodes.iter().filter(|n| n.op == Op::Composite(fold.clone()) && *n.scope == *scope);
        let word = path_word(&scope, before.count());
        let outer = self.outer_key()?;
        let word = self.constant(DType::I64, word as f64)?;
        self.fold_key(outer, word)
    }

    /// The key of the function now open; of main that of the step.
    fn outer_key(&mut self) -> Result<Var> {
        let scalar = Type::tensor(DType::I64, Shape::default());
        if self.open.len() > 1 {
            return Ok(self.named_arg(Arg::new(KEY, scalar, Role::Key))?.1);
        }
        let scope = self.scope().to_owned();
        self.set_scope(&join(&scope, KEY));
        let seed = self.step_input(Self::RANDOM_SEED, scalar.clone())?;
        let step = self.step_input(Self::RANDOM_STEP, scalar)?;
        let key = self.fold_key(seed, step);
        self.set_scope(&scope);
        key
    }
}

/// The hidden argument of functions.
const KEY: &str = "random.key";

/// What stands for the `nth` key of a scope: 53 bits, which a literal has exactly, of FNV-1a (Fowler, Noll and Vo 1991),
/// the same on every machine.
fn path_word(scope: &str, nth: usize) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    let hash = scope.as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, step);
    let hash = (nth as u64).to_le_bytes().iter().fold(hash, step);
    (hash >> 53) ^ (hash & ((1 << 53) - 1))
}
