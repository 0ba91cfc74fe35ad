//! The model's tensors by their names in Hugging Face checkpoints: the tensors that random weights
//! and files provide, and those that are saved.

use std::ops::Range;

use burn::module::{Param, ParamId};
use burn::nn::{Embedding, Linear};
use burn::tensor::{DType, Device, Distribution, StreamId, Tensor};
use burn_marlin::{ActivationDtype, QuantLinear, QuantizedWeight};
use marlin_format::WeightFormat;
use marlin_kernels::{Epilogue, Prologue};

use super::{Attention, Layer, LlamaModel, Mlp, Projection, ProjectionGroup, RmsNorm, Rope};
use crate::config::{Declaration, LlamaConfig, MLP_INPUTS_APART};

/// A source of weights by name, without `.weight`: `model.layers.0.self_attn.q_proj`.
pub(crate) trait WeightSource {
    type Error;

    /// [rows, features].
    fn embedding(&mut self, name: &str, shape: [usize; 2])
    -> Result<Param<Tensor<2>>, Self::Error>;

    /// `[features]`.
    fn norm(&mut self, name: &str, features: usize) -> Result<Param<Tensor<1>>, Self::Error>;

    /// A layer.
    fn projection(&mut self, layer: &LayerShape) -> Result<Projection, Self::Error>;

    /// True if it has a layer of this name.
    fn contains(&self, name: &str) -> bool;

    /// Layers of the same K: one projection with their outputs side by side, or one for each.
    fn projections(&mut self, layers: &[LayerShape]) -> Result<Vec<Projection>, Self::Error>;
}

/// A linear layer as a checkpoint holds it.
#[derive(Debug, Clone)]
pub(crate) struct LayerShape {
    /// Its name, without `.weight`.
    pub(crate) name: String,
    /// [K, N].
    pub(crate) dims: [usize; 2],
    /// True for a layer with a bias.
    pub(crate) bias: bool,
}

/// The contents of a checkpoint under one name.
pub(crate) enum Part<'a> {
    Embedding(&'a Embedding),
    Norm(&'a RmsNorm),
    /// Columns of N of a projection.
    Projection {
        projection: &'a Projection,
        columns: Range<usize>,
    },
}

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
    /// The product alone.
    pub(crate) fn plain(name: &str, projection: &'a Projection) -> Self {
        Self {
            name: name.into(),
            projection,
            prologue: Prologue::None,
            epilogue: Epilogue::None,
        }
    }
}

/// The layers that a checkpoint has for the outputs of a group, and which of all outputs' columns
/// each of them makes: `names` has one for each output, or one for all of them.
fn layers_of<'a>(
    names: &'a [&'a str],
    outputs: &'a [usize],
) -> impl Iterator<Item = (&'a str, Range<usize>)> {
    let all = outputs.iter().sum();
    let mut end = 0;
    names.iter().zip(outputs).map(move |(name, &output)| {
        let start = end;
        end = if names.len() == 1 {
            all
        } else {
            start + output
        };
        (*name, start..end)
    })
}

impl LlamaModel {
    /// Builds a model for `max_len` positions.
    pub(crate) fn assemble<S: WeightSource>(
        config: &LlamaConfig,
        max_len: usize,
        device: &Device,
        source: &mut S,
    ) -> Result<Self, S::Error> {
        let hidden = config.hidden_size;
        let embed_tokens = Embedding {
            weight: source.embedding("model.embed_tokens", [config.vocab_size, hidden])?,
        };
        let mut layers = Vec::new();
        for index in 0..config.num_hidden_layers {
            layers.push(load_layer(config, source, index)?);
        }
        let norm = norm(config, source, "model.norm".into(), hidden)?;
        let lm_head = match config.tie_word_embeddings {
            true => None,
            false => Some(source.projection(&LayerShape {
                name: "lm_head".into(),
                dims: [hidden, config.vocab_size],
                bias: false,
            })?),
        };
        Ok(Self {
            embed_tokens,
            layers,
            norm,
            lm_head,
            rope: Rope::new(config, max_len, device),
            config: config.clone(),
            stream: StreamId::current(),
        })
    }

    /// Every projection, the head included, under its name in a checkpoint. Projections that are
    /// one matmul come once, as `qkv_proj` and `gate_up_proj`, whatever the names of their parts.
    pub fn projections(&self) -> impl Iterator<Item = (String, &Projection)> {
        let head = self
            .lm_head
            .iter()
            .map(|head| ("lm_head".to_string(), head));
        self.layer_products()
            .map(|product| (product.name, product.projection))
            .chain(head)
    }

    /// Every projection of the layers, in the order in which they run.
    pub(crate) fn layer_products(&self) -> impl Iterator<Item = Product<'_>> {
        self.layers.iter().enumerate().flat_map(|(index, layer)| {
            let Layer { self_attn, mlp, .. } = layer;
            let declaration = self.declaration();
            let mut products = named(
                &self_attn.qkv_proj,
                "self_attn.qkv_proj",
                "self_attn",
                declaration.attention_inputs,
            );
            products.push(Product::plain("self_attn.o_proj", &self_attn.o_proj));
            let epilogue = mlp
                .gate_up_proj
                .joined()
                .map_or(Epilogue::None, |_| Epilogue::SwiGlu);
            let gate_up = named(
                &mlp.gate_up_proj,
                "mlp.gate_up_proj",
                "mlp",
                declaration.mlp_inputs,
            );
            products.extend(gate_up.into_iter().map(|product| Product {
                epilogue,
                ..product
            }));
            products.push(Product::plain("mlp.down_proj", &mlp.down_proj));
            if index == 0 {
                // Nothing is added to the stream before the first norm, which is a kernel of its
                // own.
                products[0].prologue = Prologue::None;
            }
            products.into_iter().map(move |product| Product {
                name: format!("model.layers.{index}.{}", product.name),
                ..product
            })
        })
    }

    /// The parts of a checkpoint of this model, by name.
    pub(crate) fn parts(&self) -> Vec<(String, Part<'_>)> {
        let declaration = self.declaration();
        let whole = |projection| Part::Projection {
            projection,
            columns: 0..projection.dims()[1],
        };
        let mut parts = vec![(
            "model.embed_tokens".to_string(),
            Part::Embedding(&self.embed_tokens),
        )];
        for (index, layer) in self.layers.iter().enumerate() {
            let Layer { self_attn, mlp, .. } = layer;
            let mut of_layer = vec![(
                "input_layernorm".to_string(),
                Part::Norm(&layer.input_layernorm),
            )];
            of_layer.extend(group_parts(
                &self_attn.qkv_proj,
                "self_attn",
                declaration.attention_inputs,
            ));
            let head_norms = [
                ("self_attn.q_norm", &self_attn.q_norm),
                ("self_attn.k_norm", &self_attn.k_norm),
            ];
            of_layer.extend(
                head_norms.into_iter().filter_map(|(name, norm)| {
                    Some((name.to_string(), Part::Norm(norm.as_ref()?)))
                }),
            );
            of_layer.push(("self_attn.o_proj".into(), whole(&self_attn.o_proj)));
            of_layer.push((
                "post_attention_layernorm".into(),
                Part::Norm(&layer.post_attention_layernorm),
            ));
            of_layer.extend(group_parts(
                &mlp.gate_up_proj,
                "mlp",
                declaration.mlp_inputs,
            ));
            of_layer.push(("mlp.down_proj".into(), whole(&mlp.down_proj)));
            parts.extend(
                of_layer
                    .into_iter()
                    .map(|(name, part)| (format!("model.layers.{index}.{name}"), part)),
            );
        }
        parts.push(("model.norm".to_string(), Part::Norm(&self.norm)));
        parts.extend(
            self.lm_head
                .as_ref()
                .map(|head| ("lm_head".to_string(), whole(head))),
        );
        parts
    }

    fn declaration(&self) -> &'static Declaration {
        self.config().architecture.declaration()
    }
}

/// Block `index` of a model.
pub(crate) fn load_layer<S: WeightSource>(
    config: &LlamaConfig,
    source: &mut S,
    index: usize,
) -> Result<Layer, S::Error> {
    let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
    let (query, key_value) = (config.query_size(), config.key_value_size());
    Ok(Layer {
        input_layernorm: norm(
            config,
            source,
            format!("model.layers.{index}.input_layernorm"),
            hidden,
        )?,
        self_attn: attention(config, source, index, [query, key_value, key_value])?,
        post_attention_layernorm: norm(
            config,
            source,
            format!("model.layers.{index}.post_attention_layernorm"),
            hidden,
        )?,
        mlp: mlp(
            config,
            source,
            &format!("model.layers.{index}.mlp"),
            [intermediate, intermediate],
        )?,
    })
}

fn norm<S: WeightSource>(
    config: &LlamaConfig,
    source: &mut S,
    name: String,
    features: usize,
) -> Result<RmsNorm, S::Error> {
    Ok(RmsNorm {
        weight: source.norm(&name, features)?,
        epsilon: config.rms_norm_eps,
    })
}

/// `outputs` are the features of queries, keys and values.
fn attention<S: WeightSource>(
    config: &LlamaConfig,
    source: &mut S,
    layer: usize,
    outputs: [usize; 3],
) -> Result<Attention, S::Error> {
    let name = &format!("model.layers.{layer}.self_attn");
    let declaration = config.architecture.declaration();
    let mut head_norm = |part: &str| -> Result<Option<RmsNorm>, S::Error> {
        declaration
            .qk_norm
            .then(|| norm(config, source, format!("{name}.{part}"), config.head_dim))
            .transpose()
    };
    let (q_norm, k_norm) = (head_norm("q_norm")?, head_norm("k_norm")?);
    let out = LayerShape {
        name: format!("{name}.o_proj"),
        dims: [outputs[0], config.hidden_size],
        bias: config.output_bias(),
    };
    Ok(Attention {
        qkv_proj: group(
            config,
            source,
            name,
            declaration.attention_inputs,
            &outputs,
            config.attention_bias,
        )?,
        q_norm,
        k_norm,
        o_proj: source.projection(&out)?,
        heads: config.num_attention_heads,
        kv_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
        window: config.window_of(layer),
    })
}

/// `outputs` are the features of gate and up.
fn mlp<S: WeightSource>(
    config: &LlamaConfig,
    source: &mut S,
    name: &str,
    outputs: [usize; 2],
) -> Result<Mlp, S::Error> {
    let inputs = config.architecture.declaration().mlp_inputs;
    let apart = |input: &&str| source.contains(&format!("{name}.{input}"));
    let inputs = if inputs.len() == 1 && MLP_INPUTS_APART.iter().any(apart) {
        MLP_INPUTS_APART
    } else {
        inputs
    };
    let down = LayerShape {
        name: format!("{name}.down_proj"),
        dims: [outputs[0], config.hidden_size],
        bias: config.mlp_bias,
    };
    Ok(Mlp {
        gate_up_proj: group(config, source, name, inputs, &outputs, config.mlp_bias)?,
        down_proj: source.projection(&down)?,
    })
}

fn group<S: WeightSource>(
    config: &LlamaConfig,
    source: &mut S,
    parent: &str,
    names: &[&str],
    outputs: &[usize],
    bias: bool,
) -> Result<ProjectionGroup, S::Error> {
    let shape = |(name, columns): (&str, Range<usize>)| LayerShape {
        name: format!("{parent}.{name}"),
        dims: [config.hidden_size, columns.len()],
        bias,
    };
    let layers: Vec<LayerShape> = layers_of(names, outputs).map(shape).collect();
    Ok(ProjectionGroup::new(
        source.projections(&layers)?,
        outputs.to_vec(),
    ))
}

/// The projections of a group: `joined` if they are one matmul, or under the names that a
/// checkpoint has for them below `parent`.
fn named<'a>(
    group: &'a ProjectionGroup,
    joined: &str,
    parent: &str,
    names: &[&str],
) -> Vec<Product<'a>> {
    let product = |name: &str, projection| Product {
        prologue: group.prologue(),
        ..Product::plain(name, projection)
    };
    match group.joined() {
        Some(projection) => vec![product(joined, projection)],
        None => {
            let names = apart(group, names)
                .iter()
                .map(|name| format!("{parent}.{name}"));
            names
                .zip(group.projections())
                .map(|(name, projection)| product(&name, projection))
                .collect()
        }
    }
}

/// The parts of a group in a checkpoint.
fn group_parts<'a>(
    group: &'a ProjectionGroup,
    parent: &str,
    names: &[&str],
) -> Vec<(String, Part<'a>)> {
    let part = |(index, (name, columns)): (usize, (&str, Range<usize>))| {
        let part = match group.joined() {
            Some(projection) => Part::Projection {
                projection,
                columns,
            },
            None => Part::Projection {
                projection: &group.projections()[index],
                columns: 0..columns.len(),
            },
        };
        (format!("{parent}.{name}"), part)
    };
    let names = if group.joined().is_some() {
        names
    } else {
        apart(group, names)
    };
    layers_of(names, group.outputs())
        .enumerate()
        .map(part)
        .collect()
}

/// The names of a group's projections where each output has its own: those of its architecture, or
/// those of a file that has apart what the architecture has in one.
fn apart<'n>(group: &ProjectionGroup, names: &'n [&'n str]) -> &'n [&'n str] {
    if names.len() < group.projections().len() {
        MLP_INPUTS_APART
    } else {
        names
    }
}

/// Random weights, as Hugging Face initialises these models: normal with a standard deviation of
/// 0.02, biases 0, norms 1.
pub(crate) struct RandomWeights<'a> {
    pub(crate) device: &'a Device,
    pub(crate) dtype: DType,
    /// The format of the projections of the layers; float without one.
    pub(crate) format: Option<WeightFormat>,
}

impl RandomWeights<'_> {
    fn normal(&self, shape: [usize; 2]) -> Tensor<2> {
        Tensor::random(
            shape,
            Distribution::Normal(0.0, 0.02),
            (self.device, self.dtype),
        )
    }
}

impl WeightSource for RandomWeights<'_> {
    type Error = burn_marlin::Error;

    fn embedding(&mut self, _: &str, shape: [usize; 2]) -> Result<Param<Tensor<2>>, Self::Error> {
        Ok(Param::from_tensor(self.normal(shape)))
    }

    fn norm(&mut self, _: &str, features: usize) -> Result<Param<Tensor<1>>, Self::Error> {
        Ok(Param::from_tensor(Tensor::ones(
            [features],
            (self.device, self.dtype),
        )))
    }

    fn projection(&mut self, layer: &LayerShape) -> Result<Projection, Self::Error> {
        let [k, n] = layer.dims;
        let bias = layer
            .bias
            .then(|| Tensor::zeros([n], (self.device, self.dtype)));
        match self.format.filter(|_| layer.name != "lm_head") {
            // Transposed as those of checkpoints are.
            None => Ok(Projection::Dense(Linear {
                weight: Param::from_tensor(self.normal([n, k]).transpose()),
                bias: bias.map(Param::from_tensor),
            })),
            Some(format) => {
                let activations = ActivationDtype::from(format.spec.scale_dtype);
                Ok(Projection::Quant(QuantLinear::new(
                    QuantizedWeight::random(k, n, format, activations, self.device)?,
                    bias,
                )?))
            }
        }
    }

    fn contains(&self, _: &str) -> bool {
        false
    }

    fn projections(&mut self, layers: &[LayerShape]) -> Result<Vec<Projection>, Self::Error> {
        let [first, ..] = layers else {
            return Ok(Vec::new());
        };
        let n = layers.iter().map(|layer| layer.dims[1]).sum();
        Ok(vec![self.projection(&LayerShape {
            dims: [first.dims[0], n],
            ..first.clone()
        })?])
    }
}

/// A parameter of a model that was loaded from a file.
pub(crate) fn loaded<const D: usize>(tensor: Tensor<D>) -> Param<Tensor<D>> {
    Param::initialized(ParamId::new(), tensor)
}
