//! The part of a layer of a file that one rank of a split model has.

use std::ops::Range;

/// The part of a projection of a file that one rank of a split model has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProjectionPart {
    /// The number of input features of the whole projection, K.
    pub(crate) k: usize,
    /// The number of features of each whole output.
    pub(crate) outputs: Vec<usize>,
    /// The output features of the rank, of each output, counted from the first of that output.
    pub(crate) columns: Vec<Range<usize>>,
    /// The input features of the rank.
    pub(crate) rows: Range<usize>,
}

/// The part of a linear layer of a file that one rank of a split model has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LayerPart {
    /// The numbers of input and output features of the whole layer, [K, N].
    pub(crate) dims: [usize; 2],
    /// The output features of the rank, in ascending order.
    pub(crate) columns: Vec<Range<usize>>,
    /// The input features of the rank.
    pub(crate) rows: Range<usize>,
}

/// The part of the experts of a file that one rank of a split model has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ExpertsPart {
    /// The number of features between gate and up, and down, of a whole expert.
    pub(crate) intermediate: usize,
    /// Those of the rank.
    pub(crate) features: Range<usize>,
    /// True if the rank adds the biases of down: one rank does, since outputs are summed.
    pub(crate) has_down_biases: bool,
}

impl ProjectionPart {
    /// Returns the part of the layer that has all outputs.
    pub(crate) fn of_all(&self) -> LayerPart {
        let mut columns: Vec<Range<usize>> = Vec::new();
        let mut start = 0;
        for (part, output) in self.columns.iter().zip(&self.outputs) {
            columns.push(start + part.start..start + part.end);
            start += output;
        }
        LayerPart {
            dims: [self.k, start],
            columns,
            rows: self.rows.clone(),
        }
    }

    /// Returns the part of the layer that has output `index` alone.
    pub(crate) fn of_output(&self, index: usize) -> LayerPart {
        LayerPart {
            dims: [self.k, self.outputs[index]],
            columns: vec![self.columns[index].clone()],
            rows: self.rows.clone(),
        }
    }
}

impl LayerPart {
    /// Returns true if the rank has all input features.
    pub(crate) fn has_all_rows(&self) -> bool {
        self.rows == (0..self.dims[0])
    }

    /// Returns true if the rank has all output features.
    pub(crate) fn has_all_columns(&self) -> bool {
        matches!(&self.columns[..], [all] if *all == (0..self.dims[1]))
    }

    /// Returns the share of the layer's weights that the rank has.
    pub(crate) fn share(&self) -> f64 {
        let columns: usize = self.columns.iter().map(ExactSizeIterator::len).sum();
        let [k, n] = self.dims.map(|size| size as f64);
        columns as f64 / n * (self.rows.len() as f64 / k)
    }
}

impl ExpertsPart {
    /// Returns the part of a gate or an up of an expert, of `hidden` input features.
    pub(crate) fn of_up(&self, hidden: usize) -> LayerPart {
        LayerPart {
            dims: [hidden, self.intermediate],
            columns: vec![self.features.clone()],
            rows: 0..hidden,
        }
    }

    /// Returns the part of the down projection of an expert, of `hidden` output features.
    pub(crate) fn of_down(&self, hidden: usize) -> LayerPart {
        let all = 0..hidden;
        LayerPart {
            dims: [self.intermediate, hidden],
            columns: vec![all],
            rows: self.features.clone(),
        }
    }
}
