//! NVRTC, NVIDIA's compiler as a library: CUDA C++ to machine code (NVRTC User Guide, 12.0 and later).

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;

use libloading::Library;
use ridge_hw::gpu::{self, Nvidia};
use ridge_runtime::Result;

use crate::error::device;
use crate::library;

type Code = c_int;
type ProgramHandle = *mut c_void;

/// The least version that is accepted.
const LEAST_VERSION: c_int = 12;

/// How every kernel is compiled: as it is written, without contraction to fused multiply-adds, since every op's result
/// is rounded before the next sees it. Kernels that want one say `fmaf`.
const OPTIONS: [&str; 3] = ["--std=c++17", "--fmad=false", "--ptxas-options=-v"];

macro_rules! functions {
    ($($field:ident = $symbol:literal ($($arg:ty),*);)*) => {
        /// The compiler.
        pub struct Nvrtc {
            $($field: unsafe extern "C" fn($($arg),*) -> Code,)*
            error_string: unsafe extern "C" fn(Code) -> *const c_char,
            version: (c_int, c_int),
            _library: Library,
            _builtins: Vec<Library>,
        }

        impl Nvrtc {
            /// Opens the library at `path`.
            ///
            /// # Errors
            /// When it cannot be opened, lacks a function, or is too old.
            pub fn open(path: &Path) -> Result<Self> {
                let failed = |e: libloading::Error| device(format!("cannot open {}: {e}", path.display()));
                let builtins = builtins(path);
                // SAFETY: the library runs no code at loading that could break what Rust relies on.
                let library = unsafe { Library::new(path) }.map_err(failed)?;
                let mut nvrtc = Self {
                    $($field: {
                        // SAFETY: the type is that of the function in NVIDIA's documentation of this symbol.
                        *unsafe { library.get::<unsafe extern "C" fn($($arg),*) -> Code>($symbol) }.map_err(failed)?
                    },)*
                    error_string: {
                        // SAFETY: as above.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn(Code) -> *const c_char>(b"nvrtcGetErrorString") };
                        *symbol.map_err(failed)?
                    },
                    version: (0, 0),
                    _library: library,
                    _builtins: builtins,
                };
                let (mut major, mut minor) = (0, 0);
                // SAFETY: writes two numbers.
                nvrtc.check(unsafe { (nvrtc.get_version)(&raw mut major, &raw mut minor) }, "read NVRTC's version")?;
                nvrtc.version = (major, minor);
                if major < LEAST_VERSION {
                    return Err(device(format!(
                        "{} is version {major}.{minor}, needs at least {LEAST_VERSION}.0; pip install nvidia-cuda-nvrtc",
                        path.display()
                    )));
                }
                Ok(nvrtc)
            }
        }
    };
}

functions! {
    get_version = b"nvrtcVersion" (*mut c_int, *mut c_int);
    create = b"nvrtcCreateProgram" (
        *mut ProgramHandle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
    );
    destroy = b"nvrtcDestroyProgram" (*mut ProgramHandle);
    run = b"nvrtcCompileProgram" (ProgramHandle, c_int, *const *const c_char);
    log_size = b"nvrtcGetProgramLogSize" (ProgramHandle, *mut usize);
    log = b"nvrtcGetProgramLog" (ProgramHandle, *mut c_char);
    cubin_size = b"nvrtcGetCUBINSize" (ProgramHandle, *mut usize);
    cubin = b"nvrtcGetCUBIN" (ProgramHandle, *mut c_char);
}

/// The part of NVRTC that it opens by its bare name, from the folder beside it: wheels lie where no loader looks, but
/// finds what is open already.
fn builtins(path: &Path) -> Vec<Library> {
    let beside = path.parent().map(std::fs::read_dir).into_iter().flatten().flatten().flatten();
    let named =
        |path: &Path| path.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with("libnvrtc-builtins.so."));
    // SAFETY: a library of data, which runs no code at loading.
    beside.map(|entry| entry.path()).filter(|p| named(p)).filter_map(|p| unsafe { Library::new(p) }.ok()).collect()
}

/// What a compilation gave.
pub struct CompiledSource {
    /// Machine code.
    pub cubin: Vec<u8>,
    /// What the compiler said, registers and spills included.
    pub log: String,
}

/// A program that is destroyed when it goes.
struct Owned<'a>(&'a Nvrtc, ProgramHandle);

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        // SAFETY: from `create`, destroyed once.
        unsafe { (self.0.destroy)(&raw mut self.1) };
    }
}

impl Nvrtc {
    /// Finds and opens the library, as [`Nvidia::detect`] finds it.
    ///
    /// # Errors
    /// When there is none, or it cannot be used; says what mends it.
    pub fn find(nvidia: &Nvidia) -> Result<Self> {
        Self::open(library::path(nvidia, gpu::Library::Nvrtc)?)
    }

    /// Its version, such as `13.0`, and how it is made to compile: what machine code depends on beside the source.
    pub(crate) fn identity(&self) -> String {
        format!("NVRTC {}.{} {}", self.version.0, self.version.1, OPTIONS.join(" "))
    }

    fn check(&self, code: Code, what: &str) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: a static string for any code.
        let why = unsafe { CStr::from_ptr((self.error_string)(code)) }.to_string_lossy().into_owned();
        Err(device(format!("cannot {what}: {why}")))
    }

    /// Compiles `source` for an architecture such as `sm_90a`.
    ///
    /// # Errors
    /// When it does not compile, with the compiler's log.
    pub fn compile(&self, name: &str, source: &str, arch: &str) -> Result<CompiledSource> {
        let text = |s: &str| CString::new(s).map_err(|_| device(format!("{name} holds a zero byte")));
        let (source, file) = (text(source)?, text(&format!("{name}.cu"))?);
        let mut program = std::ptr::null_mut();
        let none = std::ptr::null();
        // SAFETY: strings that end with 0, and no headers.
        let code = unsafe { (self.create)(&raw mut program, source.as_ptr(), file.as_ptr(), 0, none, none) };
        self.check(code, "start NVRTC")?;
        let program = Owned(self, program);
        let options = OPTIONS.iter().map(|o| text(o)).chain([text(&format!("--gpu-architecture={arch}"))]);
        let options = options.collect::<Result<Vec<_>>>()?;
        let options: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: as many strings as it is told.
        let outcome = unsafe { (self.run)(program.1, options.len() as c_int, options.as_ptr()) };
        let log = self.bytes(program.1, self.log_size, self.log, "read NVRTC's log")?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
        if outcome != 0 {
            return Err(device(format!("kernel {name} does not compile for {arch}: {log}")));
        }
        Ok(CompiledSource { cubin: self.bytes(program.1, self.cubin_size, self.cubin, "read machine code")?, log })
    }

    fn bytes(
        &self,
        program: ProgramHandle,
        size: unsafe extern "C" fn(ProgramHandle, *mut usize) -> Code,
        get: unsafe extern "C" fn(ProgramHandle, *mut c_char) -> Code,
        what: &str,
    ) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: writes one number.
        self.check(unsafe { size(program, &raw mut bytes) }, what)?;
        let mut out = vec![0u8; bytes];
        // SAFETY: room for as many bytes as it said.
        self.check(unsafe { get(program, out.as_mut_ptr().cast()) }, what)?;
        Ok(out)
    }
}
