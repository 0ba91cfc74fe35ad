//! The digest of a kernel's CUDA text.

use super::KernelSource;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fmt::Write;

/// The text that marks the first line of the kernel, after the declarations that the kernel uses.
const KERNEL: &str = "__global__";

impl KernelSource {
    /// Returns the digest of the text, as 32 hexadecimal digits. Two texts with the same digest are
    /// compiled to the same machine code.
    ///
    /// The digest does not depend on the names of the kernel and of its variables, nor on the order
    /// of the declarations before the kernel. CubeCL's numbering of shared memory and its order of
    /// declarations differ from run to run. The digest depends on the order of the kernel's
    /// statements.
    pub fn digest(&self) -> String {
        let text = self.text.replace(&self.entry, "kernel");
        let lines: Vec<&str> = text
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty())
            .collect();
        let start = lines
            .iter()
            .position(|line| line.contains(KERNEL))
            .unwrap_or(0);
        let (declarations, kernel) = lines.split_at(start);
        let mut declarations = declarations.to_vec();
        declarations.sort_unstable();
        let mut digest = Sha256::new();
        for line in declarations {
            digest.update(line);
            digest.update([0]);
        }
        digest.update(with_numbered_variables(&kernel.join("\n")));
        digest.update(self.shared_bytes.to_le_bytes());
        digest
            .finalize()
            .iter()
            .take(16)
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }
}

/// Renumbers the variables of a text in the order in which they first occur. CubeCL names a
/// variable `v` and a number, and what belongs to it by the same name between underscores, such as
/// `v7_store`.
fn with_numbered_variables(text: &str) -> String {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let (mut numbers, mut numbered) = (HashMap::new(), String::with_capacity(text.len()));
    let mut rest = text;
    while let Some(start) = rest.find(is_word) {
        let (before, from) = rest.split_at(start);
        let (word, after) = from.split_at(from.find(|c| !is_word(c)).unwrap_or(from.len()));
        numbered.push_str(before);
        for (i, part) in word.split('_').enumerate() {
            if i > 0 {
                numbered.push('_');
            }
            match part
                .strip_prefix('v')
                .filter(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
            {
                Some(number) => {
                    let next = numbers.len();
                    let _ = write!(numbered, "v{}", numbers.entry(number).or_insert(next));
                }
                None => numbered.push_str(part),
            }
        }
        rest = after;
    }
    numbered + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(entry: &str, text: &str) -> String {
        KernelSource {
            entry: entry.into(),
            shared_bytes: 0,
            text: text.into(),
        }
        .digest()
    }

    #[test]
    fn the_order_of_statements_counts_and_that_of_declarations_and_the_name_do_not() {
        let plain = digest(
            "first_0a",
            "#include <a>\n#include <b>\nextern \"C\" __global__ void first_0a() {\n  x = 1;\n  y = 2;\n}",
        );
        assert_eq!(
            plain,
            digest(
                "second_1b",
                "#include <b>\n#include <a>\nextern \"C\" __global__ void second_1b() {\n  x = 1;\n  y = 2;\n}"
            )
        );
        assert_ne!(
            plain,
            digest(
                "first_0a",
                "#include <a>\n#include <b>\nextern \"C\" __global__ void first_0a() {\n  y = 2;\n  x = 1;\n}"
            )
        );
    }

    #[test]
    fn the_numbers_of_variables_do_not_count_and_which_is_used_does() {
        assert_eq!(
            with_numbered_variables("v7 = v30 + u.v7[v1a] + vx(v30); // v"),
            "v0 = v1 + u.v0[v1a] + vx(v1); // v"
        );
        assert_eq!(
            with_numbered_variables("v9_store = info_v5.x; v9 = &v9_store; v5_ = _v9; dev1_v"),
            "v0_store = info_v1.x; v0 = &v0_store; v1_ = _v0; dev1_v"
        );
        let [one, other, swapped] = [
            "v1 = v2; v2 = v1;",
            "v9 = v3; v3 = v9;",
            "v1 = v2; v1 = v2;",
        ]
        .map(|body| {
            digest(
                "first_0a",
                &format!("extern \"C\" __global__ void first_0a() {{\n{body}\n}}"),
            )
        });
        assert!(one == other && one != swapped);
    }
}
