//! What a backend's kernel is to compilation: a pattern, and an offer to compute what matches it.

use std::fmt;
use std::sync::Arc;

use super::pattern::Pattern;
use crate::dim::{Bindings, Sym};
use crate::graph::Function;
use crate::poly::Poly;
use crate::shape::Shape;

/// What the kernels of a backend run on, as plain data.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    /// The instruction set or architecture, such as `avx512` or `sm_90a`.
    pub architecture: Arc<str>,
    /// Threads that compute, where their number is known; 1 otherwise.
    pub threads: usize,
    /// Memory bandwidth in bytes per second.
    pub bytes_per_second: f64,
    /// Peak arithmetic in FLOP per second.
    pub flops_per_second: f64,
    /// Largest workspace in bytes that one kernel may take.
    pub workspace_bytes: u64,
    /// Must the result of an op not depend on how many rows are computed together? Then only kernels of one numerics
    /// class at all extents are chosen.
    pub deterministic: bool,
    /// Do fused groups take views (slices, transposes, concatenations, gathers), and values of several shapes?
    pub fuses_views: bool,
}

/// A nominal device of 100 GB/s and 1 TFLOP/s, which does not ask for determinism.
impl Default for Target {
    fn default() -> Self {
        Self {
            architecture: "nominal".into(),
            threads: 1,
            bytes_per_second: 1e11,
            flops_per_second: 1e12,
            workspace_bytes: u64::MAX,
            deterministic: false,
            fuses_views: false,
        }
    }
}

/// How many rows a program computes at a time: the range of the symbols in the leading extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extents {
    /// Any number: one program serves decode and prompts.
    Any,
    /// 1 to 16 rows: single tokens of few sequences.
    Decode,
    /// 17 to 128 rows.
    Small,
    /// 129 rows and more.
    Prompt,
}

impl Extents {
    /// All ranges.
    pub const ALL: [Self; 4] = [Self::Any, Self::Decode, Self::Small, Self::Prompt];

    /// The smallest and the largest number of rows.
    pub fn rows(self) -> (usize, usize) {
        match self {
            Self::Any => (1, usize::MAX),
            Self::Decode => (1, 16),
            Self::Small => (17, 128),
            Self::Prompt => (129, usize::MAX),
        }
    }

    /// The number of rows that costs are predicted for.
    pub fn nominal(self) -> usize {
        match self {
            Self::Any | Self::Small => NOMINAL,
            Self::Decode => 4,
            Self::Prompt => 1024,
        }
    }
}

/// The number that stands for symbols other than those of the leading extent.
const NOMINAL: usize = 64;

/// What a kernel is asked to compute.
#[derive(Clone, Copy, Debug)]
pub struct OfferRequest<'a> {
    /// The matched ops with their types, formats and attributes; extents may be symbols. There is one argument for each
    /// place of the pattern's text that names a value, in that order; the outputs are the root's, then the exported
    /// ones.
    pub body: &'a Function,
    /// The device.
    pub target: &'a Target,
    /// The number of rows. An offer holds for all of them.
    pub extents: Extents,
}

impl OfferRequest<'_> {
    /// The offer of a kernel whose traffic reaches `memory` of the bandwidth and whose arithmetic reaches `compute` of the
    /// peak (both above 0 and at most 1), without workspace, in the class `numerics`. It
    /// reads each input once and writes each output once.
    ///
    /// Transfers and arithmetic are not taken to overlap, so that fusion saves the traffic that it removes even of a
    /// group that arithmetic bounds.
    pub fn at_efficiency(&self, memory: f64, compute: f64, numerics: Numerics) -> Offer {
        Offer {
            seconds: self.seconds(memory, compute),
            workspace_bytes: 0,
            numerics,
            layouts: Vec::new(),
            accepts: Vec::new(),
        }
    }

    /// The seconds of the ops at the full bandwidth and the full peak, which are not taken to overlap.
    pub(super) fn roofline(&self) -> f64 {
        self.seconds(1.0, 1.0)
    }

    fn seconds(&self, memory: f64, compute: f64) -> f64 {
        let cost = self.body.cost_together();
        self.nominal(&cost.bytes()) / (self.target.bytes_per_second * memory)
            + self.nominal(&cost.flops()) / (self.target.flops_per_second * compute)
    }

    /// The polynomial's value at nominal extents.
    fn nominal(&self, poly: &Poly) -> f64 {
        let leading = self.body.outputs.first().and_then(|o| self.body.ty(o.var).shape.0.first());
        let leading = leading.map(|dim| Shape(vec![dim.clone()]).elements());
        let is_leading = |symbol: &Sym| leading.as_ref().is_some_and(|l| l.symbols().any(|s| s == symbol));
        let bindings = poly.symbols().fold(Bindings::new(), |bindings, symbol| {
            bindings.with(symbol.name(), if is_leading(symbol) { self.extents.nominal() } else { NOMINAL })
        });
        poly.eval(&bindings).unwrap_or(0) as f64
    }
}

/// What a kernel promises.
#[derive(Clone, Debug, PartialEq)]
pub struct Offer {
    /// Predicted time at nominal extents ([`Extents::nominal`]); must be finite.
    pub seconds: f64,
    /// Bytes of workspace that it takes besides inputs and outputs.
    pub workspace_bytes: u64,
    /// Which sums it makes in which order.
    pub numerics: Numerics,
    /// Layouts that it wants arguments of the body in, by their index: all of these or none. It must also take all
    /// arguments in rows, which are what the others are always in.
    pub layouts: Vec<(usize, Layout)>,
    /// Layouts that it takes arguments in as well as in rows, without asking for them: a table that is looked up by row
    /// may so be laid out for the product that shares it.
    pub accepts: Vec<(usize, Layout)>,
}

/// How the bytes of a parameter lie in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    /// In order of the shape, row-major; components of a format one after another.
    Rows,
    /// As the backend that has a layout of this name defines it.
    Named(Arc<str>),
}

/// A numerics class. Two offers of one class for the same ops give the same bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Numerics {
    /// This class, for every number of rows that the offer was asked for.
    Class(Arc<str>),
    /// The order of sums depends on the extents: no class. Not chosen for a deterministic target.
    ByExtents,
}

/// Answers a request; `None` where the kernel does not support the ops, types, device or extents.
pub type OfferFn = dyn Fn(&OfferRequest<'_>) -> Option<Offer> + Send + Sync;

/// A backend's kernel, as far as compilation needs to know it.
#[derive(Clone)]
pub struct Kernel {
    /// Its name, unique within the backend.
    pub name: Arc<str>,
    /// What it computes as one.
    pub pattern: Pattern,
    /// What it runs on: the same for all kernels of a backend.
    pub target: Arc<Target>,
    /// Its offers.
    pub offer: Arc<OfferFn>,
}

impl Kernel {
    /// A kernel for the nominal target that makes offers by `offer`.
    pub fn new(
        name: impl Into<Arc<str>>,
        pattern: Pattern,
        offer: impl Fn(&OfferRequest<'_>) -> Option<Offer> + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), pattern, target: Arc::default(), offer: Arc::new(offer) }
    }

    /// A kernel that takes all that `supports` accepts and is predicted to reach the roofline, in a numerics class of its
    /// own at all extents.
    pub fn at_roofline(name: impl Into<Arc<str>>, pattern: Pattern, supports: fn(&Function) -> bool) -> Self {
        let name = name.into();
        let class = Arc::clone(&name);
        Self::new(name, pattern, move |request| {
            supports(request.body).then(|| request.at_efficiency(1.0, 1.0, Numerics::Class(Arc::clone(&class))))
        })
    }

    /// The kernel on this device.
    #[must_use]
    pub fn on(self, target: &Arc<Target>) -> Self {
        Self { target: Arc::clone(target), ..self }
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel").field("name", &self.name).field("pattern", &self.pattern).finish_non_exhaustive()
    }
}
