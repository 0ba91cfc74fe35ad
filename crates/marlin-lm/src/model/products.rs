//! The matmuls of a model, and the tensors of its checkpoint.

use std::ops::Range;

use burn::module::Param;
use burn::nn::Embedding;
use burn::tensor::Tensor;
use marlin_kernels::{Epilogue, Prologue};

use super::{Block, Experts, Mixer, Mixture, Model, Projection, RmsNorm};
use crate::architectures::{ExpertsShape, Input, MixerShape, ProjectionShape, StackShape};

/// A matmul of the model.
pub(crate) struct Product<'a> {
    /// The projection's name in a checkpoint.
    pub(crate) name: String,
    /// The weight.
    pub(crate) projection: &'a Projection,
    /// The operation before the product that is part of the matmul.
    pub(crate) prologue: Prologue,
    /// The operation after the product that is part of the matmul.
    pub(crate) epilogue: Epilogue,
}

impl<'a> Product<'a> {
    /// Creates a matmul without prologue and epilogue.
    pub(crate) fn plain(name: impl Into<String>, projection: &'a Projection) -> Self {
        Self {
            name: name.into(),
            projection,
            prologue: Prologue::None,
            epilogue: Epilogue::None,
        }
    }
}

/// The contents of a checkpoint under one name.
pub(crate) enum ModelTensor<'a> {
    Embedding(&'a Embedding),
    Norm(&'a RmsNorm),
    /// A vector, under its whole name.
    Vector(&'a Param<Tensor<1>>),
    /// The weight and bias of some output features of a projection.
    Projection {
        projection: &'a Projection,
        columns: Range<usize>,
    },
    /// The weight of some output features of an expert: of its gate and up projections, or of its
    /// down projection (`is_down`).
    Expert {
        experts: &'a Experts,
        expert: usize,
        is_down: bool,
        columns: Range<usize>,
    },
    /// The weights of all experts, and their biases: of gates and ups, or of down (`is_down`).
    Stack {
        experts: &'a Experts,
        is_down: bool,
        shape: StackShape,
    },
}

impl Model {
    /// Returns every projection, including the head, with its name in a checkpoint. Projections
    /// that are one matmul are returned once, as `qkv_proj` and `gate_up_proj`, regardless of the
    /// names of their layers.
    pub fn projections(&self) -> impl Iterator<Item = (String, &Projection)> {
        let head = self
            .lm_head
            .iter()
            .map(|head| ("lm_head".to_string(), head));
        self.layer_products()
            .map(|product| (product.name, product.projection))
            .chain(head)
    }

    /// Returns every matmul of the blocks, in the order in which the matmuls run.
    pub(crate) fn layer_products(&self) -> impl Iterator<Item = Product<'_>> {
        self.layers.iter().enumerate().flat_map(|(index, block)| {
            let (shape, name) = (self.config.block(index), format!("model.layers.{index}"));
            let of_shape = |shape: &ProjectionShape| {
                products(shape, &name, block.group(shape.kind).projections())
            };
            let mut products: Vec<Product<'_>> = shape.projections().flat_map(of_shape).collect();
            if let Some(experts) = shape.experts() {
                // The norm before experts is a part of the router's matmul, which returns its
                // output, too. Without a norm, the matmul of a shared expert has no epilogue
                // either.
                for product in &mut products[1..] {
                    product.prologue = Prologue::None;
                    product.epilogue = Epilogue::None;
                }
                products.extend(routers(experts, &name, block));
            }
            if index == 0 {
                // Nothing is added to the residual stream before the first norm, so that norm is a
                // separate kernel.
                products[0].prologue = Prologue::None;
            }
            products
        })
    }

    /// Returns the parts of a checkpoint of this model, with their names.
    pub(crate) fn parts(&self) -> Vec<(String, ModelTensor<'_>)> {
        let mut parts = vec![(
            "model.embed_tokens".to_string(),
            ModelTensor::Embedding(&self.embed_tokens),
        )];
        for (index, block) in self.layers.iter().enumerate() {
            let of_block = self.parts_of(index, block).into_iter();
            parts.extend(
                of_block.map(|(name, part)| (format!("model.layers.{index}.{name}"), part)),
            );
        }
        parts.push(("model.norm".to_string(), ModelTensor::Norm(&self.norm)));
        parts.extend(self.lm_head.as_ref().map(|head| {
            let columns = 0..head.dims()[1];
            let part = ModelTensor::Projection {
                projection: head,
                columns,
            };
            ("lm_head".to_string(), part)
        }));
        parts
    }

    /// Returns the parts of a block, with their names relative to the block.
    fn parts_of<'a>(&self, index: usize, block: &'a Block) -> Vec<(String, ModelTensor<'a>)> {
        let shape = self.config.block(index);
        let projections = shape
            .projections()
            .flat_map(|shape| projection_parts(shape, block.group(shape.kind).projections()));
        let (MixerShape::Attention(attention), Mixer::Attention(of_model)) =
            (&shape.mixer, &block.mixer);
        let head_norms = attention
            .head_norms
            .into_iter()
            .flatten()
            .zip([&of_model.q_norm, &of_model.k_norm])
            .filter_map(|(name, norm)| Some((name, ModelTensor::Norm(norm.as_ref()?))));
        let sinks = attention.sinks.zip(of_model.sinks.as_ref());
        let sinks = sinks.map(|(name, sinks)| (name, ModelTensor::Vector(sinks)));

        let norms = [
            (shape.mixer_norm, &block.mixer_norm),
            (shape.feed_forward_norm, &block.feed_forward_norm),
        ];
        let norms = norms.map(|(name, norm)| (name, ModelTensor::Norm(norm)));
        let mut parts: Vec<_> = norms
            .into_iter()
            .chain(head_norms)
            .chain(sinks)
            .chain(projections)
            .map(|(name, part)| (name.to_string(), part))
            .collect();
        if let Some((experts, mixture)) = shape.experts().zip(block.mixture()) {
            parts.extend(expert_parts(experts, mixture));
        }
        parts
    }
}

/// Returns the matmul of the router of the block with the name `block`, and of the gate of the
/// expert that all tokens have.
fn routers<'a>(
    shape: &ExpertsShape,
    block: &str,
    of_model: &'a Block,
) -> impl Iterator<Item = Product<'a>> {
    let mixture = of_model.mixture();
    let router = mixture.map(|mixture| Product {
        // A quantised router has a separate norm.
        prologue: match mixture.router {
            Projection::Dense(_) => Prologue::AddRmsNorm,
            Projection::Quant(_) => Prologue::None,
        },
        ..Product::plain(shape.router_of(block).name, &mixture.router)
    });
    let shared = mixture.and_then(|mixture| mixture.shared.as_ref());
    let gate = shape.shared_gate_of(block).zip(shared);
    let gate = gate.map(|(layer, shared)| Product::plain(layer.name, &shared.gate));
    router.into_iter().chain(gate)
}

/// Returns the parts of a mixture of experts other than its projections, with their names relative
/// to the block.
fn expert_parts<'a>(shape: &ExpertsShape, mixture: &'a Mixture) -> Vec<(String, ModelTensor<'a>)> {
    let whole = |projection: &'a Projection| ModelTensor::Projection {
        projection,
        columns: 0..projection.dims()[1],
    };
    let mut parts = vec![(shape.router_layer.to_string(), whole(&mixture.router))];
    if let Some((shape, shared)) = shape.shared.as_ref().zip(mixture.shared.as_ref()) {
        parts.push((shape.gate.to_string(), whole(&shared.gate)));
    }
    if shape.stack.is_own {
        let stacks = [false, true].into_iter().zip(StackShape::NAMES);
        parts.extend(stacks.map(|(is_down, name)| {
            let part = ModelTensor::Stack {
                experts: &mixture.experts,
                is_down,
                shape: shape.stack,
            };
            (format!("{}.{name}", shape.name), part)
        }));
        return parts;
    }
    let [gate, up, down] = shape.layers;
    let width = shape.intermediate;
    for expert in 0..shape.router.experts {
        let name = |layer: &str| format!("{}.{expert}.{layer}", shape.name);
        let part = |is_down, columns| ModelTensor::Expert {
            experts: &mixture.experts,
            expert,
            is_down,
            columns,
        };
        parts.extend([
            (name(gate), part(false, 0..width)),
            (name(up), part(false, width..2 * width)),
            (name(down), part(true, 0..shape.hidden)),
        ]);
    }
    parts
}

/// Returns the matmuls of a projection of the block with the name `block`.
fn products<'a>(
    shape: &ProjectionShape,
    block: &str,
    projections: &'a [Projection],
) -> Vec<Product<'a>> {
    if let [joined] = projections {
        let prologue = match shape.input {
            Input::MixerNorm | Input::FeedForwardNorm => Prologue::AddRmsNorm,
            Input::Attention { .. } | Input::Gated => Prologue::None,
        };
        return vec![Product {
            prologue,
            epilogue: shape.epilogue,
            ..Product::plain(format!("{block}.{}", shape.name), joined)
        }];
    }
    let names = shape.names_of(projections.len());
    let product = |(name, projection)| Product::plain(format!("{block}.{name}"), projection);
    names.iter().zip(projections).map(product).collect()
}

/// Returns the layers of a projection in a checkpoint, with their names relative to the block.
fn projection_parts<'a>(
    shape: &ProjectionShape,
    projections: &'a [Projection],
) -> Vec<(&'static str, ModelTensor<'a>)> {
    let part = |(index, (name, columns)): (usize, (&'static str, Range<usize>))| {
        let part = match projections {
            [projection] => ModelTensor::Projection {
                projection,
                columns,
            },
            _ => ModelTensor::Projection {
                projection: &projections[index],
                columns: 0..columns.len(),
            },
        };
        (name, part)
    };
    shape
        .columns(shape.names_of(projections.len()))
        .enumerate()
        .map(part)
        .collect()
}
