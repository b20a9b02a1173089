//! Matrix products by cuBLASLt (NVIDIA, "cuBLAS Library", chapter "Using the cuBLASLt API"), opened at run time when a
//! program first has a product for it. Which of its algorithms runs is measured once for a shape, and kept on disk.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use libloading::Library;
use ridge_graph::DType;
use ridge_runtime::Result;

use crate::driver::{Address, Handle};
use crate::error::device as failed;

/// `cublasStatus_t`; 0 is success.
type Code = c_int;

/// Bytes of the workspace that algorithms may use.
pub(crate) const WORKSPACE: usize = 32 << 20;
/// Maximum number of algorithms that are timed for a shape.
const MAX_ALGORITHMS: usize = 8;
/// Bytes to which every operand is aligned.
pub(crate) const ALIGNED: usize = 16;

/// The f32 factors of operands that are codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum GemmScales {
    /// There are none.
    None,
    /// One of x and one of w.
    Tensor,
    /// The same, where x is of E5M2.
    Gradient,
    /// One of each row of both, from cuBLASLt 12.9 on (`CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F`).
    Rows,
}

/// What is done to a product with its bias before it is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum GemmActivation {
    /// Nothing.
    None,
    /// GELU in its tanh approximation.
    Gelu,
    /// The same; the pre-activation is stored in a matrix of the result's type, too.
    GeluAux,
    /// The product is multiplied by the derivative of that GELU at the pre-activations in a matrix of the result's type.
    GeluBackward,
}

impl GemmActivation {
    /// Is there a matrix of pre-activations?
    pub(crate) fn has_aux(self) -> bool {
        matches!(self, Self::GeluAux | Self::GeluBackward)
    }
}

/// `y[rows, columns] = x[rows, depth] w[columns, depth]^T`, and `+ r` and `+ bias[columns]` if asked for, then `activation`; summed in
/// f32, rounded once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GemmShape {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) depth: usize,
    /// Of x and w.
    pub(crate) operands: DType,
    /// Of y, r and the bias.
    pub(crate) result: DType,
    pub(crate) added: bool,
    pub(crate) biased: bool,
    pub(crate) activation: GemmActivation,
    /// Of x and w.
    pub(crate) scales: GemmScales,
    /// Is x stored as `[depth, rows]`, and w as `[depth, columns]`?
    pub(crate) by_depth: [bool; 2],
}

impl GemmShape {
    /// Does cuBLASLt support it, given the alignment of the operands?
    pub(crate) fn fits(&self) -> bool {
        let sixteen = |dtype| matches!(dtype, DType::BF16 | DType::F16);
        let aligned = |multiple| self.columns.is_multiple_of(multiple) && self.depth.is_multiple_of(multiple);
        if self.scales != GemmScales::None {
            // Tensor cores add 8-bit floats with fewer bits than f32 has: what is to be f32 is for others.
            let by_rows = self.by_depth == [false; 2];
            return by_rows && self.operands == DType::F8E4M3 && sixteen(self.result) && aligned(16) && self.depth > 0;
        }
        sixteen(self.operands)
            && (self.result == self.operands || self.result == DType::F32)
            && aligned(8)
            && (!self.by_depth[0] || self.rows.is_multiple_of(8))
            && self.depth > 0
    }

    /// Rows for which an algorithm is measured; for others the library's first guess is taken.
    pub(crate) fn is_measured(&self) -> bool {
        self.rows.is_multiple_of(64)
    }

    /// The key under which its algorithm is stored on disk.
    pub(crate) fn key(&self) -> String {
        let Self { rows, columns, depth, operands, result, added, biased, activation, scales, by_depth } = self;
        let biased = if *biased { ", biased" } else { "" };
        let activation = match activation {
            GemmActivation::None => "",
            GemmActivation::Gelu => ", gelu",
            GemmActivation::GeluAux => ", gelu with its input",
            GemmActivation::GeluBackward => ", gelu backward",
        };
        let scales = match scales {
            GemmScales::None => "",
            GemmScales::Tensor => ", scaled",
            GemmScales::Gradient => ", scaled, x of e5m2",
            GemmScales::Rows => ", scaled by rows",
        };
        let turned = match by_depth {
            [false, false] => "",
            [true, false] => ", x by depth",
            [false, true] => ", w by depth",
            [true, true] => ", both by depth",
        };
        format!(
            "cublasLt Shape {{ rows: {rows}, columns: {columns}, depth: {depth}, operands: {operands:?}, \
             result: {result:?}, added: {added}{biased}{activation}{scales}{turned} }}"
        )
    }
}

/// `cublasLtMatmulAlgo_t`.
type Algorithm = [u64; 8];

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct GemmHeuristic {
    algorithm: Algorithm,
    workspace: usize,
    state: Code,
    waves: f32,
    reserved: [c_int; 4],
}

macro_rules! functions {
    ($($field:ident = $symbol:literal ($($arg:ty),*);)*) => {
        /// The library's functions.
        struct Functions {
            $($field: unsafe extern "C" fn($($arg),*) -> Code,)*
            version: unsafe extern "C" fn() -> usize,
            _library: Library,
        }

        impl Functions {
            fn open(path: &Path) -> Result<Self> {
                let missing = |e: libloading::Error| failed(format!("cannot open {}: {e}", path.display()));
                // SAFETY: NVIDIA's library, whose loading runs nothing that Rust relies on being otherwise.
                let library = unsafe { Library::new(path) }.map_err(missing)?;
                Ok(Self {
                    $($field: {
                        // SAFETY: the type is that of the function in NVIDIA's documentation of this symbol.
                        *unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> Code>($symbol) }.map_err(missing)?
                    },)*
                    // SAFETY: as above.
                    version: *unsafe { library.get(b"cublasLtGetVersion") }.map_err(missing)?,
                    _library: library,
                })
            }
        }
    };
}

functions! {
    create = b"cublasLtCreate" (*mut Handle);
    destroy = b"cublasLtDestroy" (Handle);
    desc_create = b"cublasLtMatmulDescCreate" (*mut Handle, c_int, c_int);
    desc_set = b"cublasLtMatmulDescSetAttribute" (Handle, c_int, *const c_void, usize);
    desc_destroy = b"cublasLtMatmulDescDestroy" (Handle);
    layout_create = b"cublasLtMatrixLayoutCreate" (*mut Handle, c_int, u64, u64, i64);
    layout_destroy = b"cublasLtMatrixLayoutDestroy" (Handle);
    wish_create = b"cublasLtMatmulPreferenceCreate" (*mut Handle);
    wish_set = b"cublasLtMatmulPreferenceSetAttribute" (Handle, c_int, *const c_void, usize);
    wish_destroy = b"cublasLtMatmulPreferenceDestroy" (Handle);
    guess = b"cublasLtMatmulAlgoGetHeuristic" (
        Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut GemmHeuristic, *mut c_int
    );
    matmul = b"cublasLtMatmul" (
        Handle, Handle, *const c_void, Address, Handle, Address, Handle, *const c_void, Address, Handle, Address, Handle,
        *const Algorithm, Address, usize, Handle
    );
}

fn check(code: Code, what: &str) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(failed(format!("cuBLASLt cannot {what}: status {code}"))) }
}

/// The library with a handle of its own. All work goes to the stream that is given.
pub(crate) struct CublasLt {
    functions: Functions,
    handle: Handle,
    chosen: Mutex<HashMap<GemmShape, (Algorithm, usize)>>,
}

// SAFETY: NVIDIA documents handles of cuBLASLt as usable from several threads at a time.
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: from `create`, destroyed once.
        unsafe { (self.functions.destroy)(self.handle) };
    }
}

/// Operands of a product.
#[derive(Clone, Copy)]
pub(crate) struct GemmOperands {
    pub(crate) x: Address,
    pub(crate) w: Address,
    pub(crate) r: Address,
    pub(crate) y: Address,
    pub(crate) bias: Address,
    /// The pre-activations.
    pub(crate) aux: Address,
    /// Of x and of w, where the shape has them.
    pub(crate) scales: [Address; 2],
    pub(crate) workspace: Address,
}

/// Gives what an earlier process kept, or keeps what it is given.
pub(crate) type Kept<'a> = &'a dyn Fn(Option<&[u8]>) -> Option<Vec<u8>>;
/// Queues a product.
pub(crate) type Queued<'a> = &'a dyn Fn(GemmOperands, Handle) -> Result<()>;
/// Runs what it is given and tells its seconds, or nothing where that failed.
pub(crate) type Timed<'a> = dyn FnMut(Queued<'_>) -> Option<f64> + 'a;

impl CublasLt {
    /// Opens the library at `path`, in the context that this thread is in.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let functions = Functions::open(path)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle.
        check(unsafe { (functions.create)(&raw mut handle) }, "start")?;
        Ok(Self { functions, handle, chosen: Mutex::default() })
    }

    /// Its version, such as 130100.
    pub(crate) fn version(&self) -> usize {
        // SAFETY: gives a number.
        unsafe { (self.functions.version)() }
    }

    /// The product of `shape` by the algorithm that was chosen for it. `kept` gives and takes what was chosen by an
    /// earlier process; `time` runs a product and tells its seconds, or nothing where it failed.
    pub(crate) fn product(&self, shape: GemmShape, kept: Kept<'_>, time: &mut Timed<'_>) -> Result<CublasProduct> {
        let mut product = CublasProduct::new(self, shape)?;
        let mut chosen = self.chosen.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((algorithm, workspace)) = chosen.get(&shape).copied().or_else(|| decode(&kept(None)?)) {
            (product.algorithm, product.workspace) = (algorithm, workspace);
            return Ok(product);
        }
        let guesses = product.guesses(self)?;
        let Some(first) = guesses.first() else {
            return Err(failed(format!("cuBLASLt has no algorithm for {shape:?}")));
        };
        (product.algorithm, product.workspace) = (first.algorithm, first.workspace);
        if shape.is_measured() {
            let mut best = f64::INFINITY;
            let mut winner = (first.algorithm, first.workspace);
            for guess in &guesses {
                (product.algorithm, product.workspace) = (guess.algorithm, guess.workspace);
                // SAFETY: `time` gives operands of the shape's sizes.
                let run = |operands, stream| unsafe { product.queue(self, operands, stream) };
                if let Some(seconds) = time(&run).filter(|s| *s < best) {
                    (best, winner) = (seconds, (guess.algorithm, guess.workspace));
                }
            }
            (product.algorithm, product.workspace) = winner;
            kept(Some(&encode(winner)));
        }
        chosen.insert(shape, (product.algorithm, product.workspace));
        Ok(product)
    }
}

/// Bytes of an algorithm as it is kept.
pub(crate) const KEPT: usize = 72;

fn encode((algorithm, workspace): (Algorithm, usize)) -> Vec<u8> {
    algorithm.iter().chain([&(workspace as u64)]).flat_map(|word| word.to_le_bytes()).collect()
}

fn decode(bytes: &[u8]) -> Option<(Algorithm, usize)> {
    let words: Vec<u64> = bytes.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
    let (algorithm, rest) = words.split_first_chunk()?;
    let workspace = usize::try_from(*rest.first()?).ok().filter(|n| *n <= WORKSPACE)?;
    (bytes.len() == KEPT).then_some((*algorithm, workspace))
}

/// A product ready to be queued.
pub(crate) struct CublasProduct {
    desc: Handle,
    /// Of w, x and y, as matrices by columns.
    layouts: [Handle; 3],
    destroy: [unsafe extern "C" fn(Handle) -> Code; 2],
    added: bool,
    biased: bool,
    activation: GemmActivation,
    scales: GemmScales,
    set: unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Code,
    algorithm: Algorithm,
    workspace: usize,
}

// SAFETY: descriptions that only their owner changes, by the addresses of scales when it queues the product.
unsafe impl Send for CublasProduct {}

impl Drop for CublasProduct {
    fn drop(&mut self) {
        for layout in self.layouts.into_iter().filter(|l| !l.is_null()) {
            // SAFETY: made by `new`, destroyed once.
            unsafe { (self.destroy[1])(layout) };
        }
        if !self.desc.is_null() {
            // SAFETY: as above.
            unsafe { (self.destroy[0])(self.desc) };
        }
    }
}

/// `cudaDataType_t`.
fn data_type(dtype: DType) -> c_int {
    match dtype {
        DType::F16 => 2,
        DType::BF16 => 14,
        DType::F8E4M3 => 28,
        DType::F8E5M2 => 29,
        _ => 0,
    }
}

impl CublasProduct {
    /// Its algorithm, as it is kept.
    pub(crate) fn kept(&self) -> Vec<u8> {
        encode((self.algorithm, self.workspace))
    }

    fn new(lt: &CublasLt, shape: GemmShape) -> Result<Self> {
        // CUBLAS_COMPUTE_32F, CUDA_R_32F, CUBLASLT_MATMUL_DESC_TRANSA and _TRANSB; CUBLAS_OP_T is 1
        const COMPUTE_F32: c_int = 68;
        const SCALE_F32: c_int = 0;
        const TRANSPOSES: [c_int; 2] = [3, 4];
        let f = &lt.functions;
        let mut made = Self {
            desc: std::ptr::null_mut(),
            layouts: [std::ptr::null_mut(); 3],
            destroy: [f.desc_destroy, f.layout_destroy],
            added: shape.added,
            biased: shape.biased,
            activation: shape.activation,
            scales: shape.scales,
            set: f.desc_set,
            algorithm: [0; 8],
            workspace: 0,
        };
        // SAFETY: writes one handle.
        check(unsafe { (f.desc_create)(&raw mut made.desc, COMPUTE_F32, SCALE_F32) }, "describe a product")?;
        // By columns y^T = w x^T, and w by rows lies there transposed, as does x by depth.
        let [x_by_depth, w_by_depth] = shape.by_depth;
        for (attribute, transposed) in TRANSPOSES.into_iter().zip([!w_by_depth, x_by_depth]) {
            made.describe(attribute, c_int::from(transposed))?;
        }
        if shape.scales == GemmScales::Rows {
            // CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_DESC_B_SCALE_MODE
            const SCALE_MODES: [c_int; 2] = [31, 32];
            // CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F
            const OUTER: c_int = 3;
            // Libraries that do not know it refuse it.
            SCALE_MODES.into_iter().try_for_each(|mode| made.describe(mode, OUTER))?;
        }
        // CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_GELU, CUBLASLT_EPILOGUE_GELU_AUX, CUBLASLT_EPILOGUE_DGELU; CUBLASLT_EPILOGUE_BIAS
        let activation: c_int = match shape.activation {
            GemmActivation::None => 1,
            GemmActivation::Gelu => 32,
            GemmActivation::GeluAux => 32 | 128,
            GemmActivation::GeluBackward => 64 | 128,
        };
        let bias: c_int = if shape.biased { 4 } else { 0 };
        if shape.biased || shape.activation != GemmActivation::None {
            // CUBLASLT_MATMUL_DESC_EPILOGUE
            const EPILOGUE: c_int = 7;
            // Without an activation the bias is the whole of it.
            made.describe(EPILOGUE, if bias > 0 && activation == 1 { bias } else { activation | bias })?;
        }
        if shape.activation.has_aux() {
            // CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD
            const LEADING: c_int = 12;
            made.describe(LEADING, shape.columns as i64)?;
        }
        // What is asked for an algorithm looks whether there are scales, a bias and a further matrix, and not at them.
        made.point([ALIGNED as Address; 2], ALIGNED as Address, ALIGNED as Address)?;
        let (m, n, k) = (shape.rows as u64, shape.columns as u64, shape.depth as u64);
        let turned = |by_depth: bool, lines: u64| if by_depth { (lines, k) } else { (k, lines) };
        let (w, x) = (turned(w_by_depth, n), turned(x_by_depth, m));
        let of_x = if shape.scales == GemmScales::Gradient { DType::F8E5M2 } else { shape.operands };
        let [w, x, y] = [(shape.operands, w.0, w.1), (of_x, x.0, x.1), (shape.result, n, m)];
        for (layout, (dtype, rows, columns)) in made.layouts.iter_mut().zip([w, x, y]) {
            // SAFETY: writes one handle.
            let code = unsafe { (f.layout_create)(layout, data_type(dtype), rows, columns, rows as i64) };
            check(code, "describe a matrix")?;
        }
        Ok(made)
    }

    /// Says where the scales of x and of w, the bias and the pre-activations are, if the product has some.
    fn point(&self, [x, w]: [Address; 2], bias: Address, aux: Address) -> Result<()> {
        // CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER
        const AUX: c_int = 11;
        if self.activation.has_aux() {
            self.describe(AUX, aux)?;
        }
        // CUBLASLT_MATMUL_DESC_BIAS_POINTER
        const BIAS: c_int = 8;
        if self.biased {
            self.describe(BIAS, bias)?;
        }
        // CUBLASLT_MATMUL_DESC_A_SCALE_POINTER and _B_: by columns the first operand is w.
        const SCALES: [c_int; 2] = [17, 18];
        if self.scales == GemmScales::None {
            return Ok(());
        }
        SCALES.into_iter().zip([w, x]).try_for_each(|(attribute, address)| self.describe(attribute, address))
    }

    /// Sets an attribute of the description, a 32-bit number or an address of 64 bits.
    fn describe<T: Copy>(&self, attribute: c_int, value: T) -> Result<()> {
        // SAFETY: the library reads as many bytes as it is told, and refuses another size than the attribute's.
        let code = unsafe { (self.set)(self.desc, attribute, (&raw const value).cast(), size_of::<T>()) };
        check(code, "describe a product")
    }

    /// What the library thinks quickest, the best first.
    fn guesses(&self, lt: &CublasLt) -> Result<Vec<GemmHeuristic>> {
        const MAX_WORKSPACE: c_int = 1;
        const REDUCTIONS: c_int = 3;
        const MIN_ALIGNMENTS: [c_int; 4] = [5, 6, 7, 8];
        // CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: parts of a split sum are added in f32, in an order of their own.
        let in_f32: u32 = 2;
        let f = &lt.functions;
        let what = "choose an algorithm";
        let mut wish = std::ptr::null_mut();
        // SAFETY: writes one handle.
        check(unsafe { (f.wish_create)(&raw mut wish) }, what)?;
        let bytes = WORKSPACE as u64;
        // SAFETY: the attribute is one 64-bit number.
        let mut code = unsafe { (f.wish_set)(wish, MAX_WORKSPACE, (&raw const bytes).cast(), 8) };
        let aligned = ALIGNED as u32;
        for attribute in MIN_ALIGNMENTS {
            // SAFETY: the attribute is one 32-bit number.
            code |= unsafe { (f.wish_set)(wish, attribute, (&raw const aligned).cast(), 4) };
        }
        // SAFETY: as above.
        code |= unsafe { (f.wish_set)(wish, REDUCTIONS, (&raw const in_f32).cast(), 4) };
        let mut guesses = [GemmHeuristic::default(); MAX_ALGORITHMS];
        let mut count = 0;
        if code == 0 {
            let [w, x, y] = self.layouts;
            let most = MAX_ALGORITHMS as c_int;
            let (out, count) = (guesses.as_mut_ptr(), &raw mut count);
            // SAFETY: descriptions that live, room for as many results as are asked for, and one number.
            code = unsafe { (f.guess)(lt.handle, self.desc, w, x, y, y, wish, most, out, count) };
        }
        // SAFETY: made above, destroyed once.
        unsafe { (f.wish_destroy)(wish) };
        check(code, what)?;
        Ok(guesses[..count.clamp(0, MAX_ALGORITHMS as c_int) as usize]
            .iter()
            .filter(|g| g.state == 0)
            .copied()
            .collect())
    }

    /// Queues the product.
    ///
    /// # Safety
    /// The operands are memory of the shape's sizes, aligned to [`ALIGNED`], and the workspace is [`WORKSPACE`] bytes;
    /// all outlive the run.
    pub(crate) unsafe fn queue(&self, lt: &CublasLt, of: GemmOperands, stream: Handle) -> Result<()> {
        let [w, x, y] = self.layouts;
        let (alpha, beta) = (1.0f32, f32::from(u8::from(self.added)));
        let (alpha, beta): (*const c_void, *const c_void) = ((&raw const alpha).cast(), (&raw const beta).cast());
        let r = if self.added { of.r } else { of.y };
        self.point(of.scales, of.bias, of.aux)?;
        // SAFETY: by the caller's promise; scalars are read before the call returns.
        let code = unsafe {
            (lt.functions.matmul)(
                lt.handle,
                self.desc,
                alpha,
                of.w,
                w,
                of.x,
                x,
                beta,
                r,
                y,
                of.y,
                y,
                &raw const self.algorithm,
                of.workspace,
                self.workspace,
                stream,
            )
        };
        check(code, "multiply matrices")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kept_choice_is_read_as_it_was_written_and_nothing_else_is() {
        let choice = ([1, 2, 3, 4, 5, 6, 7, u64::MAX], 4096);
        let bytes = encode(choice);
        assert_eq!(decode(&bytes), Some(choice));
        assert_eq!(decode(&bytes[..71]), None);
        assert_eq!(decode(&[&bytes[..], &[0]].concat()), None);
        assert_eq!(decode(&encode(([0; 8], WORKSPACE + 1))), None);
    }

    #[test]
    fn odd_extents_and_other_dtypes_are_left_to_other_kernels() {
        let shape = GemmShape {
            rows: 17,
            columns: 64,
            depth: 32,
            operands: DType::BF16,
            result: DType::BF16,
            added: false,
            biased: false,
            activation: GemmActivation::None,
            scales: GemmScales::None,
            by_depth: [false; 2],
        };
        let scaled = GemmShape { operands: DType::F8E4M3, scales: GemmScales::Tensor, ..shape };
        assert!(scaled.fits() && GemmShape { scales: GemmScales::Rows, result: DType::F16, ..scaled }.fits());
        assert!(!GemmShape { columns: 72, ..scaled }.fits() && !GemmShape { result: DType::F32, ..scaled }.fits());
        assert!(!GemmShape { scales: GemmScales::None, ..scaled }.fits());
        assert!(!GemmShape { scales: GemmScales::Tensor, ..shape }.fits());
        assert!(shape.fits() && GemmShape { result: DType::F32, ..shape }.fits());
        assert!(!GemmShape { columns: 63, ..shape }.fits());
        assert!(!GemmShape { depth: 36, ..shape }.fits());
        assert!(!GemmShape { operands: DType::F32, ..shape }.fits());
        assert!(!GemmShape { result: DType::F16, ..shape }.fits());
    }
}
