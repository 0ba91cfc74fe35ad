//! The tensors of a weight: which there are, and a value, or a shape and dtype, for each.

use std::fmt;

use super::ScaleDtype;

/// One of the tensors of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightTensor {
    /// The packed values.
    Words,
    /// The places of the kept values of a 2:4 weight; absent where it is dense.
    Metadata,
    /// The scales of the groups.
    Scales,
    /// The packed zero points of the groups; absent where symmetric.
    ZeroPoints,
    /// The natural row of each stored row; absent where rows are in order.
    RowPermutation,
}

impl WeightTensor {
    /// The name in records and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Words => "words",
            Self::Metadata => "metadata",
            Self::Scales => "scales",
            Self::ZeroPoints => "zero_points",
            Self::RowPermutation => "row_permutation",
        }
    }
}

impl fmt::Display for WeightTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One value for each tensor of a weight: its shape, its buffer, its parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WeightTensors<T> {
    /// Of the packed values.
    pub words: T,
    /// Of the places of kept values.
    pub metadata: Option<T>,
    /// Of the scales.
    pub scales: T,
    /// Of the packed zero points.
    pub zero_points: Option<T>,
    /// Of the row permutation.
    pub row_permutation: Option<T>,
}

impl<T> WeightTensors<T> {
    /// The values with their tensors, in the order of the fields.
    pub fn iter(&self) -> impl Iterator<Item = (WeightTensor, &T)> {
        self.as_ref().into_iter()
    }

    /// References to the values.
    pub fn as_ref(&self) -> WeightTensors<&T> {
        let Self {
            words,
            metadata,
            scales,
            zero_points,
            row_permutation,
        } = self;
        WeightTensors {
            words,
            metadata: metadata.as_ref(),
            scales,
            zero_points: zero_points.as_ref(),
            row_permutation: row_permutation.as_ref(),
        }
    }

    /// The value of a tensor; `None` if the weight has no such tensor.
    pub fn get(&self, tensor: WeightTensor) -> Option<&T> {
        self.iter()
            .find_map(|(other, value)| (other == tensor).then_some(value))
    }

    /// The values that a function makes of these.
    pub fn map<U>(self, mut function: impl FnMut(WeightTensor, T) -> U) -> WeightTensors<U> {
        let Ok(mapped) = self
            .try_map(|tensor, value| Ok::<_, std::convert::Infallible>(function(tensor, value)));
        mapped
    }

    /// The values that a function makes of these.
    ///
    /// # Errors
    /// The first error of the function.
    pub fn try_map<U, E>(
        self,
        mut function: impl FnMut(WeightTensor, T) -> Result<U, E>,
    ) -> Result<WeightTensors<U>, E> {
        let Self {
            words,
            metadata,
            scales,
            zero_points,
            row_permutation,
        } = self;
        Ok(WeightTensors {
            words: function(WeightTensor::Words, words)?,
            metadata: metadata
                .map(|value| function(WeightTensor::Metadata, value))
                .transpose()?,
            scales: function(WeightTensor::Scales, scales)?,
            zero_points: zero_points
                .map(|value| function(WeightTensor::ZeroPoints, value))
                .transpose()?,
            row_permutation: row_permutation
                .map(|value| function(WeightTensor::RowPermutation, value))
                .transpose()?,
        })
    }
}

impl<T> IntoIterator for WeightTensors<T> {
    type Item = (WeightTensor, T);
    type IntoIter = std::iter::Flatten<std::array::IntoIter<Option<(WeightTensor, T)>, 5>>;

    fn into_iter(self) -> Self::IntoIter {
        let Self {
            words,
            metadata,
            scales,
            zero_points,
            row_permutation,
        } = self;
        [
            Some((WeightTensor::Words, words)),
            metadata.map(|value| (WeightTensor::Metadata, value)),
            Some((WeightTensor::Scales, scales)),
            zero_points.map(|value| (WeightTensor::ZeroPoints, value)),
            row_permutation.map(|value| (WeightTensor::RowPermutation, value)),
        ]
        .into_iter()
        .flatten()
    }
}

/// The dtype of a tensor of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TensorDtype {
    /// 32-bit words, of no sign.
    Words,
    /// The dtype of scales.
    Scale(ScaleDtype),
}

/// Shape and dtype of one tensor of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TensorDescriptor {
    shape: [usize; 2],
    rank: usize,
    /// The dtype.
    pub dtype: TensorDtype,
}

impl TensorDescriptor {
    pub(super) const fn matrix(shape: [usize; 2], dtype: TensorDtype) -> Self {
        Self {
            shape,
            rank: 2,
            dtype,
        }
    }

    pub(super) const fn vector(length: usize, dtype: TensorDtype) -> Self {
        Self {
            shape: [length, 1],
            rank: 1,
            dtype,
        }
    }

    /// The extents: two, or one of a vector.
    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// The extents, with a 1 after that of a vector.
    pub fn matrix_shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Elements in all.
    pub fn elements(&self) -> usize {
        self.shape[0].saturating_mul(self.shape[1])
    }
}
