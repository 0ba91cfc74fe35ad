use super::super::config::GemvConfig;
use crate::ActivationDtype;
use crate::experts::Router;

/// The rows that a kernel multiplies, and what it writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExpertRows {
    /// Each token's row is multiplied by the matrices of its experts. The output has a row for each
    /// expert of each token, [tokens, top_k, N].
    Gathered,
    /// Each row of [tokens, top_k, K] is multiplied by its expert's matrix. The output is the
    /// weighted sum of each token's experts, [tokens, N].
    Summed,
}

/// The compile-time configuration of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ExpertGemvConfig {
    /// The configuration of a row's product.
    pub gemv: GemvConfig,
    /// The rows.
    pub rows: ExpertRows,
    /// The router.
    pub router: Router,
    /// The dtype of the router's logits.
    pub logits: ActivationDtype,
}

impl ExpertGemvConfig {
    /// Returns true if the output is the weighted sum of each token's experts.
    pub(super) fn is_summed(&self) -> bool {
        self.rows == ExpertRows::Summed
    }
}
