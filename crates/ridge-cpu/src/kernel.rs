//! What a kernel is on the CPU, what it is made from, and how it is registered.

use std::ops::Range;
use std::sync::Arc;

use ridge_graph::passes::{self, Layout, Offer, OfferRequest, Pattern, Target};
use ridge_graph::{Bindings, Composite, DType, FormatRef, Function, Op, Shape, Type};
use ridge_runtime::component_offsets;

use crate::io::KernelIo;
use crate::scratch::Scratch;

/// A kernel for fixed shapes, made once for each distinct node of a bucket and run by any thread.
pub trait CpuKernel: Send + Sync {
    /// Into how many independent pieces its work can be cut, such as rows of the output. Zero where there is nothing
    /// to do.
    fn pieces(&self) -> usize;

    /// What one piece takes, in nanoseconds, roughly: decides into how many parts the work is worth cutting.
    fn nanos_per_piece(&self) -> f64;

    /// Inputs that it would take repacked, all of them or none: those that its offer asks for or accepts. The layouts are
    /// this crate's own; other kernels leave this as it is.
    fn takes_panels(&self) -> Range<usize> {
        0..0
    }

    /// Work that must be done before the first piece, if there is some.
    fn preparation(&self) -> Option<Preparation> {
        None
    }

    /// Does `pieces` of the preparation, into the parts of [`KernelIo::room`] that belong to them.
    fn prepare(&self, _io: &KernelIo<'_>, _pieces: Range<usize>, _scratch: &mut Scratch) {}

    /// Computes `pieces`. Different threads get ranges that do not overlap, and every piece is in exactly one range.
    /// A kernel writes only the output elements of its pieces.
    fn run(&self, io: &KernelIo<'_>, pieces: Range<usize>, scratch: &mut Scratch);
}

/// Work on a kernel's inputs that all of its pieces share, such as another layout: done by all threads before the first
/// piece, once for a run.
#[derive(Clone, Copy, Debug)]
pub struct Preparation {
    /// Bytes that it fills of the workspace, from [`KernelIo::room`] on; all pieces may read them.
    pub bytes: usize,
    /// As [`CpuKernel::pieces`].
    pub pieces: usize,
    /// As [`CpuKernel::nanos_per_piece`].
    pub nanos_per_piece: f64,
}

/// A tensor's type with numbers for its extents.
#[derive(Clone, Debug)]
pub struct OperandType {
    /// Its dtype.
    pub dtype: DType,
    /// The format that it is stored in, if it is not stored as elements of `dtype`.
    pub format: Option<FormatRef>,
    /// Its extents.
    pub shape: Vec<usize>,
    /// Is it a weight that is repacked?
    pub(crate) panels: bool,
}

impl OperandType {
    /// Where each component of a value in a format begins, in bytes; one 0 for a plain value.
    pub(crate) fn component_offsets(&self) -> Result<Vec<usize>, String> {
        Ok(self.storage()?.0)
    }

    /// Bytes that it takes, with what is between its components.
    pub(crate) fn bytes(&self) -> Result<usize, String> {
        Ok(self.storage()?.1)
    }

    fn storage(&self) -> Result<(Vec<usize>, usize), String> {
        let shape = Shape::new(self.shape.iter().copied());
        let ty = Type { format: self.format.clone(), ..Type::tensor(self.dtype, shape) };
        component_offsets(&ty, &Bindings::new()).map_err(|e| e.to_string())
    }

    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// The innermost extent; 1 for a scalar.
    pub(crate) fn last(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Elements over all axes but the innermost.
    pub(crate) fn rows(&self) -> usize {
        self.shape.iter().rev().skip(1).product()
    }
}

/// What a kernel is made from.
pub struct KernelSpec<'a> {
    /// The claimed or fused nodes, as a function of the group's inputs; the single node for a primitive.
    pub body: &'a Function,
    /// The types of the inputs, in the order of the pattern's text.
    pub inputs: Vec<OperandType>,
    /// The types of the outputs.
    pub outputs: Vec<OperandType>,
    /// Numbers of the symbols in the body's types and attributes.
    pub bindings: &'a Bindings,
}

impl KernelSpec<'_> {
    /// The attributes of the first composite of type `T` in the body.
    pub fn composite<T: Composite>(&self) -> Option<&T> {
        self.body.nodes.iter().find_map(|n| match &n.op {
            Op::Composite(op) => op.downcast::<T>(),
            _ => None,
        })
    }
}

/// A kernel's registration: what it claims, and how it is made.
#[derive(Clone)]
pub struct KernelEntry {
    claim: passes::Kernel,
    make: MakeKernel,
}

/// Makes a kernel for fixed shapes, or says what it cannot compute.
pub type MakeKernel = fn(&KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String>;

impl KernelEntry {
    /// Registers a kernel as `name` for the ops that `pattern` matches (see [`Pattern::parse`]).
    ///
    /// `supports` is asked for the matched ops with their types and attributes, in which symbolic extents have no
    /// numbers yet; `make` builds the kernel for each distinct node of a bucket. The kernel is predicted to reach the
    /// roofline, and must give a row the same bits whatever the number of rows; [`KernelEntry::offering`] states
    /// something else.
    ///
    /// # Panics
    /// When `pattern` is malformed.
    pub fn new(name: impl Into<Arc<str>>, pattern: &str, supports: fn(&Function) -> bool, make: MakeKernel) -> Self {
        Self { claim: passes::Kernel::at_roofline(name, Pattern::parse(pattern), supports), make }
    }

    /// The kernel with other offers: predicted time, workspace and numerics class by device, extents and ops.
    #[must_use]
    pub fn offering(self, offer: impl Fn(&OfferRequest<'_>) -> Option<Offer> + Send + Sync + 'static) -> Self {
        let claim = passes::Kernel { offer: Arc::new(offer), ..self.claim };
        Self { claim, ..self }
    }

    /// The kernel, which accepts these arguments of the body in these layouts, in addition to its offers.
    #[must_use]
    pub(crate) fn accepting(
        self,
        layouts: impl Fn(&OfferRequest<'_>) -> Vec<(usize, Layout)> + Send + Sync + 'static,
    ) -> Self {
        let offer = Arc::clone(&self.claim.offer);
        self.offering(move |request| offer(request).map(|offer| Offer { accepts: layouts(request), ..offer }))
    }

    /// The kernel, which wants these arguments of the body in these layouts, in addition to its offers.
    #[must_use]
    pub(crate) fn wanting(
        self,
        layouts: impl Fn(&OfferRequest<'_>) -> Vec<(usize, Layout)> + Send + Sync + 'static,
    ) -> Self {
        let offer = Arc::clone(&self.claim.offer);
        self.offering(move |request| offer(request).map(|offer| Offer { layouts: layouts(request), ..offer }))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.claim.name
    }

    /// As compilation for `target` sees it.
    pub(crate) fn claim(&self, target: &Arc<Target>) -> passes::Kernel {
        self.claim.clone().on(target)
    }

    /// The kernel for these operands.
    ///
    /// # Errors
    /// Names what it cannot compute.
    pub(crate) fn make(&self, spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
        (self.make)(spec)
    }
}
