use super::operation::FusedLinear;
use super::pattern::Pattern;
use burn::backend::ir::OperationIr;
use burn_cubecl::fusion::CubeOptimization;
use burn_fusion::{FuserProperties, FuserStatus, OperationFuser};

/// The score of this fuser. It exceeds the scores of Burn's own matmul and elementwise fusers,
/// which depend on the operations that they cover.
const SCORE: u64 = 1_000_000;

/// A fuser that recognises [`Pattern`] in a stream of operations.
#[derive(Clone)]
pub(super) struct LinearFuser {
    pattern: Pattern,
    position: usize,
    status: FuserStatus,
}

impl Default for LinearFuser {
    fn default() -> Self {
        Self {
            pattern: Pattern::default(),
            position: 0,
            status: FuserStatus::Open,
        }
    }
}

impl OperationFuser<CubeOptimization> for LinearFuser {
    fn fuse(&mut self, operation: &OperationIr) {
        if let FuserStatus::Closed = self.status {
            return;
        }
        if self.pattern.accept(operation, self.position) {
            self.position += 1;
        } else {
            self.status = FuserStatus::Closed;
        }
        if self.pattern.add.is_some() {
            self.status = FuserStatus::Closed;
        }
    }

    fn finish(&mut self) -> CubeOptimization {
        CubeOptimization::new(FusedLinear::new(self.pattern.clone()))
    }

    fn reset(&mut self) {
        *self = Self::default();
    }

    fn status(&self) -> FuserStatus {
        self.status
    }

    fn properties(&self) -> FuserProperties {
        let ready = self.pattern.matmul.is_some();
        FuserProperties {
            score: if ready { SCORE } else { 0 },
            ready,
        }
    }

    fn len(&self) -> usize {
        self.pattern.covered
    }

    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}
