//! The digest of a kernel's CUDA text.

use super::Source;
use sha2::{Digest, Sha256};

/// The line on which the kernel starts, after the declarations that it uses.
const KERNEL: &str = "__global__";

impl Source {
    /// The digest of the text, in 32 hexadecimal digits: two texts of one digest are compiled to the same machine code.
    ///
    /// The kernel's name does not change it. The declarations before the kernel are sorted, as CubeCL writes them in an order that changes from run to run;
    /// of the kernel itself the order counts.
    pub fn digest(&self) -> String {
        let text = self.text.replace(&self.entry, "kernel");
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let start = lines.iter().position(|line| line.contains(KERNEL)).unwrap_or(0);
        let (declarations, kernel) = lines.split_at(start);
        let mut declarations = declarations.to_vec();
        declarations.sort_unstable();
        let mut digest = Sha256::new();
        for line in declarations.iter().chain(kernel) {
            digest.update(line);
            digest.update([0]);
        }
        digest.update(self.shared_bytes.to_le_bytes());
        digest.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(entry: &str, text: &str) -> String {
        Source { entry: entry.into(), shared_bytes: 0, text: text.into() }.digest()
    }

    #[test]
    fn the_order_of_statements_counts_and_that_of_declarations_and_the_name_do_not() {
        let plain = digest("f", "#include <a>\n#include <b>\nextern \"C\" __global__ void f() {\n  x = 1;\n  y = 2;\n}");
        assert_eq!(plain, digest("g", "#include <b>\n#include <a>\nextern \"C\" __global__ void g() {\n  x = 1;\n  y = 2;\n}"));
        assert_ne!(plain, digest("f", "#include <a>\n#include <b>\nextern \"C\" __global__ void f() {\n  y = 2;\n  x = 1;\n}"));
    }
}
