//! Building a model from a source of weights.

use burn::nn::Embedding;
use burn::tensor::{Device, StreamId};

use super::{
    Attention, Block, FeedForward, Mixer, Mixture, Model, ProjectionGroup, RmsNorm, Rope,
    SharedExpert, SwiGlu, WeightSource,
};
use crate::architectures::{
    ExpertsShape, FeedForwardShape, MixerShape, ProjectionShape, SwiGluShape,
};
use crate::config::ModelConfig;
use crate::parallel::Shard;

impl Model {
    /// Builds a rank's part of a model for `max_len` positions from a source of weights.
    pub(crate) fn assemble<S: WeightSource>(
        shard: &Shard,
        max_len: usize,
        device: &Device,
        source: &mut S,
    ) -> Result<Self, S::Error> {
        let config = shard.config();
        let hidden = config.hidden_size;
        let embed_tokens = Embedding {
            weight: source.embedding("model.embed_tokens", [config.vocab_size, hidden])?,
        };
        let mut layers = Vec::new();
        for index in 0..config.num_hidden_layers {
            layers.push(load_block(shard, source, index)?);
        }
        let norm = norm(config, source, "model.norm", hidden)?;
        let lm_head = match shard.head() {
            None => None,
            Some(head) => Some(source.projection(&head)?),
        };
        Ok(Self {
            embed_tokens,
            layers,
            norm,
            lm_head,
            rope: Rope::new(config, max_len, device),
            config: config.clone(),
            stream: StreamId::current(),
            parallel: None,
        })
    }
}

/// Builds block `index` of a rank's part of a model from a source of weights.
pub(crate) fn load_block<S: WeightSource>(
    shard: &Shard,
    source: &mut S,
    index: usize,
) -> Result<Block, S::Error> {
    let config = shard.config();
    let (shape, block) = (shard.block(index), format!("model.layers.{index}"));
    let hidden = config.hidden_size;
    let mixer_norm = norm(
        config,
        source,
        &format!("{block}.{}", shape.mixer_norm),
        hidden,
    )?;
    let mixer = match &shape.mixer {
        MixerShape::Attention(attention) => {
            let head_norms = match attention.head_norms {
                Some(names) => {
                    let [q_norm, k_norm] = names.map(|name| {
                        norm(config, source, &format!("{block}.{name}"), config.head_dim)
                    });
                    [Some(q_norm?), Some(k_norm?)]
                }
                None => [None, None],
            };
            let [q_norm, k_norm] = head_norms;
            Mixer::Attention(Attention {
                qkv_proj: group(source, &block, &attention.qkv)?,
                q_norm,
                k_norm,
                sinks: match attention.sinks {
                    Some(name) => {
                        let (heads, of_rank) = shard.query_heads();
                        Some(source.vector(&format!("{block}.{name}"), heads, of_rank)?)
                    }
                    None => None,
                },
                o_proj: group(source, &block, &attention.output)?,
                heads: config.num_attention_heads,
                kv_heads: config.num_key_value_heads,
                head_dim: config.head_dim,
                window: attention.window,
            })
        }
    };
    let feed_forward_norm = norm(
        config,
        source,
        &format!("{block}.{}", shape.feed_forward_norm),
        hidden,
    )?;
    let feed_forward = match &shape.feed_forward {
        FeedForwardShape::SwiGlu(mlp) => FeedForward::SwiGlu(swiglu(source, &block, mlp)?),
        FeedForwardShape::Experts(experts) => {
            FeedForward::Experts(mixture(source, &block, experts)?)
        }
    };
    Ok(Block {
        mixer_norm,
        mixer,
        feed_forward_norm,
        feed_forward,
    })
}

fn norm<S: WeightSource>(
    config: &ModelConfig,
    source: &mut S,
    name: &str,
    features: usize,
) -> Result<RmsNorm, S::Error> {
    Ok(RmsNorm {
        weight: source.vector(&format!("{name}.weight"), features, 0..features)?,
        epsilon: config.rms_norm_eps,
    })
}

fn swiglu<S: WeightSource>(
    source: &mut S,
    block: &str,
    mlp: &SwiGluShape,
) -> Result<SwiGlu, S::Error> {
    Ok(SwiGlu {
        gate_up_proj: group(source, block, &mlp.gate_up)?,
        down_proj: group(source, block, &mlp.down)?,
    })
}

/// Loads a mixture of experts: the router, the experts, then the expert that all tokens have.
fn mixture<S: WeightSource>(
    source: &mut S,
    block: &str,
    shape: &ExpertsShape,
) -> Result<Mixture, S::Error> {
    Ok(Mixture {
        router: source.projection(&shape.router_of(block))?,
        experts: source.experts(block, shape)?,
        shared: match (&shape.shared, shape.shared_gate_of(block)) {
            (Some(shared), Some(gate)) => Some(SharedExpert {
                gate: source.projection(&gate)?,
                mlp: swiglu(source, block, &shared.mlp)?,
            }),
            _ => None,
        },
    })
}

/// Loads a projection, as one matmul or as one for each layer of the source.
fn group<S: WeightSource>(
    source: &mut S,
    block: &str,
    shape: &ProjectionShape,
) -> Result<ProjectionGroup, S::Error> {
    let layers = shape.layers_of(block, |name| source.contains(name));
    Ok(ProjectionGroup::new(
        source.projections(&layers)?,
        shape.outputs.clone(),
        shape.epilogue,
    ))
}
