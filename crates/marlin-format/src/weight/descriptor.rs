//! The description of a weight without its values: the shapes and dtypes of its tensors. Files,
//! records, devices and kernels all use this one definition.

use std::fmt;

use super::{QuantSpec, Sparsity, TensorDescriptor, TensorDtype, WeightFormat, WeightTensors};
use crate::FormatError;
use crate::layout::{
    MarlinLayout, MetadataLayout, PlainLayout, ScaleLayout, SparseLayout, TileExtents, ZeroLayout,
};

/// The layout in which a device holds a weight `[K, N]`, which is the layout that the kernel reads.
///
/// In the tables, "up" means rounded up.
///
/// | tensor | plain | tile |
/// |---|---|---|
/// | words | [K/8 up, N up to a multiple of 8], [`PlainLayout`]; 8 bits: K/4 up | [K/16, 2N], 8 bits: [K/8, 2N], both padded to 64, [`MarlinLayout`] |
/// | scales | [G, N] | [G, N], both padded, [`ScaleLayout`] |
/// | zero points, as many per word as weights | [G, N/8 up]; 8 bits: N/4 up | [G, N/8], 8 bits: [G, N/4], both padded, [`ZeroLayout`] |
/// | row permutation | `[K]` | `[K]`, the same: stored rows keep their order |
///
/// A [2:4](Sparsity::TwoFour) weight holds the words of its kept values, K/2 rows, and its
/// metadata:
///
/// | tensor | plain | tile |
/// |---|---|---|
/// | metadata | [K/32 up, N up to a multiple of 8], [`MetadataLayout`] | [K/64, 2N], padded to 128 and 64, [`SparseLayout`] |
///
/// The tensors of a weight with [experts](WeightDescriptor::experts) are those of its experts, one
/// below the other: each has as many times the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightLayout {
    /// The layout of records and of the portable and host kernels.
    Plain,
    /// The layout of the tensor-core kernels.
    Tile,
}

impl fmt::Display for WeightLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "plain",
            Self::Tile => "tile",
        })
    }
}

/// A weight without its values: its format, its shape [K, N] or [experts, K, N], and the layout of
/// its tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WeightDescriptor {
    /// The format of the weight.
    pub format: WeightFormat,
    /// The number of matrices [K, N], the experts of a mixture; 1 for other weights.
    pub experts: usize,
    /// The number of input features (K).
    pub k: usize,
    /// The number of output features (N).
    pub n: usize,
    /// The layout of the tensors.
    pub layout: WeightLayout,
}

impl WeightDescriptor {
    /// Creates the descriptor of a weight in the plain layout.
    pub fn plain(format: impl Into<WeightFormat>, k: usize, n: usize) -> Self {
        Self {
            format: format.into(),
            experts: 1,
            k,
            n,
            layout: WeightLayout::Plain,
        }
    }

    /// Returns the descriptor of `experts` matrices, each of this format and shape.
    pub fn with_experts(self, experts: usize) -> Self {
        Self { experts, ..self }
    }

    /// Returns the descriptor of the same weight in another layout.
    pub fn in_layout(self, layout: WeightLayout) -> Self {
        Self { layout, ..self }
    }

    /// Returns the descriptor of the same weight stored with another sparsity pattern.
    pub fn with_sparsity(self, sparsity: Sparsity) -> Self {
        Self {
            format: self.format.with_sparsity(sparsity),
            ..self
        }
    }

    /// Returns the descriptor of the same weight with act-order or without.
    pub fn with_permutation(self, permuted: bool) -> Self {
        Self {
            format: self.format.with_permutation(permuted),
            ..self
        }
    }

    /// Returns true if both weights have the same K, N and number of experts.
    pub fn has_shape_of(&self, other: &Self) -> bool {
        (self.experts, self.k, self.n) == (other.experts, other.k, other.n)
    }

    /// Returns the quantisation of the weight.
    pub fn spec(&self) -> QuantSpec {
        self.format.spec
    }

    /// Checks that a weight in this format can have this shape.
    ///
    /// # Errors
    /// [`FormatError::NoExperts`], and the errors of [`QuantSpec::check_shape`] and
    /// [`QuantSpec::check`]. For 2:4 weights also [`FormatError::SparseRows`],
    /// [`FormatError::SparsePermuted`] and [`FormatError::SparseFloats`].
    pub fn check(&self) -> Result<(), FormatError> {
        if self.experts == 0 {
            return Err(FormatError::NoExperts);
        }
        QuantSpec::check_shape(self.k, self.n)?;
        self.spec().check()?;
        match self.format {
            WeightFormat {
                sparsity: Sparsity::Dense,
                ..
            } => Ok(()),
            WeightFormat { permuted: true, .. } => Err(FormatError::SparsePermuted),
            WeightFormat { spec, sparsity, .. } if !spec.value.sparsities().contains(&sparsity) => {
                Err(FormatError::SparseFloats { value: spec.value })
            }
            _ if !self.k.is_multiple_of(4) => Err(FormatError::SparseRows { k: self.k }),
            _ => Ok(()),
        }
    }

    /// Returns the number of rows of K whose values are stored: K for a dense weight, K/2 for a 2:4
    /// weight.
    pub fn stored_rows(&self) -> usize {
        self.format.sparsity.stored_rows(self.k)
    }

    /// Returns the plain layout of the stored values.
    pub fn plain_layout(&self) -> PlainLayout {
        PlainLayout::new(self.stored_rows(), self.n, self.spec().value)
    }

    /// Returns the tile layout of the stored values for kernels, padded to whole chunks.
    pub fn tiles(&self) -> MarlinLayout {
        MarlinLayout::in_chunks(self.stored_rows(), self.n, self.spec().value)
    }

    /// Returns the tile layout of a 2:4 weight, including its metadata.
    pub fn sparse_layout(&self) -> SparseLayout {
        SparseLayout::new(self.k, self.n, self.spec().value)
    }

    /// Returns K and N with and without the padding of the tile layout.
    pub fn tile_extents(&self) -> TileExtents {
        match self.format.sparsity {
            Sparsity::Dense => (&self.tiles()).into(),
            Sparsity::TwoFour => (&self.sparse_layout()).into(),
        }
    }

    /// Returns the layout of the scales that go with the tile layout.
    pub fn tile_scales(&self) -> ScaleLayout {
        ScaleLayout::new(self.tile_extents(), self.spec().scales.group)
    }

    /// Returns the layout of the zero points that go with the tile layout.
    pub fn tile_zeros(&self) -> ZeroLayout {
        ZeroLayout::new(
            self.tile_extents(),
            self.spec().scales.group,
            self.spec().value,
        )
    }

    /// Returns the number of groups along K whose scales the layout holds, including groups in its
    /// padding.
    pub fn groups(&self) -> usize {
        match self.layout {
            WeightLayout::Plain => self.spec().scales.group.count(self.k),
            WeightLayout::Tile => self.tile_scales().groups_padded(),
        }
    }

    /// Returns the shape and dtype of each tensor of the weight.
    pub fn tensors(&self) -> WeightTensors<TensorDescriptor> {
        let Self {
            format:
                WeightFormat {
                    spec,
                    permuted,
                    sparsity,
                },
            experts,
            k,
            n,
            layout,
        } = *self;
        let stacked = |[rows, columns]: [usize; 2]| [experts.saturating_mul(rows), columns];
        let groups = self.groups();
        let (words, metadata, columns, zero_points) = match layout {
            WeightLayout::Plain => {
                let (words, metadata) = (self.plain_layout(), MetadataLayout::new(k, n));
                (
                    [words.rows(), words.columns()],
                    metadata.shape(),
                    n,
                    n.div_ceil(spec.value.per_word()),
                )
            }
            WeightLayout::Tile => {
                let (tiles, [_, zeros]) = (self.tiles(), self.tile_zeros().shape());
                (
                    tiles.shape(),
                    self.sparse_layout().metadata_shape(),
                    tiles.n_padded(),
                    zeros,
                )
            }
        };
        let words_of = |shape| TensorDescriptor::matrix(stacked(shape), TensorDtype::Words);
        WeightTensors {
            qweight: words_of(words),
            metadata: (sparsity == Sparsity::TwoFour).then(|| words_of(metadata)),
            scales: TensorDescriptor::matrix(
                stacked([groups, columns]),
                TensorDtype::Scale(spec.scales.dtype),
            ),
            zero_points: spec
                .has_zero_points()
                .then(|| words_of([groups, zero_points])),
            row_permutation: permuted.then_some(TensorDescriptor::vector(
                experts.saturating_mul(k),
                TensorDtype::Words,
            )),
        }
    }
}

impl fmt::Display for WeightDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.experts != 1 {
            write!(f, "{} experts of ", self.experts)?;
        }
        write!(f, "[{}, {}] {}", self.k, self.n, self.format)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GroupSize, ScaleDtype, WeightTensor};

    #[test]
    fn a_format_lists_the_tensors_that_it_has() {
        let spec = QuantSpec::int4(GroupSize::G128)
            .with_zero_points()
            .with_scale_dtype(ScaleDtype::BF16);
        let weight =
            WeightDescriptor::plain(WeightFormat::dense(spec).with_permutation(true), 200, 33);
        let listed = |weight: &WeightDescriptor| {
            weight
                .tensors()
                .into_iter()
                .map(|(tensor, of)| (tensor.name(), of.shape().to_vec(), of.dtype))
                .collect::<Vec<_>>()
        };
        let (words, scale) = (TensorDtype::Words, TensorDtype::Scale(ScaleDtype::BF16));
        let plain = [
            ("qweight", vec![25, 40], words),
            ("scales", vec![2, 33], scale),
            ("zero_points", vec![2, 5], words),
            ("row_permutation", vec![200], words),
        ];
        assert_eq!(listed(&weight), plain);
        let tile = [
            ("qweight", vec![16, 128], words),
            ("scales", vec![2, 64], scale),
            ("zero_points", vec![2, 8], words),
            ("row_permutation", vec![200], words),
        ];
        assert_eq!(listed(&weight.in_layout(WeightLayout::Tile)), tile);
        let sparse = WeightDescriptor::plain(
            WeightFormat::dense(spec).with_sparsity(Sparsity::TwoFour),
            200,
            33,
        );
        let plain = [
            ("qweight", vec![13, 40], words),
            ("metadata", vec![7, 40], words),
            ("scales", vec![2, 33], scale),
            ("zero_points", vec![2, 5], words),
        ];
        assert_eq!(listed(&sparse), plain);
        let tile = [
            ("qweight", vec![8, 128], words),
            ("metadata", vec![4, 128], words),
            ("scales", vec![2, 64], scale),
            ("zero_points", vec![2, 8], words),
        ];
        assert_eq!(listed(&sparse.in_layout(WeightLayout::Tile)), tile);
        let wide =
            WeightDescriptor::plain(QuantSpec::int8(GroupSize::Channel).with_zero_points(), 9, 7);
        let scale = TensorDtype::Scale(ScaleDtype::F16);
        assert_eq!(
            listed(&wide),
            [
                ("qweight", vec![3, 8], words),
                ("scales", vec![1, 7], scale),
                ("zero_points", vec![1, 2], words)
            ]
        );
        let tile = [
            ("qweight", vec![8, 128], words),
            ("scales", vec![1, 64], scale),
            ("zero_points", vec![1, 16], words),
        ];
        assert_eq!(listed(&wide.in_layout(WeightLayout::Tile)), tile);
    }

    #[test]
    fn tensors_of_experts_are_one_below_the_other() {
        let spec = QuantSpec::int4(GroupSize::G128).with_zero_points();
        let one =
            WeightDescriptor::plain(WeightFormat::dense(spec).with_permutation(true), 200, 33);
        for one in [one, one.in_layout(WeightLayout::Tile)] {
            let all = one.with_experts(5);
            assert_eq!(all.check(), Ok(()));
            for (tensor, of) in one.tensors().into_iter() {
                let mut shape = of.shape().to_vec();
                shape[0] *= 5;
                let found = all.tensors().get(tensor).map(|of| of.shape().to_vec());
                assert_eq!(found, Some(shape), "{}", tensor.name());
            }
        }
        assert_eq!(
            one.with_experts(5).to_string(),
            format!("5 experts of {one}")
        );
        assert_eq!(one.with_experts(0).check(), Err(FormatError::NoExperts));
    }

    #[test]
    fn a_tensor_is_found_by_its_role() {
        let weight = WeightDescriptor::plain(QuantSpec::int4(GroupSize::G32), 64, 8).tensors();
        assert_eq!(
            weight
                .get(WeightTensor::Scales)
                .map(TensorDescriptor::elements),
            Some(16)
        );
        assert_eq!(weight.get(WeightTensor::ZeroPoints), None);
        assert_eq!(
            weight.map(|tensor, of| (tensor, of.elements())).qweight,
            (WeightTensor::Qweight, 64)
        );
    }
}
