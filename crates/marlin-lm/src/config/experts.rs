//! The fields of a `config.json` that describe a mixture of experts.

use marlin_kernels::experts::{Router, RouterScores};
use serde::{Deserialize, Serialize};

use super::{ModelConfig, ModelConfigError, size};
use crate::architectures::{ExpertDefaults, ExpertFields};

/// The experts of a mixture, and the layers that have them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertsConfig {
    /// The number of experts of a layer.
    pub count: usize,
    /// The number of experts of a token.
    pub top_k: usize,
    /// The number of features between an expert's gate and up projections and its down projection.
    pub intermediate_size: usize,
    /// The same number of the expert that all tokens have beside the others; `None` if there is no
    /// such expert.
    pub shared_intermediate_size: Option<usize>,
    /// True if the weights of a token's experts are divided by their sum.
    pub normalises: bool,
    /// Every layer whose number, counted from 1, is a multiple of this has experts.
    pub sparse_step: usize,
    /// The layers without experts among them, counted from 0.
    pub dense_layers: Vec<usize>,
}

/// The fields of a `config.json`, as the configs of several architectures spell them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct RawExperts {
    #[serde(skip_serializing_if = "Option::is_none")]
    num_experts: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    num_local_experts: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    num_experts_per_tok: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    moe_intermediate_size: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    shared_expert_intermediate_size: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    norm_topk_prob: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    decoder_sparse_step: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mlp_only_layers: Option<Vec<usize>>,
}

impl RawExperts {
    /// Returns the experts of an architecture's config; `None` if its models have none.
    pub(super) fn read(
        self,
        fields: &ExpertFields,
        intermediate_size: usize,
    ) -> Option<ExpertsConfig> {
        let count = |defaults: &ExpertDefaults| {
            let count = self.num_experts.or(self.num_local_experts);
            count.unwrap_or(defaults.count)
        };
        let top_k = |defaults: &ExpertDefaults| self.num_experts_per_tok.unwrap_or(defaults.top_k);
        match fields {
            ExpertFields::None => None,
            ExpertFields::Qwen(defaults) => Some(ExpertsConfig {
                count: count(defaults),
                top_k: top_k(defaults),
                intermediate_size: self
                    .moe_intermediate_size
                    .unwrap_or(defaults.intermediate_size),
                shared_intermediate_size: defaults
                    .shared_intermediate_size
                    .map(|size| self.shared_expert_intermediate_size.unwrap_or(size)),
                normalises: self.norm_topk_prob.unwrap_or(false),
                sparse_step: self.decoder_sparse_step.unwrap_or(1),
                dense_layers: self.mlp_only_layers.unwrap_or_default(),
            })
            // Without experts, all layers are dense.
            .filter(|experts| experts.count > 0),
            ExpertFields::Mixtral(defaults) => Some(ExpertsConfig {
                count: count(defaults),
                top_k: top_k(defaults),
                intermediate_size,
                shared_intermediate_size: None,
                normalises: true,
                sparse_step: 1,
                dense_layers: Vec::new(),
            }),
        }
    }

    /// Returns the fields of an architecture's config.
    pub(super) fn of(experts: Option<&ExpertsConfig>, fields: &ExpertFields) -> Self {
        let zero = matches!(fields, ExpertFields::Qwen(_)).then_some(0);
        let Some(experts) = experts else {
            return Self {
                num_experts: zero,
                ..Self::default()
            };
        };
        let shared = Self {
            num_experts_per_tok: Some(experts.top_k),
            ..Self::default()
        };
        match fields {
            ExpertFields::None => Self::default(),
            ExpertFields::Qwen(_) => Self {
                num_experts: Some(experts.count),
                moe_intermediate_size: Some(experts.intermediate_size),
                shared_expert_intermediate_size: experts.shared_intermediate_size,
                norm_topk_prob: Some(experts.normalises),
                decoder_sparse_step: Some(experts.sparse_step),
                mlp_only_layers: Some(experts.dense_layers.clone()),
                ..shared
            },
            ExpertFields::Mixtral(_) => Self {
                num_local_experts: Some(experts.count),
                ..shared
            },
        }
    }
}

impl ExpertsConfig {
    /// Checks the numbers of experts.
    pub(super) fn validate(&self) -> Result<(), ModelConfigError> {
        size("num_experts", self.count)?;
        size("num_experts_per_tok", self.top_k)?;
        size("moe_intermediate_size", self.intermediate_size)?;
        size("decoder_sparse_step", self.sparse_step)?;
        if let Some(found) = self.shared_intermediate_size {
            size("shared_expert_intermediate_size", found)?;
        }
        self.router().check().map_err(ModelConfigError::Experts)
    }

    /// Returns how experts are chosen and weighted.
    pub(crate) fn router(&self) -> Router {
        Router {
            experts: self.count,
            top_k: self.top_k,
            scores: RouterScores::Softmax,
            normalises: self.normalises,
        }
    }
}

impl ModelConfig {
    /// Returns the experts of a layer; `None` for a layer without experts.
    pub fn experts_of(&self, layer: usize) -> Option<&ExpertsConfig> {
        self.experts.as_ref().filter(|experts| {
            !experts.dense_layers.contains(&layer)
                && (layer + 1).is_multiple_of(experts.sparse_step)
        })
    }
}
