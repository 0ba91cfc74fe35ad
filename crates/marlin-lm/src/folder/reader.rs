//! Reading quantised weights from the files to the host, and reading ahead on a thread.

use std::borrow::Cow;
use std::path::Path;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::Scope;

use marlin_format::checkpoint::{
    Checkpoint, CheckpointError, LayerFormat, Quantization, is_float, layer_format, layer_tensors,
    read_layer, stacked,
};
use marlin_format::{GroupSize, PlainWeight};

use crate::ModelError;
use crate::architectures::{LayerShape, StackPart};
use crate::config::ModelConfig;
use crate::parallel::{ParallelError, RowGroups, Shard};

/// The number of projections that wait between the thread that reads and the device. With one
/// more in each thread, the host holds at most three; and of a mixture the experts of a block.
const WAITING: usize = 1;

/// The names of layers, each with those of its tensors, and the weights of the quantised ones.
type ReadLayers = (Vec<(String, Vec<String>)>, Vec<Option<PlainWeight>>);

/// Reads the quantised weights of a folder in the formats that its config gives them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerReader<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) config_path: &'a Path,
    pub(crate) quantization: Option<&'a Quantization>,
}

/// A layer on the host.
pub(super) enum HostLayer {
    /// A float layer, which has not been read.
    Float,
    /// A quantised weight.
    Quantized {
        format: LayerFormat,
        weight: PlainWeight,
        /// The tensors of the files that hold the weight.
        tensors: Vec<String>,
    },
}

/// The layers of a projection on the host.
pub(super) struct HostProjection {
    /// The names of the layers that were read, each with the names of its tensors.
    pub(super) read: Vec<(String, Vec<String>)>,
    pub(super) weights: HostWeights,
}

/// The weights of a projection.
pub(super) enum HostWeights {
    /// All layers side by side.
    Joined(PlainWeight),
    /// One weight for each layer; `None` for a float layer, which has not been read.
    Separate(Vec<Option<PlainWeight>>),
}

impl<'a> LayerReader<'a> {
    /// Reads a layer's weight if it is quantised.
    pub(super) fn layer(&self, layer: &LayerShape) -> Result<HostLayer, ModelError> {
        if let Some(part) = self.stack_of(layer) {
            return self.part_of_stack(layer, part);
        }
        let (name, [k, n]) = (layer.name.as_str(), layer.dims);
        let format = self.format(name)?;
        let stored = self.checkpoint.info(&format!("{name}.weight"));
        let is_stored_float = layer.is_float && stored.is_some_and(|of| is_float(of.dtype));
        if format == LayerFormat::Float || is_stored_float {
            return Ok(HostLayer::Float);
        }
        let weight = read_layer(self.checkpoint, name, &format)?;
        let tensors = layer_tensors(self.checkpoint, name, &format);
        if (weight.k(), weight.n()) != (k, n) {
            let first = tensors
                .first()
                .and_then(|tensor| self.checkpoint.info(tensor));
            let path = first
                .map_or_else(|| self.checkpoint.dir(), |info| info.path)
                .into();
            let (expected, found) = (vec![n, k], vec![weight.n(), weight.k()]);
            return Err(CheckpointError::Shape {
                path,
                tensor: format!("{name}.weight"),
                expected,
                found,
            }
            .into());
        }
        tracing::debug!(layer = name, %format, act_order = weight.row_permutation().is_some(), "read");
        Ok(HostLayer::Quantized {
            format,
            weight,
            tensors,
        })
    }

    /// Returns the format of a layer.
    fn format(&self, name: &str) -> Result<LayerFormat, ModelError> {
        layer_format(self.quantization, name).map_err(|source| ModelError::QuantizationConfig {
            path: self.config_path.into(),
            source,
        })
    }

    /// Returns the part of a stack that is this layer, if the files have the stack.
    pub(super) fn stack_of<'l>(&self, layer: &'l LayerShape) -> Option<&'l StackPart> {
        let part = layer.stack.as_ref()?;
        let is_there =
            self.checkpoint.contains(&part.name) || stacked::contains(self.checkpoint, &part.name);
        is_there.then_some(part)
    }

    /// Reads a layer of an expert from the stack of its block.
    fn part_of_stack(&self, layer: &LayerShape, part: &StackPart) -> Result<HostLayer, ModelError> {
        let has_own = ["weight", "weight_packed", "qweight"].iter().any(|tensor| {
            self.checkpoint
                .contains(&format!("{}.{tensor}", layer.name))
        });
        if has_own {
            return Err(ModelError::ExpertTwice {
                dir: self.checkpoint.dir().into(),
                layer: layer.name.clone(),
                stack: part.name.clone(),
            });
        }
        if !stacked::contains(self.checkpoint, &part.name) {
            return Ok(HostLayer::Float);
        }
        let format = self.format(&part.name)?;
        let tensors = layer_tensors(self.checkpoint, &part.name, &format);
        let weight = stacked::read_rows(self.checkpoint, &part.name, part.dims, &part.rows)?;
        let [k, _] = layer.dims;
        if weight.k() != k {
            let shape = |k: usize| [&part.dims[..], &[k / 32, 16]].concat();
            let first = tensors.first().map_or(part.name.as_str(), String::as_str);
            let info = self.checkpoint.info(first);
            let path = info.map_or_else(|| self.checkpoint.dir(), |info| info.path);
            return Err(CheckpointError::Shape {
                path: path.into(),
                tensor: first.into(),
                expected: shape(k),
                found: shape(weight.k()),
            }
            .into());
        }
        Ok(HostLayer::Quantized {
            format,
            weight,
            // The tensors are read when their last part is.
            tensors: if part.is_last() { tensors } else { Vec::new() },
        })
    }

    /// Returns the groups of a layer along K, from the config of its format; `None` for floats.
    fn group_size(&self, layer: &LayerShape) -> Result<Option<GroupSize>, ModelError> {
        let stack = self.stack_of(layer);
        if stack.is_none() && !self.checkpoint.contains_layer(&layer.name) {
            // A config may declare any number of blocks: the first that is missing is an error.
            self.layer(layer)?;
            self.checkpoint.tensor(&format!("{}.weight", layer.name))?;
        }
        let format = match stack {
            Some(part) if stacked::contains(self.checkpoint, &part.name) => {
                self.format(&part.name)?
            }
            Some(_) => LayerFormat::Float,
            None => self.format(&layer.name)?,
        };
        Ok(format.spec().map(|spec| spec.scales.group))
    }

    /// Returns the parts of the `count` ranks of a model.
    pub(super) fn shards(
        &self,
        config: &ModelConfig,
        count: usize,
    ) -> Result<Vec<Shard>, ModelError> {
        if count == 1 {
            return Ok(vec![Shard::whole(config)]);
        }
        let groups = RowGroups::of(
            config,
            |name| self.checkpoint.contains_layer(name),
            |layer| self.group_size(layer),
        )?;
        Ok(Shard::all(config, count, &groups)?)
    }

    /// Reads the layers of a projection, and joins them if their formats allow it.
    pub(super) fn projection(&self, layers: &[LayerShape]) -> Result<HostProjection, ModelError> {
        let (read, weights) = self.weights(layers)?;
        Ok(HostProjection {
            read,
            weights: self.join(layers, weights),
        })
    }

    /// Reads the layers of a projection once, and returns the parts of each rank. `of_ranks` has
    /// the layers of each rank.
    fn projections(&self, of_ranks: &[Vec<LayerShape>]) -> Result<Vec<HostProjection>, ModelError> {
        if let [layers] = of_ranks {
            return Ok(vec![self.projection(layers)?]);
        }
        let first = of_ranks.first().map_or(&[][..], Vec::as_slice);
        let whole: Vec<LayerShape> = first.iter().map(LayerShape::whole).collect();
        let (read, weights) = self.weights(&whole)?;
        let mut parts = Vec::new();
        for layers in of_ranks {
            let of_rank = layers.iter().zip(&weights).map(|(layer, weight)| {
                let weight = weight.as_ref();
                weight.map(|weight| part_of(layer, weight)).transpose()
            });
            let of_rank = of_rank.collect::<Result<Vec<_>, _>>()?;
            parts.push(HostProjection {
                read: read.clone(),
                weights: self.join(layers, of_rank),
            });
        }
        for weight in weights.into_iter().flatten() {
            self.checkpoint.recycle(weight);
        }
        Ok(parts)
    }

    /// Reads layers, and returns the names of each with those of its tensors, and the weights.
    fn weights(&self, layers: &[LayerShape]) -> Result<ReadLayers, ModelError> {
        let (mut read, mut weights) = (Vec::new(), Vec::new());
        for layer in layers {
            weights.push(match self.layer(layer)? {
                HostLayer::Float => None,
                HostLayer::Quantized {
                    weight, tensors, ..
                } => {
                    read.push((layer.name.clone(), tensors));
                    Some(weight)
                }
            });
        }
        Ok((read, weights))
    }

    fn join(&self, layers: &[LayerShape], weights: Vec<Option<PlainWeight>>) -> HostWeights {
        let quantized: Vec<&PlainWeight> = weights.iter().flatten().collect();
        if quantized.len() < weights.len() || quantized.len() < 2 {
            return HostWeights::Separate(weights);
        }
        match self.checkpoint.join(&quantized) {
            Ok(joined) => {
                for weight in weights.into_iter().flatten() {
                    self.checkpoint.recycle(weight);
                }
                HostWeights::Joined(joined)
            }
            Err(reason) => {
                let names: Vec<&str> = layers.iter().map(|layer| layer.name.as_str()).collect();
                tracing::debug!(layers = ?names, %reason, "a matmul for each layer");
                HostWeights::Separate(weights)
            }
        }
    }

    /// Reads the projections of a model on a thread of `scope`, in the order in which the model
    /// asks for them, and sends each rank its parts: while the devices receive one projection, the
    /// next is read. The thread ends after the last projection, after an error, which rank 0
    /// receives, or when a receiver is dropped.
    pub(super) fn read_ahead<'scope>(
        self,
        scope: &'scope Scope<'scope, '_>,
        shards: &'scope [Shard],
    ) -> Vec<Receiver<Result<HostProjection, ModelError>>>
    where
        'a: 'scope,
    {
        let (senders, receivers): (Vec<_>, Vec<_>) =
            shards.iter().map(|_| sync_channel(WAITING)).unzip();
        scope.spawn(move || {
            let layers_of = |shard: &'scope Shard| {
                shard.projections(|name| self.checkpoint.contains_layer(name))
            };
            let mut of_ranks: Vec<_> = shards.iter().map(layers_of).collect();
            loop {
                // All ranks have the same layers.
                let layers: Vec<_> = of_ranks.iter_mut().filter_map(Iterator::next).collect();
                if layers.is_empty() {
                    return;
                }
                let sent = match self.projections(&layers) {
                    Ok(parts) => {
                        let mut parts = senders.iter().zip(parts);
                        parts.all(|(sender, part)| sender.send(Ok(part)).is_ok())
                    }
                    Err(error) => {
                        if let Some(sender) = senders.first() {
                            // Rank 0 may have ended.
                            let _ = sender.send(Err(error));
                        }
                        false
                    }
                };
                if !sent {
                    return;
                }
            }
        });
        receivers
    }
}

/// Returns the part of a layer's weight that a rank has.
fn part_of(layer: &LayerShape, weight: &PlainWeight) -> Result<PlainWeight, ParallelError> {
    let failed = |source| ParallelError::Slice {
        layer: layer.name.clone(),
        source,
    };
    let Some(part) = &layer.part else {
        return Ok(weight.clone());
    };
    let rows = match part.has_all_rows() {
        true => Cow::Borrowed(weight),
        false => Cow::Owned(weight.slice_k(part.rows.clone()).map_err(failed)?),
    };
    if part.has_all_columns() {
        return Ok(rows.into_owned());
    }
    // A layer with several outputs has some columns of each.
    let slices = part.columns.iter().map(|range| rows.slice_n(range.clone()));
    let mut slices = slices.collect::<Result<Vec<_>, _>>().map_err(failed)?;
    if slices.len() == 1 {
        return Ok(slices.remove(0));
    }
    PlainWeight::join(&slices.iter().collect::<Vec<_>>()).map_err(|source| ParallelError::Join {
        layer: layer.name.clone(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use marlin_format::{FormatError, PlainParts, QuantSpec, quantize_rtn};

    use super::*;
    use crate::architectures::LayerPart;

    /// Returns a layer of 64 rows and 6 columns of which a rank has these.
    fn layer(rows: std::ops::Range<usize>, columns: Vec<std::ops::Range<usize>>) -> LayerShape {
        LayerShape {
            name: "model.layers.0.self_attn.o_proj".into(),
            dims: [rows.len(), columns.iter().map(ExactSizeIterator::len).sum()],
            bias: false,
            is_float: false,
            stack: None,
            part: Some(LayerPart {
                dims: [64, 6],
                columns,
                rows,
            }),
        }
    }

    fn weight() -> PlainWeight {
        let values: Vec<f32> = (0..64 * 6).map(|index| (index % 17) as f32 - 8.0).collect();
        quantize_rtn(&values, 64, 6, &QuantSpec::int4(GroupSize::G32)).unwrap()
    }

    #[test]
    fn a_rank_has_some_columns_of_each_output() {
        let (weight, columns) = (weight(), vec![1..2, 4..6]);
        let part = part_of(&layer(0..64, columns.clone()), &weight).unwrap();
        let (whole, found) = (weight.dequantize(), part.dequantize());
        let expected: Vec<f32> = (0..64)
            .flat_map(|row| [1, 4, 5].map(|column| whole[row * 6 + column]))
            .collect();
        assert_eq!(found, expected);
        // One output has all columns.
        let columns = vec![0..6; 1];
        let rows = part_of(&layer(32..64, columns), &weight).unwrap();
        assert_eq!(rows.dequantize(), whole[32 * 6..]);
    }

    #[test]
    fn act_order_in_a_layer_that_is_split_by_rows_is_refused() {
        let parts = PlainParts {
            row_permutation: Some((0..64).rev().collect()),
            ..weight().into_parts()
        };
        let weight = PlainWeight::new(parts).unwrap();
        let columns = vec![0..6; 1];
        let refused = part_of(&layer(32..64, columns), &weight);
        assert_eq!(
            refused,
            Err(ParallelError::Slice {
                layer: "model.layers.0.self_attn.o_proj".into(),
                source: FormatError::SlicePermuted,
            })
        );
        // Columns can be split.
        assert!(part_of(&layer(0..64, vec![0..3; 1]), &weight).is_ok());
    }
}
