//! `griddepcontrol`: control of a kernel's dependency on the preceding kernel, from compute
//! capability 9.0 on ("Parallel Synchronization and Communication Instructions: griddepcontrol").

use cubecl::prelude::*;

/// `griddepcontrol.launch_dependents`: the next kernel may start once every block has executed this
/// instruction or has exited.
#[cube]
pub fn griddepcontrol_launch_dependents() {
    gpu_asm!("griddepcontrol.launch_dependents;");
}

/// `griddepcontrol.wait`: waits until the preceding kernels have ended and their writes are
/// visible.
#[cube]
pub fn griddepcontrol_wait() {
    gpu_asm!("griddepcontrol.wait;");
}
