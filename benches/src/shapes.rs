//! The shapes to time.

use crate::BenchError;

/// A weight's name and shape [K, N].
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub name: &'static str,
    pub k: usize,
    pub n: usize,
}

const fn shape(name: &'static str, k: usize, n: usize) -> Shape {
    Shape { name, k, n }
}

/// The linear layers of Llama 2 7B, Llama 3 8B and Llama 2 70B, and one large shape. As in
/// inference engines, q, k and v are one layer, and gate and up are one layer.
const SHAPES: [Shape; 12] = [
    shape("7b.qkv", 4096, 12288),
    shape("7b.o", 4096, 4096),
    shape("7b.gate_up", 4096, 22016),
    shape("7b.down", 11008, 4096),
    shape("8b.qkv", 4096, 6144),
    shape("8b.gate_up", 4096, 28672),
    shape("8b.down", 14336, 4096),
    shape("70b.qkv", 8192, 10240),
    shape("70b.o", 8192, 8192),
    shape("70b.gate_up", 8192, 57344),
    shape("70b.down", 28672, 8192),
    shape("ideal", 18432, 73728),
];

/// The numbers of rows of activations that are timed by default.
pub const ROWS: [usize; 13] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096];

/// Returns the shapes with the given names; all shapes if there are no names.
pub fn named(names: &[String]) -> Result<Vec<Shape>, BenchError> {
    if names.is_empty() {
        return Ok(SHAPES.to_vec());
    }
    let find = |name: &String| {
        SHAPES
            .into_iter()
            .find(|shape| shape.name == name)
            .ok_or_else(|| BenchError::Shape(name.clone()))
    };
    names.iter().map(find).collect()
}

/// Returns the names of all shapes, for a message.
pub fn names() -> String {
    SHAPES.map(|shape| shape.name).join(", ")
}
