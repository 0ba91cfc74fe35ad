//! NVIDIA's run-time compiler, loaded as a dynamic library.

use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::{null, null_mut};

type Program = *mut c_void;
type SizeOf = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type TextOf = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

/// An error of NVRTC.
#[derive(Debug, thiserror::Error)]
pub enum NvrtcError {
    /// The library cannot be loaded, or lacks a function.
    #[error("NVRTC cannot be loaded: {0}")]
    Load(#[from] libloading::Error),
    /// A call of NVRTC failed.
    #[error("{call} answered {status} where 0 is success{log}")]
    Call {
        /// The name of the NVRTC function.
        call: &'static str,
        /// The nvrtcResult of the call.
        status: c_int,
        /// The log of the compiler, on separate lines.
        log: String,
    },
    /// A text or an option has a zero byte, which no C string can contain.
    #[error("the text or an option for NVRTC holds a zero byte: {0}")]
    ZeroByte(#[from] std::ffi::NulError),
}

/// The functions of the library, and the library itself, which must stay loaded.
pub struct Nvrtc {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    log_size: SizeOf,
    log: TextOf,
    ptx_size: SizeOf,
    ptx: TextOf,
    _library: Library,
}

/// A program that is destroyed when it goes out of scope.
struct Scoped<'a> {
    program: Program,
    nvrtc: &'a Nvrtc,
}

impl Drop for Scoped<'_> {
    fn drop(&mut self) {
        // SAFETY: the program came from nvrtcCreateProgram and is destroyed once.
        unsafe { (self.nvrtc.destroy)(&mut self.program) };
    }
}

impl Nvrtc {
    /// Loads the library at `path`.
    pub fn load(path: &Path) -> Result<Self, NvrtcError> {
        // SAFETY: loading NVRTC only runs its initialisers; each symbol has the type that nvrtc.h
        // declares, and the library is kept.
        unsafe {
            let library = Library::new(path)?;
            Ok(Self {
                create: *library.get(c"nvrtcCreateProgram")?,
                compile: *library.get(c"nvrtcCompileProgram")?,
                destroy: *library.get(c"nvrtcDestroyProgram")?,
                log_size: *library.get(c"nvrtcGetProgramLogSize")?,
                log: *library.get(c"nvrtcGetProgramLog")?,
                ptx_size: *library.get(c"nvrtcGetPTXSize")?,
                ptx: *library.get(c"nvrtcGetPTX")?,
                _library: library,
            })
        }
    }

    /// Compiles a CUDA text to PTX.
    pub fn ptx(&self, text: &str, options: &[String]) -> Result<String, NvrtcError> {
        let text = CString::new(text)?;
        let options = options
            .iter()
            .map(|option| CString::new(option.as_str()))
            .collect::<Result<Vec<_>, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = null_mut();
        // SAFETY: the text outlives the program, which `scoped` destroys; there are no headers and
        // no name.
        let status =
            unsafe { (self.create)(&mut program, text.as_ptr(), null(), 0, null(), null()) };
        succeeded("nvrtcCreateProgram", status, String::new)?;
        let scoped = Scoped {
            program,
            nvrtc: self,
        };
        // SAFETY: the program is alive, and `pointers` has `pointers.len()` zero-terminated
        // strings.
        let status =
            unsafe { (self.compile)(scoped.program, pointers.len() as c_int, pointers.as_ptr()) };
        succeeded("nvrtcCompileProgram", status, || {
            match scoped.read("nvrtcGetProgramLog", self.log_size, self.log) {
                Ok(log) => format!("\n{log}"),
                Err(error) => format!(", and its log cannot be read: {error}"),
            }
        })?;
        scoped.read("nvrtcGetPTX", self.ptx_size, self.ptx)
    }
}

impl Scoped<'_> {
    /// Reads a text from NVRTC, after a call that returns its size.
    fn read(
        &self,
        call: &'static str,
        size_of: SizeOf,
        text_of: TextOf,
    ) -> Result<String, NvrtcError> {
        let mut size = 0;
        // SAFETY: the program is alive.
        let status = unsafe { size_of(self.program, &mut size) };
        succeeded(call, status, String::new)?;
        let mut text = vec![0u8; size];
        // SAFETY: the program is alive, and the buffer has the size that NVRTC asked for, the final
        // zero included.
        let status = unsafe { text_of(self.program, text.as_mut_ptr().cast()) };
        succeeded(call, status, String::new)?;
        Ok(CStr::from_bytes_until_nul(&text)
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned())
    }
}

fn succeeded(
    call: &'static str,
    status: c_int,
    log: impl FnOnce() -> String,
) -> Result<(), NvrtcError> {
    if status == 0 {
        Ok(())
    } else {
        Err(NvrtcError::Call {
            call,
            status,
            log: log(),
        })
    }
}
