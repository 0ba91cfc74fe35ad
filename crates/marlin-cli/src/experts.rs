//! The numbers of experts of a mixture, as the commands show them.

use marlin_lm::ModelConfig;
use serde::Serialize;
use std::fmt;

/// The numbers of experts of a mixture.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ExpertsRow {
    /// The number of experts of a layer.
    experts: usize,
    /// The number of experts of a token.
    active: usize,
    /// True if there is one more that all tokens have.
    shared: bool,
}

impl ExpertsRow {
    /// Returns the experts of a config's model; `None` if it has none.
    pub fn of(config: &ModelConfig) -> Option<Self> {
        config.experts.as_ref().map(|of| Self {
            experts: of.count,
            active: of.top_k,
            shared: of.shared_intermediate_size.is_some(),
        })
    }
}

impl fmt::Display for ExpertsRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            experts, active, ..
        } = self;
        write!(f, "{experts} experts a layer, {active} active")?;
        match self.shared {
            true => f.write_str(", and one beside them"),
            false => Ok(()),
        }
    }
}
