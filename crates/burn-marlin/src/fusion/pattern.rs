use crate::backend::DEQUANTIZE;
use burn::backend::ir::{
    BaseOperationIr, BinaryOpIr, CustomOpIr, FloatOperationIr, MatmulOpIr, NumericOperationIr,
    OperationIr, ShapeOpIr, TensorIr, TensorStatus,
};
use serde::{Deserialize, Serialize};

/// The operations of a linear layer whose weight is a dequantised weight, as Burn records them: the
/// dequantisation, reshapes of activations and weight, the matmul, and the bias reshaped and added.
///
/// Tensors are in relative form: a shape entry is an id, and id 0 means extent 1.
#[derive(Clone, Default, Debug, Serialize, Deserialize)]
pub(super) struct Pattern {
    pub dequantize: Option<CustomOpIr>,
    pub weight_reshape: Option<ShapeOpIr>,
    pub x_reshape: Option<ShapeOpIr>,
    pub matmul: Option<MatmulOpIr>,
    pub bias_reshape: Option<ShapeOpIr>,
    pub add: Option<BinaryOpIr>,
    /// The number of operations covered so far by a complete pattern: up to the matmul, or up to
    /// the addition of the bias.
    pub covered: usize,
}

impl Pattern {
    /// Adds the next operation to the pattern. Returns false if the operation does not belong to
    /// it.
    pub fn accept(&mut self, operation: &OperationIr, position: usize) -> bool {
        match operation {
            OperationIr::Custom(op) if op.id == DEQUANTIZE && self.dequantize.is_none() => {
                self.dequantize = Some(op.clone());
                true
            }
            // No other operation can begin a pattern.
            _ if self.dequantize.is_none() => false,
            OperationIr::BaseFloat(BaseOperationIr::Reshape(op)) => self.accept_reshape(op),
            OperationIr::Float(_, FloatOperationIr::Matmul(op)) if self.matmul.is_none() => {
                self.accept_matmul(op, position)
            }
            OperationIr::NumericFloat(_, NumericOperationIr::Add(op)) if self.add.is_none() => {
                self.accept_add(op, position)
            }
            _ => false,
        }
    }

    fn accept_reshape(&mut self, op: &ShapeOpIr) -> bool {
        if let Some(matmul) = &self.matmul {
            let columns = matmul
                .out
                .shape
                .rank()
                .checked_sub(1)
                .map(|last| matmul.out.shape[last]);
            let is_bias = op.input.shape.rank() == 1
                && columns == Some(op.input.shape[0])
                && is_unsqueezed(op);
            if self.bias_reshape.is_some() || !is_bias {
                return false;
            }
            self.bias_reshape = Some(op.clone());
            return true;
        }
        if self.is_weight(&op.input) {
            if self.weight_reshape.is_some() || !is_unsqueezed(op) {
                return false;
            }
            self.weight_reshape = Some(op.clone());
            return true;
        }
        if self.x_reshape.is_some() {
            return false;
        }
        self.x_reshape = Some(op.clone());
        true
    }

    fn accept_matmul(&mut self, op: &MatmulOpIr, position: usize) -> bool {
        // The matmul must be the last use of the weight, because another reader needs the float
        // weight. Leading dimensions of the weight must have extent 1: one weight serves all of
        // them.
        let rank = op.rhs.shape.rank();
        let one_weight = op.rhs.status == TensorStatus::ReadWrite
            && rank >= 2
            && (0..rank - 2).all(|dim| op.rhs.shape[dim] == 0);
        let ours = match &self.weight_reshape {
            Some(reshape) => reshape.out.id == op.rhs.id,
            None => self.is_weight(&op.rhs),
        };
        let x_is_reshaped = self
            .x_reshape
            .as_ref()
            .is_none_or(|reshape| reshape.out.id == op.lhs.id);
        if !(one_weight
            && ours
            && x_is_reshaped
            && op.lhs.dtype == op.rhs.dtype
            && op.out.dtype == op.lhs.dtype)
        {
            return false;
        }
        self.matmul = Some(op.clone());
        self.covered = position + 1;
        true
    }

    fn accept_add(&mut self, op: &BinaryOpIr, position: usize) -> bool {
        let (Some(matmul), Some(bias)) = (&self.matmul, &self.bias_reshape) else {
            return false;
        };
        let takes_output = op.lhs.id == matmul.out.id && op.lhs.status == TensorStatus::ReadWrite;
        let takes_bias = op.rhs.id == bias.out.id
            && op.rhs.status == TensorStatus::ReadWrite
            && op.rhs.dtype == matmul.out.dtype;
        if !(takes_output && takes_bias) {
            return false;
        }
        self.add = Some(op.clone());
        self.covered = position + 1;
        true
    }

    fn is_weight(&self, tensor: &TensorIr) -> bool {
        let weight = self.dequantize.as_ref().and_then(|op| op.outputs.first());
        weight.is_some_and(|weight| weight.id == tensor.id)
            && tensor.status == TensorStatus::ReadWrite
    }
}

/// Returns true if a reshape only adds leading dimensions of extent 1.
fn is_unsqueezed(op: &ShapeOpIr) -> bool {
    let (from, to) = (&op.input.shape, &op.out.shape);
    let Some(added) = to.rank().checked_sub(from.rank()) else {
        return false;
    };
    (0..added).all(|dim| to[dim] == 0) && (0..from.rank()).all(|dim| to[added + dim] == from[dim])
}
