use crate::KernelError;

/// The maximum number of experts of a token: each lane of a warp has one of them.
pub const MAX_TOP_K: usize = 32;
/// The maximum number of experts of a layer.
pub(super) const MAX_EXPERTS: usize = 1024;

/// The scores of a router by which experts are chosen and weighted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RouterScores {
    /// The softmax of the logits. With [`Router::normalises`], the softmax of the chosen logits.
    Softmax,
    /// The sigmoid of each logit. A correction for each expert may be added before experts are
    /// chosen (arXiv 2408.15664).
    Sigmoid,
}

/// How the experts of a token are chosen and weighted. Of experts with equal scores, the one with
/// the smaller number is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Router {
    /// The number of experts, 1 to 1024.
    pub experts: usize,
    /// The number of experts of a token, 1 to [`MAX_TOP_K`].
    pub top_k: usize,
    /// The scores of experts.
    pub scores: RouterScores,
    /// True if the weights of a token's experts are divided by their sum.
    pub normalises: bool,
}

impl Router {
    /// Checks the numbers of experts.
    ///
    /// # Errors
    /// [`KernelError::Router`] if a token has no experts, more than there are, or more than
    /// [`MAX_TOP_K`], or if there are more than 1024 experts.
    pub fn check(&self) -> Result<(), KernelError> {
        let Self { experts, top_k, .. } = *self;
        if (1..=experts.min(MAX_TOP_K)).contains(&top_k) && experts <= MAX_EXPERTS {
            return Ok(());
        }
        Err(KernelError::Router { experts, top_k })
    }
}
