//! The available memory of the host.

use sysinfo::{MemoryRefreshKind, RefreshKind, System};

/// Returns the bytes of memory that the process can still allocate without taking memory from other
/// processes. This is the minimum over the host and the control group of the process. `None` if the
/// system does not report its memory.
pub fn available_memory() -> Option<usize> {
    let system = System::new_with_specifics(
        RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram()),
    );
    let machine = Some(system.available_memory()).filter(|&bytes| bytes > 0);
    let group = system.cgroup_limits().map(|limits| limits.free_memory);
    let bytes = machine.into_iter().chain(group).min()?;
    Some(usize::try_from(bytes).unwrap_or(usize::MAX))
}

/// Returns the available memory in bytes if it is less than `needed`, or `None` if `needed` bytes
/// fit. A request of one GiB or less always counts as fitting, because a query of the system takes
/// time.
pub fn memory_short_of(needed: usize) -> Option<usize> {
    if needed <= 1 << 30 {
        None
    } else {
        available_memory().filter(|&available| available < needed)
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn there_is_memory_and_not_without_end() {
        if let Some(bytes) = super::available_memory() {
            assert!((1 << 20..1 << 50).contains(&bytes), "{bytes}");
        }
    }
}
