//! The memory of the machine.

use sysinfo::{MemoryRefreshKind, RefreshKind, System};

/// Bytes of memory that the process can still have without others losing theirs: of the machine, or
/// of its control group where that has fewer. `None` if the system does not report it.
pub fn available_memory() -> Option<usize> {
    let system = System::new_with_specifics(
        RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram()),
    );
    let machine = Some(system.available_memory()).filter(|&bytes| bytes > 0);
    let group = system.cgroup_limits().map(|limits| limits.free_memory);
    let bytes = machine.into_iter().chain(group).min()?;
    Some(usize::try_from(bytes).unwrap_or(usize::MAX))
}

/// The bytes of available memory if `needed` are more than that; `None` if they fit. A gigabyte or
/// less counts as fitting: to ask takes time.
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
