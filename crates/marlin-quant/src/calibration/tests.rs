//! Tests of a calibration, with a model of two groups of linear layers.

use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use marlin_format::{GroupSize, QuantSpec, Sparsity};
use rand::rngs::StdRng;

use super::*;
use crate::tests::{activations, random, rng, tensor};
use crate::{GptqOptions, Rounding};

const INT4: QuantSpec = QuantSpec::int4(GroupSize::G32);
const INT8: QuantSpec = QuantSpec::int8(GroupSize::G32);
const TOKENS: usize = 150;

/// A model `relu(x A) B`. The columns of `A` are three layers, and columns that are not quantised;
/// `B` is one layer.
#[derive(Clone)]
struct Net {
    weights: [Tensor<2>; 2],
    groups: [Vec<GroupLayer>; 2],
    scales: [Option<Vec<f32>>; 2],
    /// The inputs of the next group in the quantised and in the float model, for each batch.
    batches: Vec<[Tensor<2>; 2]>,
    next: usize,
    /// True if the second moments of the first batch are summed before the calibration.
    knows_first: bool,
    quantized: Vec<CalibratedLayer>,
    kept: Vec<usize>,
}

/// The errors of the model: those of layers, and that of a callback.
#[derive(Debug, PartialEq)]
enum Failure {
    Layer(LayerError),
    Stopped,
}

impl From<LayerError> for Failure {
    fn from(error: LayerError) -> Self {
        Self::Layer(error)
    }
}

fn layer(name: &str, spec: QuantSpec, columns: Range<usize>) -> GroupLayer {
    GroupLayer {
        name: name.into(),
        spec,
        columns,
    }
}

impl Net {
    fn new(rng: &mut StdRng) -> Self {
        let batch = |rng: &mut StdRng| {
            let x = tensor(activations(TOKENS, 64, rng), 64);
            [x.clone(), x]
        };
        Self {
            batches: (0..3).map(|_| batch(rng)).collect(),
            weights: [
                tensor(random(64 * 60, rng), 60),
                tensor(random(60 * 20, rng), 20),
            ],
            groups: [
                vec![
                    layer("first", INT4, 0..20),
                    layer("wide", INT8, 20..33),
                    layer("last", INT4, 40..60),
                ],
                vec![layer("down", INT4, 0..20)],
            ],
            scales: [None, None],
            next: 0,
            knows_first: false,
            quantized: Vec::new(),
            kept: Vec::new(),
        }
    }

    /// Returns the inputs of a batch.
    fn inputs(&self, batch: usize) -> LayerInputs {
        let [quantized, float] = self.batches[batch].clone();
        LayerInputs {
            quantized,
            float: Some(FloatActivations::Inputs(float)),
        }
    }

    /// Returns the second moments of the inputs of all batches.
    fn sums(&self) -> HessianSums {
        let mut sums = HessianSums::new(self.batches[0][0].dims()[1], &Device::flex());
        for [quantized, float] in self.batches.clone() {
            sums.add_beside(quantized, float).unwrap();
        }
        sums
    }

    /// Runs the batches past the next group.
    fn pass(&mut self, values: Tensor<2>) {
        let float = self.weights[self.next].clone();
        for [quantized, of_float] in &mut self.batches {
            *quantized = relu(quantized.clone().matmul(values.clone()));
            *of_float = relu(of_float.clone().matmul(float.clone()));
        }
        self.weights[self.next] = values;
        self.next += 1;
    }
}

impl BlockRunner for Net {
    type Handle = usize;
    type Error = Failure;

    fn next_layers(&mut self) -> Result<Option<LayerGroup<usize>>, Failure> {
        let Some(layers) = self.groups.get(self.next) else {
            return Ok(None);
        };
        let mut sums = None;
        if self.knows_first {
            self.inputs(0).add_to(&mut sums).unwrap();
        }
        Ok(Some(LayerGroup {
            layers: layers.clone(),
            tokens: 7,
            sums,
            scales: self.scales[self.next].clone(),
            handle: self.next,
        }))
    }

    fn visit_inputs(
        &mut self,
        _: &LayerGroup<usize>,
        visit: &mut dyn FnMut(LayerInputs) -> Result<(), LayerError>,
    ) -> Result<(), Failure> {
        for batch in usize::from(self.knows_first)..self.batches.len() {
            visit(self.inputs(batch))?;
        }
        Ok(())
    }

    fn weight(&mut self, group: &LayerGroup<usize>) -> Result<Tensor<2>, Failure> {
        Ok(self.weights[group.handle].clone())
    }

    fn replace(
        &mut self,
        group: LayerGroup<usize>,
        values: Tensor<2>,
        layers: Vec<CalibratedLayer>,
    ) -> Result<(), Failure> {
        assert_eq!(group.handle, self.next);
        self.quantized.extend(layers);
        self.pass(values);
        Ok(())
    }

    fn keep_sums(&mut self, _: &LayerGroup<usize>, sums: HessianSums) {
        self.kept.push(sums.tokens());
    }
}

fn values(tensor: Tensor<2>) -> Vec<f32> {
    tensor.try_into_vec_as::<f32>().unwrap()
}

/// Quantises the layers of a model one by one, each by its own call of the quantiser.
fn expected(mut net: Net, quantizer: &dyn Quantizer) -> (Net, Vec<CalibratedLayer>) {
    let mut found = Vec::new();
    for (group, scales) in net.groups.clone().into_iter().zip(net.scales.clone()) {
        let sums = net.sums();
        let sums = scales.map_or(sums.clone(), |scales| sums.divided(&scales));
        let float = net.weights[net.next].clone();
        let (k, mut quantized) = (float.dims()[0], float.clone());
        for GroupLayer {
            name,
            spec,
            columns,
        } in group
        {
            let (n, part) = (columns.len(), s![.., columns]);
            let weight = values(float.clone().slice(part));
            let of_layer = quantizer
                .quantize(&weight, k, n, Some(&sums), &spec)
                .unwrap();
            let dequantized = tensor(of_layer.weight.dequantize(), n);
            quantized = quantized.slice_assign(part, dequantized);
            let tokens = if quantizer.needs_calibration() {
                3 * TOKENS
            } else {
                7
            };
            found.push(CalibratedLayer {
                loss: LayerLoss::new(&name, tokens, &of_layer, 0..n),
                weight: of_layer.weight,
            });
        }
        net.pass(quantized);
    }
    (net, found)
}

/// Asserts that a calibration finds what separate calls of the quantiser find, and returns the
/// calibrated model.
fn assert_as_separate(net: Net, quantizer: &dyn Quantizer) -> Net {
    let (separate, mut layers) = expected(net.clone(), quantizer);
    let (mut found, mut reported) = (net, Vec::new());
    calibrate(&mut found, quantizer, |loss| {
        reported.push(loss.clone());
        Ok(())
    })
    .unwrap();
    // The two layers of the first spec come before that of the second.
    layers.swap(1, 2);
    assert_eq!(found.quantized, layers);
    let losses: Vec<LayerLoss> = layers.into_iter().map(|layer| layer.loss).collect();
    assert_eq!(reported, losses);
    for (found, expected) in found.weights.iter().zip(separate.weights) {
        assert_eq!(values(found.clone()), values(expected));
    }
    found
}

#[test]
fn layers_are_quantised_as_by_separate_calls() {
    let mut rng = rng();
    let net = Net::new(&mut rng);
    let gptq = GptqOptions::default();
    let found = assert_as_separate(net.clone(), &gptq);
    assert_eq!(found.kept, [3 * TOKENS; 2]);
    // Columns 33 to 40 belong to no layer.
    let skipped = |net: &Net| values(net.weights[0].clone().slice(s![.., 33..40]));
    assert_eq!(skipped(&found), skipped(&net));
    // The second moments of the first batch are known.
    let mut known = net.clone();
    known.knows_first = true;
    assert_eq!(assert_as_separate(known, &gptq).quantized, found.quantized);
    // Inputs that are scaled.
    let mut scaled = net;
    scaled.scales[0] = Some((0..64).map(|row| 0.5 + row as f32 / 64.0).collect());
    assert_ne!(assert_as_separate(scaled, &gptq).quantized, found.quantized);
}

#[test]
fn rounding_reads_no_inputs() {
    let mut net = Net::new(&mut rng());
    net.batches[0][0] = net.batches[0][0].clone() * f32::NAN;
    let rounding = Rounding {
        sparsity: Sparsity::Dense,
        clipping: true,
    };
    assert!(assert_as_separate(net, &rounding).kept.is_empty());
}

#[test]
fn errors_name_the_first_layer_and_end_the_calibration() {
    let net = Net::new(&mut rng());
    let gptq = GptqOptions::default();
    let mut overflows = net.clone();
    overflows.batches[1][0] = overflows.batches[1][0].clone() * f32::NAN;
    let error = calibrate(&mut overflows, &gptq, |_| Ok(())).unwrap_err();
    let source = QuantError::NonFiniteBatch { batch: 1 };
    assert_eq!(error, LayerError::new("first", source).into());
    let (mut stopped, mut reported) = (net, Vec::new());
    let stop = |loss: &LayerLoss| {
        reported.push(loss.layer.clone());
        Err(Failure::Stopped)
    };
    assert_eq!(calibrate(&mut stopped, &gptq, stop), Err(Failure::Stopped));
    assert_eq!((reported, stopped.next), (vec!["first".to_owned()], 0));
}
