//! Unmodified Burn models, which tests convert with one call.

use crate::layer::values;
use burn::module::{Module, ModuleDisplay, Param};
use burn::nn::transformer::{
    TransformerDecoder, TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoder,
    TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    Embedding, EmbeddingConfig, Gru, GruConfig, Linear, LinearConfig, LinearLayout, Lstm,
    LstmConfig, Relu,
};
use burn::tensor::{Device, Int, Tensor, TensorData};

/// An ordinary Burn model of two linear layers.
#[derive(Module, Debug)]
pub struct Mlp {
    pub up: Linear,
    pub relu: Relu,
    pub down: Linear,
}

impl Mlp {
    pub fn new(sizes: [usize; 3], layout: LinearLayout, bias: bool, device: &Device) -> Self {
        let linear = |from, to| {
            LinearConfig::new(from, to)
                .with_layout(layout)
                .with_bias(bias)
                .init(device)
        };
        Self {
            up: linear(sizes[0], sizes[1]),
            relu: Relu::new(),
            down: linear(sizes[1], sizes[2]),
        }
    }

    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.down.forward(self.relu.forward(self.up.forward(x)))
    }
}

/// A model for the conversion tests.
pub trait Tried: Module + ModuleDisplay + 'static {
    /// The name of the model in messages.
    const NAME: &'static str;
    /// The number of linear layers, and the number of those that share the weight of an earlier
    /// layer.
    const LINEAR: [usize; 2];
    /// The number of input features of the first layer.
    const FEATURES: usize = 64;

    fn new(device: &Device) -> Self;

    /// Returns the output for an input [batch, seq, features], in f64.
    fn run(&self, x: Tensor<3>) -> Vec<f64>;
}

impl Tried for Mlp {
    const NAME: &'static str = "MLP";
    const LINEAR: [usize; 2] = [2, 0];

    fn new(device: &Device) -> Self {
        Self::new([64, 96, 32], LinearLayout::Col, true, device)
    }

    fn run(&self, x: Tensor<3>) -> Vec<f64> {
        values(self.forward(x))
    }
}

impl Tried for TransformerEncoder {
    const NAME: &'static str = "TransformerEncoder";
    const LINEAR: [usize; 2] = [12, 0];

    fn new(device: &Device) -> Self {
        TransformerEncoderConfig::new(64, 128, 4, 2)
            .with_dropout(0.0)
            .init(device)
    }

    fn run(&self, x: Tensor<3>) -> Vec<f64> {
        values(self.forward(TransformerEncoderInput::new(x)))
    }
}

impl Tried for TransformerDecoder {
    const NAME: &'static str = "TransformerDecoder";
    const LINEAR: [usize; 2] = [10, 0];

    fn new(device: &Device) -> Self {
        TransformerDecoderConfig::new(64, 128, 4, 1)
            .with_dropout(0.0)
            .init(device)
    }

    fn run(&self, x: Tensor<3>) -> Vec<f64> {
        values(self.forward(TransformerDecoderInput::new(x.clone(), x)))
    }
}

impl Tried for Lstm {
    const NAME: &'static str = "Lstm";
    const LINEAR: [usize; 2] = [8, 0];

    fn new(device: &Device) -> Self {
        LstmConfig::new(64, 32, true).init(device)
    }

    fn run(&self, x: Tensor<3>) -> Vec<f64> {
        values(self.forward(x, None).0)
    }
}

impl Tried for Gru {
    const NAME: &'static str = "Gru";
    const LINEAR: [usize; 2] = [6, 0];

    fn new(device: &Device) -> Self {
        GruConfig::new(64, 32, true).init(device)
    }

    fn run(&self, x: Tensor<3>) -> Vec<f64> {
        values(self.forward(x, None))
    }
}

/// A model that uses one layer four times, with shared parameters.
#[derive(Module, Debug)]
pub struct Shared {
    layers: Vec<Linear>,
}

impl Tried for Shared {
    const NAME: &'static str = "shared parameters";
    const LINEAR: [usize; 2] = [4, 3];

    fn new(device: &Device) -> Self {
        Self {
            layers: vec![LinearConfig::new(64, 64).init(device); 4],
        }
    }

    fn run(&self, x: Tensor<3>) -> Vec<f64> {
        values(self.layers.iter().fold(x, |x, layer| layer.forward(x)))
    }
}

/// A model whose head has the transposed parameter of the embedding, with the same id.
#[derive(Module, Debug)]
pub struct Tied {
    pub embedding: Embedding,
    pub head: Linear,
}

impl Tried for Tied {
    const NAME: &'static str = "tied head";
    const LINEAR: [usize; 2] = [1, 0];

    fn new(device: &Device) -> Self {
        let embedding = EmbeddingConfig::new(32, 64).init(device);
        let weight = embedding.weight.clone().map(|weight| weight.transpose());
        Self {
            embedding,
            head: Linear { weight, bias: None },
        }
    }

    fn run(&self, x: Tensor<3>) -> Vec<f64> {
        let [batch, seq, _] = x.dims();
        let tokens = (0..batch * seq)
            .map(|index| (index % 32) as i32)
            .collect::<Vec<_>>();
        let tokens =
            Tensor::<2, Int>::from_data(TensorData::new(tokens, [batch, seq]), &x.device());
        values(self.head.forward(x + self.embedding.forward(tokens)))
    }
}

/// A choice of two layers.
#[derive(Module, Debug)]
pub enum Either {
    Narrow(Linear),
    Wide(Linear),
}

/// A model with linear layers in every container of Burn's modules.
#[derive(Module, Debug)]
pub struct Containers {
    maybe: Option<Linear>,
    none: Option<Linear>,
    list: Vec<Linear>,
    array: [Linear; 2],
    tuple: (Linear, Linear),
    either: Either,
    other: Either,
}

impl Tried for Containers {
    const NAME: &'static str = "Option, Vec, array, tuple, enum";
    const LINEAR: [usize; 2] = [9, 0];

    fn new(device: &Device) -> Self {
        let linear = || LinearConfig::new(64, 64).init(device);
        Self {
            maybe: Some(linear()),
            none: None,
            list: vec![linear(), linear()],
            array: [linear(), linear()],
            tuple: (linear(), linear()),
            either: Either::Narrow(linear()),
            other: Either::Wide(linear()),
        }
    }

    fn run(&self, x: Tensor<3>) -> Vec<f64> {
        let either = |either: &Either, x| match either {
            Either::Narrow(linear) | Either::Wide(linear) => linear.forward(x),
        };
        let layers = self
            .maybe
            .iter()
            .chain(&self.none)
            .chain(&self.list)
            .chain(&self.array)
            .chain([&self.tuple.0, &self.tuple.1]);
        let x = layers.fold(x, |x, layer| layer.forward(x));
        values(either(&self.other, either(&self.either, x)))
    }
}

/// Returns a `Linear` with the id of `layer` and another tensor. Clones of one layer are in this
/// state after they were loaded from a safetensors file.
pub fn with_same_id(layer: &Linear, weight: Tensor<2>) -> Linear {
    Linear {
        weight: Param::initialized(layer.weight.id, weight),
        bias: layer.bias.clone(),
    }
}
