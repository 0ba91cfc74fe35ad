//! The scales of a weight, in one of three dtypes.

use half::{bf16, f16};

use super::{ScaleDtype, position};

/// Scales, `[G, N]` row-major: one for each group along K and each output feature.
#[derive(Debug, Clone, PartialEq)]
pub enum Scales {
    /// Scales in f16.
    F16(Vec<f16>),
    /// Scales in bf16.
    BF16(Vec<bf16>),
    /// Scales in f32.
    F32(Vec<f32>),
}

impl Scales {
    /// Rounds `values` to `dtype`, to nearest, ties to even. Values that are too large become
    /// infinite.
    pub fn from_f32(values: &[f32], dtype: ScaleDtype) -> Self {
        match dtype {
            ScaleDtype::F16 => {
                Self::F16(values.iter().map(|&value| f16::from_f32(value)).collect())
            }
            ScaleDtype::BF16 => {
                Self::BF16(values.iter().map(|&value| bf16::from_f32(value)).collect())
            }
            ScaleDtype::F32 => Self::F32(values.to_vec()),
        }
    }

    /// Returns the dtype of the scales.
    pub fn dtype(&self) -> ScaleDtype {
        match self {
            Self::F16(_) => ScaleDtype::F16,
            Self::BF16(_) => ScaleDtype::BF16,
            Self::F32(_) => ScaleDtype::F32,
        }
    }

    /// Returns the number of scales.
    pub fn len(&self) -> usize {
        match self {
            Self::F16(values) => values.len(),
            Self::BF16(values) => values.len(),
            Self::F32(values) => values.len(),
        }
    }

    /// Returns true if there are no scales.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns scale `index` of the row-major `[G, N]`, as f32.
    ///
    /// # Panics
    /// Panics if `index` is not below [`len`](Self::len).
    pub fn get(&self, index: usize) -> f32 {
        match self {
            Self::F16(values) => values[index].to_f32(),
            Self::BF16(values) => values[index].to_f32(),
            Self::F32(values) => values[index],
        }
    }

    /// Returns all scales in f32, which represents every scale dtype exactly.
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Self::F16(values) => values.iter().map(|value| value.to_f32()).collect(),
            Self::BF16(values) => values.iter().map(|value| value.to_f32()).collect(),
            Self::F32(values) => values.clone(),
        }
    }

    pub(super) fn first_not_finite(&self) -> Option<usize> {
        match self {
            Self::F16(values) => position(values, |value| !value.is_finite()),
            Self::BF16(values) => position(values, |value| !value.is_finite()),
            Self::F32(values) => position(values, |value| !value.is_finite()),
        }
    }

    /// Returns the scales as little-endian bytes.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::F16(values) => bytemuck::cast_slice(values),
            Self::BF16(values) => bytemuck::cast_slice(values),
            Self::F32(values) => bytemuck::cast_slice(values),
        }
    }
}
