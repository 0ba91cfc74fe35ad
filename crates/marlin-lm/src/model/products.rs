//! The matmuls of a model, and the tensors of its checkpoint.

use std::ops::Range;

use burn::nn::Embedding;
use marlin_kernels::{Epilogue, Prologue};

use super::{Block, Mixer, Model, Projection, RmsNorm};
use crate::architectures::{Input, MixerShape, ProjectionShape};

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
    /// The weight and bias of some output features of a projection.
    Projection {
        projection: &'a Projection,
        columns: Range<usize>,
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
            let mut products: Vec<Product<'_>> = shape
                .projections()
                .into_iter()
                .flat_map(|shape| products(shape, &name, block.group(shape.kind).projections()))
                .collect();
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
    fn parts_of<'a>(&self, index: usize, block: &'a Block) -> Vec<(&'static str, ModelTensor<'a>)> {
        let shape = self.config.block(index);
        let [qkv, output, gate_up, down] = shape
            .projections()
            .map(|shape| projection_parts(shape, block.group(shape.kind).projections()));
        let (MixerShape::Attention(attention), Mixer::Attention(of_model)) =
            (&shape.mixer, &block.mixer);
        let head_norms = attention
            .head_norms
            .into_iter()
            .flatten()
            .zip([&of_model.q_norm, &of_model.k_norm])
            .filter_map(|(name, norm)| Some((name, ModelTensor::Norm(norm.as_ref()?))));

        let mut parts = vec![(shape.mixer_norm, ModelTensor::Norm(&block.mixer_norm))];
        parts.extend(qkv);
        parts.extend(head_norms);
        parts.extend(output);
        parts.push((
            shape.feed_forward_norm,
            ModelTensor::Norm(&block.feed_forward_norm),
        ));
        parts.extend(gate_up);
        parts.extend(down);
        parts
    }
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
