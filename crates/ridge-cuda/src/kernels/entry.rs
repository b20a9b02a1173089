//! The registration of a kernel that claims a pattern of ops.

use std::sync::Arc;

use ridge_graph::Function;
use ridge_graph::passes::{self, Numerics, Offer, OfferRequest, Pattern};

use crate::kernel::{CudaKernel, CudaKernelSpec};

type Make = dyn Fn(&CudaKernelSpec<'_>) -> Result<CudaKernel, String> + Send + Sync;
type Pays = fn(&CudaKernelSpec<'_>) -> bool;

/// A kernel under its name, with the pattern that it claims.
#[derive(Clone)]
pub struct CudaKernelEntry {
    claim: passes::Kernel,
    make: Arc<Make>,
    /// The shapes that it is for, if not for all.
    pays: Option<Pays>,
    /// The architecture that it is for, if not for all.
    arch: Option<&'static str>,
}

impl CudaKernelEntry {
    /// Registers a kernel as `name` for `pattern` (see [`Pattern`]), where `supports` accepts the ops, types and
    /// attributes; extents may be symbols there. `make` makes it for fixed shapes, or says why it cannot. It is predicted
    /// to reach the roofline, in one numerics class at all extents; [`CudaKernelEntry::offering`] states something else.
    pub fn new(
        name: impl Into<Arc<str>>,
        pattern: &str,
        supports: fn(&Function) -> bool,
        make: impl Fn(&CudaKernelSpec<'_>) -> Result<CudaKernel, String> + Send + Sync + 'static,
    ) -> Self {
        Self {
            claim: passes::Kernel::at_roofline(name, Pattern::parse(pattern), supports),
            make: Arc::new(make),
            pays: None,
            arch: None,
        }
    }

    /// The kernel with other offers: predicted time, workspace and numerics class by device, extents and ops.
    #[must_use]
    pub fn offering(self, offer: impl Fn(&OfferRequest<'_>) -> Option<Offer> + Send + Sync + 'static) -> Self {
        let claim = passes::Kernel { offer: Arc::new(offer), ..self.claim };
        Self { claim, ..self }
    }

    /// The kernel with the same offers, but for the order of its sums, which depends on the extents.
    pub(crate) fn numerics_by_extents(self) -> Self {
        let offer = Arc::clone(&self.claim.offer);
        self.offering(move |request| offer(request).map(|offer| Offer { numerics: Numerics::ByExtents, ..offer }))
    }

    /// As [`CudaKernelEntry::numerics_by_extents`], but for a deterministic target, for which `make` takes kernels whose sums have one
    /// order at all extents.
    pub(crate) fn numerics_by_extents_unless_deterministic(self) -> Self {
        let offer = Arc::clone(&self.claim.offer);
        self.offering(move |request| {
            let offer = offer(request)?;
            Some(if request.target.deterministic { offer } else { Offer { numerics: Numerics::ByExtents, ..offer } })
        })
    }

    /// The kernel for the shapes for which `pays` is true. For others the group is made by the kernels of its parts, which must be
    /// there for any shape.
    pub(crate) fn where_it_pays(self, pays: Pays) -> Self {
        Self { pays: Some(pays), ..self }
    }

    /// The kernel for this architecture, as NVRTC names it. On others the group is made by the kernels of its parts, as for shapes for
    /// which it does not pay.
    pub(crate) fn only_on(self, arch: &'static str) -> Self {
        Self { arch: Some(arch), ..self }
    }

    /// The architecture that it is for, if not for all.
    pub(crate) fn arch(&self) -> Option<&'static str> {
        self.arch
    }

    /// Is it for any shape on any GPU?
    pub(crate) fn always_pays(&self) -> bool {
        self.pays.is_none() && self.arch.is_none()
    }

    /// Is it for the shapes of `spec`?
    pub(crate) fn pays(&self, spec: &CudaKernelSpec<'_>) -> bool {
        self.pays.is_none_or(|pays| pays(spec))
    }

    /// The kernel's name.
    pub fn name(&self) -> &str {
        &self.claim.name
    }

    /// What it claims.
    pub(crate) fn claim(&self) -> &passes::Kernel {
        &self.claim
    }

    /// The kernel for fixed shapes.
    ///
    /// # Errors
    /// Says what is not supported.
    pub(crate) fn make(&self, spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
        (self.make)(spec)
    }
}
