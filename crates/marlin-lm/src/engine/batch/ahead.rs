//! Work before the steps that need it: kernels and recorded passes.

use std::time::Duration;

use marlin_nn::ahead::CompiledAhead;

use super::BatchEngine;

impl BatchEngine {
    /// Implements [`Engine::warm_up`](crate::Engine::warm_up).
    ///
    /// # Panics
    /// Panics if the engine has sequences.
    pub fn warm_up(&mut self, prompt_tokens: usize) -> Duration {
        assert!(
            self.sequences.iter().all(Option::is_none),
            "the engine has sequences"
        );
        self.stream
            .executes(|| self.executor.warm_up(prompt_tokens))
    }

    /// Compiles the kernels of all passes that the engine can run, on all cores, so that no step
    /// waits for a kernel. On devices other than CUDA it does nothing.
    ///
    /// CubeCL's cache on disk must be on; see
    /// [`Engine::compile_ahead`](crate::Engine::compile_ahead), which compiles fewer kernels.
    pub fn compile_all(&mut self) -> CompiledAhead {
        self.stream.executes(|| self.executor.compile_all())
    }

    /// Returns a number for the kernels that [`compile_all`](Self::compile_all) compiles; `None` if
    /// it compiles none. Engines of the same program and the same card with an equal number have
    /// the same kernels.
    pub fn kernel_set(&self) -> Option<u64> {
        self.stream.executes(|| self.executor.kernel_set())
    }

    /// Records a pass that the engine can run and has not recorded yet, so that no step waits for
    /// it; false if there is none, or if less than 1 GiB of the device's memory is free. Passes are
    /// recorded on CUDA, once the first was: before, and on other devices, the result is false. It
    /// takes up to tenths of a second.
    pub fn record_next(&mut self) -> bool {
        self.stream.executes(|| self.executor.record_next())
    }
}
