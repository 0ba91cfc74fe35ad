//! The list of the tensors of a weight, and containers with one value per tensor.

use std::fmt;

use super::ScaleDtype;

/// One of the tensors of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightTensor {
    /// The packed values.
    Qweight,
    /// The places of the kept values of a 2:4 weight; absent where it is dense.
    Metadata,
    /// The scales of the groups.
    Scales,
    /// The packed zero points of the groups; absent if symmetric.
    ZeroPoints,
    /// The natural row of each stored row; absent if rows are in their natural order.
    RowPermutation,
}

impl WeightTensor {
    /// Returns the name of the tensor in records and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Qweight => "qweight",
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

/// A container with one value for each tensor of a weight, such as a shape, a buffer or a
/// parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WeightTensors<T> {
    /// The value for the packed values.
    pub qweight: T,
    /// The value for the places of kept values.
    pub metadata: Option<T>,
    /// The value for the scales.
    pub scales: T,
    /// The value for the packed zero points.
    pub zero_points: Option<T>,
    /// The value for the row permutation.
    pub row_permutation: Option<T>,
}

impl<T> WeightTensors<T> {
    /// Returns an iterator over the tensors and their values, in the order of the fields.
    pub fn iter(&self) -> impl Iterator<Item = (WeightTensor, &T)> {
        self.as_ref().into_iter()
    }

    /// Returns references to the values.
    pub fn as_ref(&self) -> WeightTensors<&T> {
        let Self {
            qweight,
            metadata,
            scales,
            zero_points,
            row_permutation,
        } = self;
        WeightTensors {
            qweight,
            metadata: metadata.as_ref(),
            scales,
            zero_points: zero_points.as_ref(),
            row_permutation: row_permutation.as_ref(),
        }
    }

    /// Returns the value of a tensor, or `None` if the weight has no such tensor.
    pub fn get(&self, tensor: WeightTensor) -> Option<&T> {
        self.iter()
            .find_map(|(other, value)| (other == tensor).then_some(value))
    }

    /// Applies a function to every value.
    pub fn map<U>(self, mut function: impl FnMut(WeightTensor, T) -> U) -> WeightTensors<U> {
        let Ok(mapped) = self
            .try_map(|tensor, value| Ok::<_, std::convert::Infallible>(function(tensor, value)));
        mapped
    }

    /// Applies a fallible function to every value.
    ///
    /// # Errors
    /// The first error that the function returns.
    pub fn try_map<U, E>(
        self,
        mut function: impl FnMut(WeightTensor, T) -> Result<U, E>,
    ) -> Result<WeightTensors<U>, E> {
        let Self {
            qweight,
            metadata,
            scales,
            zero_points,
            row_permutation,
        } = self;
        Ok(WeightTensors {
            qweight: function(WeightTensor::Qweight, qweight)?,
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
            qweight,
            metadata,
            scales,
            zero_points,
            row_permutation,
        } = self;
        [
            Some((WeightTensor::Qweight, qweight)),
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
    /// Unsigned 32-bit words.
    Words,
    /// The dtype of scales.
    Scale(ScaleDtype),
}

/// The shape and dtype of one tensor of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TensorDescriptor {
    shape: [usize; 2],
    rank: usize,
    /// The dtype of the tensor.
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

    /// Returns the extents of the tensor: two for a matrix, one for a vector.
    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// Returns the extents of the tensor as a matrix. The second extent of a vector is 1.
    pub fn matrix_shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Returns the total number of elements.
    pub fn elements(&self) -> usize {
        self.shape[0].saturating_mul(self.shape[1])
    }
}
