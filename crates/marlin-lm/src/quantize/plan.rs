//! The tensors of a folder that is to be quantised.

use std::borrow::Cow;
use std::ops::Range;

use marlin_format::checkpoint::{
    Checkpoint, CheckpointError, CheckpointWriter, Dtype, TensorSpec, TensorView, stacked,
};
use marlin_format::{PlainWeight, QuantSpec, WeightDescriptor, WeightFormat, memory_short_of};
use rayon::prelude::*;

use super::overrides::Overrides;
use super::readers::{ExpertSettings, ReadLayer, Role, Warnings};
use super::{EMBEDDING, FileFormat, HEAD, QuantizeOptions};
use crate::ModelError;
use crate::architectures::{LayerShape, StackPart, StackShape};
use crate::config::ModelConfig;

/// The plan for a tensor of the source, or for a part of it.
pub(super) struct Plan<'a> {
    pub(super) view: TensorView<'a>,
    part: Part,
    pub(super) target: Target,
    /// The spec of a quantised layer.
    pub(super) spec: QuantSpec,
    /// True if another plan copies the tensor: the embedding, whose values the head has, too.
    pub(super) is_copied_too: bool,
}

/// The part of a tensor that a plan is for.
enum Part {
    /// Rows of the tensor: all, or the rows of one of several layers of the target.
    Rows(Range<usize>),
    /// A layer of one expert in a stack, or its bias, which has the K 1.
    OfExpert { k: usize, stack: StackPart },
}

/// The tensors to write for a plan.
pub(super) enum Target {
    /// An unchanged tensor with this name.
    Copy(String),
    /// A quantised layer with this name.
    Quantize(String),
}

/// Plans every tensor of a checkpoint. Refuses layers that cannot be quantised or written as
/// requested, experts of a block with different settings, and exclusions and overrides that match
/// no layer. Warns of layers that only some readers accept. `common` is the spec of layers that are
/// not overridden.
pub(super) fn plan<'a>(
    checkpoint: &'a Checkpoint,
    config: &ModelConfig,
    common: &QuantSpec,
    options: &QuantizeOptions,
    mut overrides: Overrides,
    excluded: &mut Vec<String>,
) -> Result<Vec<Plan<'a>>, ModelError> {
    let (format, sparsity, act_order) =
        (options.format, options.sparsity, options.method.act_order());
    let head = options.head.filter(|_| !overrides.excludes(HEAD));
    let head_source = match checkpoint.contains(&format!("{HEAD}.weight")) {
        true => HEAD,
        false => EMBEDDING,
    };
    let mut plans = Vec::new();
    let mut experts = ExpertSettings::default();
    let mut warnings = Warnings::default();
    for name in checkpoint.names() {
        let view = checkpoint.tensor(name)?;
        let is_quantized = [".weight_packed", ".qweight", ".experts.down_proj_blocks"]
            .iter()
            .any(|end| name.ends_with(end));
        if is_quantized {
            return Err(ModelError::AlreadyQuantized {
                path: view.path().into(),
            });
        }
        let layer = name.strip_suffix(".weight");
        if let (Some(spec), &[n, k]) = (head, view.shape())
            && layer == Some(head_source)
        {
            let is_tied = head_source != HEAD;
            plans.push(head_plan(view, [k, n], spec, options, is_tied)?);
            let read = ReadLayer {
                role: Role::Head,
                k,
                spec: Some(spec),
                is_bf16: view.dtype() == Dtype::BF16,
            };
            warnings.add(HEAD, format.reasons(&read, common, act_order));
            if !is_tied {
                continue;
            }
        }
        let mut parts: Vec<(String, [usize; 2], Part)> = Vec::new();
        let targets = layer.and_then(|layer| Some((layer, targets_of(config, layer, format)?)));
        if let (Some((_, layers)), &[n, k]) = (&targets, view.shape()) {
            let n = n / layers.len();
            for (index, layer) in layers.iter().enumerate() {
                let rows = Part::Rows(index * n..(index + 1) * n);
                parts.push((layer.clone(), [k, n], rows));
            }
        } else if let Some(stack) = stack_of(config, name) {
            let layers = stack.layers.iter().map(|(layer, _)| layer.name.as_str());
            if layers
                .clone()
                .all(|layer| overrides.spec_of([&stack.name, layer]).is_none())
            {
                // Experts that stay float stay in one tensor, too: transformers reads those of
                // gpt-oss in no other form.
                if !stack.is_bias {
                    let read = ReadLayer {
                        role: Role::FloatStack,
                        k: view.shape().last().copied().unwrap_or(1),
                        spec: None,
                        is_bf16: view.dtype() == Dtype::BF16,
                    };
                    warnings.add(&stack.name, format.reasons(&read, common, act_order));
                    for layer in layers {
                        experts.role(config, layer, None, false)?;
                        excluded.push(layer.into());
                    }
                }
                plans.push(Plan::copy_whole(view, *common));
                continue;
            }
            for (layer, part) in stack.layers {
                let [k, n] = layer.dims;
                if stack.is_bias {
                    let part = Part::OfExpert { k: 1, stack: part };
                    plans.push(Plan::copy(
                        view,
                        part,
                        format!("{}.bias", layer.name),
                        *common,
                    ));
                } else {
                    parts.push((layer.name, [k, n], Part::OfExpert { k, stack: part }));
                }
            }
            if stack.is_bias {
                continue;
            }
        } else {
            overrides.stays(layer.unwrap_or(name));
            plans.push(Plan::copy_whole(view, *common));
            continue;
        }
        let is_split = parts.len() > 1;
        for (layer, [k, n], part) in parts {
            let chosen = overrides.spec_of([layer_of(name), &layer]);
            let read = ReadLayer {
                role: experts.role(config, &layer, chosen, is_split)?,
                k,
                spec: chosen,
                is_bf16: view.dtype() == Dtype::BF16,
            };
            warnings.add(&layer, format.reasons(&read, common, act_order));
            if let Some(spec) = chosen {
                let weight_format = WeightFormat::dense(spec)
                    .with_sparsity(sparsity)
                    .with_permutation(act_order);
                check(&layer, weight_format, [k, n], options)?;
                plans.push(Plan {
                    view,
                    part,
                    target: Target::Quantize(layer),
                    spec,
                    is_copied_too: false,
                });
            } else {
                plans.push(Plan::copy(view, part, format!("{layer}.weight"), *common));
                excluded.push(layer);
            }
        }
    }
    // A tied head has no tensor.
    overrides.stays(HEAD);
    overrides.check_used()?;
    warnings.log();
    Ok(plans)
}

/// Plans the output head, whose weight is `view`.
fn head_plan<'a>(
    view: TensorView<'a>,
    [k, n]: [usize; 2],
    spec: QuantSpec,
    options: &QuantizeOptions,
    is_copied_too: bool,
) -> Result<Plan<'a>, ModelError> {
    if options.format == FileFormat::Marlin24 {
        return Err(ModelError::DenseHead);
    }
    check(HEAD, WeightFormat::dense(spec), [k, n], options)?;
    Ok(Plan {
        view,
        part: Part::Rows(0..n),
        target: Target::Quantize(HEAD.into()),
        spec,
        is_copied_too,
    })
}

/// Checks that a layer [K, N] can be quantised and written in the target's format, and that the
/// host has the memory.
fn check(
    layer: &str,
    weight_format: WeightFormat,
    [k, n]: [usize; 2],
    options: &QuantizeOptions,
) -> Result<(), ModelError> {
    let descriptor = WeightDescriptor::plain(weight_format, k, n);
    descriptor.check().map_err(|source| ModelError::Quantize {
        layer: layer.into(),
        source,
    })?;
    // The values in f32, as read and transposed, and the quantised values.
    let needed = k.saturating_mul(n).saturating_mul(4 + 4 + 1);
    if let Some(available) = memory_short_of(needed) {
        return Err(CheckpointError::LayerTooLarge {
            layer: layer.into(),
            needed,
            available,
        }
        .into());
    }
    options
        .format
        .check(layer, k, n, &weight_format.spec, weight_format.permuted)
}

/// Returns the layers of the target for a layer of the model with this name: one, or several that
/// the format splits it into. `None` for a layer that is not quantised.
fn targets_of(config: &ModelConfig, layer: &str, format: FileFormat) -> Option<Vec<String>> {
    let (block, name) = layer.strip_prefix("model.layers.")?.split_once('.')?;
    let block = block
        .parse()
        .ok()
        .filter(|&block: &usize| block < config.num_hidden_layers)?;
    let shape = config.block(block);
    let experts = shape.experts();
    if experts.is_some_and(|experts| experts.has_layer(name)) {
        return Some(vec![layer.into()]);
    }
    let projection = shape.projections().find(|projection| {
        projection
            .names()
            .any(|of_projection| of_projection == name)
    })?;
    Some(format.names(layer, projection))
}

/// The layers of experts that a tensor holds, or their biases.
struct Stack {
    /// The name of the tensor of weights.
    name: String,
    layers: Vec<(LayerShape, StackPart)>,
    is_bias: bool,
}

/// Returns the layers that a tensor with this name holds for all experts of a block; `None` if it
/// is no such tensor.
fn stack_of(config: &ModelConfig, name: &str) -> Option<Stack> {
    let (stack, is_bias) = match name.strip_suffix("_bias") {
        Some(stack) => (stack, true),
        None => (name, false),
    };
    if !StackShape::NAMES.iter().any(|end| stack.ends_with(end)) {
        return None;
    }
    let (block, _) = stack.strip_prefix("model.layers.")?.split_once('.')?;
    let number = block.parse::<usize>().ok();
    let number = number.filter(|&number| number < config.num_hidden_layers)?;
    let (shape, block) = (config.block(number), format!("model.layers.{block}"));
    let experts = shape.experts()?.experts_of(&block);
    let layers = experts.flat_map(|expert| expert.gate_up.into_iter().chain([expert.down]));
    let layers: Vec<(LayerShape, StackPart)> = layers
        .filter_map(|layer| Some((layer.clone(), layer.stack?)))
        .filter(|(_, part)| part.name == stack)
        .collect();
    (!layers.is_empty()).then(|| Stack {
        name: stack.into(),
        layers,
        is_bias,
    })
}

/// Returns the layer's name in the source, or the tensor's name if the tensor is not a weight.
fn layer_of(tensor: &str) -> &str {
    tensor.strip_suffix(".weight").unwrap_or(tensor)
}

impl<'a> Plan<'a> {
    /// Plans the copy of a part of a tensor to the tensor `name`. `spec` is not used.
    fn copy(view: TensorView<'a>, part: Part, name: String, spec: QuantSpec) -> Self {
        Self {
            view,
            part,
            target: Target::Copy(name),
            spec,
            is_copied_too: false,
        }
    }

    /// Plans the copy of a whole tensor. `spec` is not used.
    fn copy_whole(view: TensorView<'a>, spec: QuantSpec) -> Self {
        let rows = Part::Rows(0..view.shape().first().copied().unwrap_or(1));
        let name = view.name().into();
        Self::copy(view, rows, name, spec)
    }
}

impl Plan<'_> {
    /// Returns the layer's name in the source, or the tensor's name if the tensor is not a weight.
    pub(super) fn source(&self) -> &str {
        layer_of(self.view.name())
    }

    /// Returns the layer's name in the target, or the tensor's name if the tensor is not a weight.
    pub(super) fn layer(&self) -> &str {
        match &self.target {
            Target::Quantize(layer) => layer,
            Target::Copy(name) => layer_of(name),
        }
    }

    /// Returns the number of input features of a layer.
    pub(super) fn k(&self) -> usize {
        match self.part {
            Part::Rows(_) => self.view.shape().last().copied().unwrap_or(1),
            Part::OfExpert { k, .. } => k,
        }
    }

    /// Returns the number of output features of a layer.
    pub(super) fn n(&self) -> usize {
        match &self.part {
            Part::Rows(rows) => rows.len(),
            Part::OfExpert { stack, .. } => stack.rows.count,
        }
    }

    /// Returns the specs of the tensors to write.
    pub(super) fn specs(&self, format: FileFormat) -> Vec<TensorSpec> {
        match &self.target {
            Target::Copy(name) => {
                let shape = match &self.part {
                    Part::Rows(rows) => {
                        let mut shape = self.view.shape().to_vec();
                        if let Some(count) = shape.first_mut() {
                            *count = rows.len();
                        }
                        shape
                    }
                    Part::OfExpert { .. } if self.view.shape().len() == 2 => vec![self.n()],
                    Part::OfExpert { k, .. } => vec![self.n(), *k],
                };
                vec![TensorSpec::new(name, self.view.dtype(), shape)]
            }
            Target::Quantize(layer) => format.tensor_specs(layer, self.k(), self.n(), &self.spec),
        }
    }

    /// Returns the size of the part in bytes.
    pub(super) fn size_bytes(&self) -> usize {
        let elements = self.view.shape().iter().product::<usize>().max(1);
        let part = match &self.part {
            Part::Rows(rows) => {
                let count = self.view.shape().first().map_or(1, |&rows| rows.max(1));
                elements / count * rows.len()
            }
            Part::OfExpert { k, stack } => k * stack.rows.count,
        };
        self.view.bytes().len() / elements * part
    }

    /// Returns the bytes of the part, [N, K].
    pub(super) fn bytes(&self) -> Result<Cow<'_, [u8]>, ModelError> {
        Ok(match &self.part {
            Part::Rows(rows) => {
                let count = self.view.shape().first().map_or(1, |&rows| rows.max(1));
                let row_bytes = self.view.bytes().len() / count;
                Cow::Borrowed(&self.view.bytes()[rows.start * row_bytes..rows.end * row_bytes])
            }
            Part::OfExpert { k, stack } => {
                let [experts, rows] = stack.dims;
                let (dims, has_k_first) = ([experts, rows, *k], stack.shape.has_k_first);
                stacked::float_rows(&self.view, dims, has_k_first, &stack.rows)?.into()
            }
        })
    }

    /// Returns the weight of a layer, [K, N] in f32.
    pub(super) fn weight(&self) -> Result<Vec<f32>, ModelError> {
        let (k, n, bytes) = (self.k(), self.n(), self.bytes()?);
        let values = self.view.with_bytes(&[n, k], &bytes).to_f32()?;
        Ok(transposed(&values, n, k))
    }

    /// Writes the tensors of a layer. Returns their size in bytes, and the number of bits per
    /// weight.
    pub(super) fn write(
        &self,
        layer: &str,
        weight: &PlainWeight,
        format: FileFormat,
        writer: &mut CheckpointWriter,
    ) -> Result<(usize, f64), ModelError> {
        let failed = |source| ModelError::Quantize {
            layer: layer.into(),
            source,
        };
        let stored = format.stored(weight).map_err(failed)?;
        let mut bytes = 0;
        for tensor in format.tensors_of(layer, &stored).map_err(failed)? {
            bytes += tensor.bytes.len();
            writer.write_tensor(&tensor.spec.name, &tensor.bytes)?;
        }
        Ok((bytes, stored.bits_per_weight()))
    }
}

/// Transposes `[rows, columns]` to `[columns, rows]`, in blocks that stay in the CPU cache.
fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    const BLOCK: usize = 32;
    let mut out = vec![0.0; values.len()];
    out.par_chunks_mut(BLOCK * rows.max(1))
        .enumerate()
        .for_each(|(block, lines)| {
            let first_column = block * BLOCK;
            for first_row in (0..rows).step_by(BLOCK) {
                for row in first_row..rows.min(first_row + BLOCK) {
                    for (line, column) in
                        (first_column..columns.min(first_column + BLOCK)).enumerate()
                    {
                        lines[line * rows + row] = values[row * columns + column];
                    }
                }
            }
        });
    out
}
