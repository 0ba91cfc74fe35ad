//! Replay of recorded operations, which quantises each layer and then runs its calls with the
//! quantised weight.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use burn::backend::capture::TensorId;
use burn::backend::ir::{
    BackendIr, BaseOperationIr, FloatOperationIr, MatmulOpIr, OperationIr, TensorIr, TensorStatus,
};
use burn::backend::{DispatchKindConversion, DispatchTensor};
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};
use marlin_format::PlainWeight;

use super::CalibrationError;
use super::record::{RecordedLayer, Recording};
use super::stream::Stream;
use crate::{
    BlockRunner, CalibratedLayer, FloatActivations, GptqOptions, GroupLayer, HessianSums,
    LayerError, LayerGroup, LayerInputs, LayerLoss, QuantError, calibrate,
};

/// A run of recorded operations on the backend `B`.
///
/// An operation runs as soon as its inputs are ready, except the calls of layers that are not
/// quantised yet. When no other operation can run, one layer whose inputs are ready is quantised,
/// and its calls run.
pub(super) struct Replay<B: BackendIr> {
    /// The operations that have not run, in recorded order. They only read their inputs; a tensor
    /// is dropped after its last read.
    pending: Vec<OperationIr>,
    values: BTreeMap<TensorId, TensorData>,
    layers: Vec<RecordedLayer>,
    /// The layers that are not quantised yet.
    left: VecDeque<usize>,
    /// The layer of each weight that is not quantised yet, and of each reshaped form of such a
    /// weight.
    held: HashMap<TensorId, usize>,
    /// The original tensor of each reshaped tensor. Each call reshapes its activations, so
    /// activations that attention's query, key and value layers share have three ids.
    origins: HashMap<TensorId, TensorId>,
    /// The sums so far of layers that had to run before all of their inputs were ready.
    seen: HashMap<usize, HessianSums>,
    /// The inputs of the last layer and their second moments, which the next layer may share.
    last: Option<(Vec<TensorId>, HessianSums)>,
    /// The number of operations that have yet to read each tensor.
    readers: HashMap<TensorId, usize>,
    /// The results that are computed and not dropped.
    ready: HashSet<TensorId>,
    quantized: Stream<B>,
    /// The float model, if its activations are needed.
    float: Option<Stream<B>>,
    device: Device,
    /// The quantised weights by path.
    weights: HashMap<String, PlainWeight>,
    losses: Vec<LayerLoss>,
}

/// A layer, and its calls whose inputs are ready.
#[derive(Default)]
pub(super) struct Calls {
    layer: usize,
    /// The inputs of all calls, before they were reshaped.
    inputs: Vec<TensorId>,
    /// The calls whose inputs are not in the layer's second moments yet.
    new: Vec<MatmulOpIr>,
}

impl<B: BackendIr> Replay<B>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    /// Prepares a run on a device, which is `backend` in the type of the backend.
    pub fn new(
        recording: Recording,
        options: &GptqOptions,
        device: &Device,
        backend: B::Device,
    ) -> Self {
        let Recording {
            mut operations,
            values,
            layers,
        } = recording;
        let mut readers: HashMap<TensorId, usize> = HashMap::new();
        for operation in &mut operations {
            let inputs: HashSet<TensorId> = operation.inputs().map(|input| input.id).collect();
            operation.mark_read_only(&inputs.iter().copied().collect::<Vec<_>>());
            inputs
                .into_iter()
                .for_each(|id| *readers.entry(id).or_default() += 1);
        }
        let mut held: HashMap<TensorId, usize> = layers
            .iter()
            .enumerate()
            .flat_map(|(index, layer)| layer.weights.iter().map(move |&weight| (weight, index)))
            .collect();
        let mut origins = HashMap::new();
        for operation in &operations {
            if let OperationIr::BaseFloat(BaseOperationIr::Reshape(reshape)) = operation {
                let origin = origins
                    .get(&reshape.input.id)
                    .copied()
                    .unwrap_or(reshape.input.id);
                origins.insert(reshape.out.id, origin);
                if let Some(&layer) = held.get(&reshape.input.id) {
                    held.insert(reshape.out.id, layer);
                }
            }
        }
        let float = (options.correction != 0.0).then(|| Stream::new(backend.clone()));
        Self {
            pending: operations,
            values,
            left: (0..layers.len()).collect(),
            layers,
            held,
            origins,
            seen: HashMap::new(),
            last: None,
            readers,
            ready: HashSet::new(),
            quantized: Stream::new(backend),
            float,
            device: device.clone(),
            weights: HashMap::new(),
            losses: Vec::new(),
        }
    }

    /// Quantises all layers, in the order in which they run. Returns their weights by path, and
    /// their losses.
    pub fn quantize(
        mut self,
        options: &GptqOptions,
    ) -> Result<(HashMap<String, PlainWeight>, Vec<LayerLoss>), CalibrationError> {
        calibrate(&mut self, options, |loss| {
            tracing::debug!(?loss, "quantised");
            Ok(())
        })?;
        Ok((self.weights, self.losses))
    }

    /// Runs all operations that can run.
    fn run(&mut self) {
        for operation in std::mem::take(&mut self.pending) {
            let reshapes = operation
                .outputs()
                .any(|output| self.held.contains_key(&output.id))
                && operation.inputs().next().is_some();
            let waits = reshapes
                || self.call(&operation).is_some()
                || !operation.inputs().all(|input| self.is_there(input.id));
            if waits {
                self.pending.push(operation);
            } else {
                self.execute(operation);
            }
        }
    }

    fn is_there(&self, id: TensorId) -> bool {
        self.ready.contains(&id) || self.values.contains_key(&id)
    }

    /// Returns the layer and the matmul if the operation calls a layer that is not quantised yet.
    fn call<'o>(&self, operation: &'o OperationIr) -> Option<(usize, &'o MatmulOpIr)> {
        let OperationIr::Float(_, FloatOperationIr::Matmul(call)) = operation else {
            return None;
        };
        self.held.get(&call.rhs.id).map(|&layer| (layer, call))
    }

    /// Returns the first layer whose remaining calls all have their inputs, with these calls and
    /// true. If there is no such layer, returns the first layer that has some calls with their
    /// inputs, with these calls and false.
    fn next(&self) -> Option<(usize, Vec<MatmulOpIr>, bool)> {
        let mut waiting: Vec<(usize, Vec<MatmulOpIr>)> = Vec::new();
        for (layer, call) in self
            .pending
            .iter()
            .filter_map(|operation| self.call(operation))
        {
            if !self.is_there(call.lhs.id) {
                continue;
            }
            match waiting.iter_mut().find(|(other, _)| *other == layer) {
                Some((_, calls)) => calls.push(call.clone()),
                None => waiting.push((layer, vec![call.clone()])),
            }
        }
        let complete = waiting
            .iter()
            .position(|(layer, calls)| self.is_complete(*layer, calls.len()));
        let (layer, calls) = waiting.into_iter().nth(complete.unwrap_or(0))?;
        Some((layer, calls, complete.is_some()))
    }

    /// Returns true if a layer has exactly `calls` pending calls.
    fn is_complete(&self, layer: usize, calls: usize) -> bool {
        self.pending
            .iter()
            .filter(|operation| {
                self.call(operation)
                    .is_some_and(|(other, _)| other == layer)
            })
            .count()
            == calls
    }

    /// Calls `visit` with the inputs of some calls.
    fn visit_calls<E>(
        &mut self,
        calls: &[MatmulOpIr],
        mut visit: impl FnMut(LayerInputs) -> Result<(), E>,
    ) -> Result<(), E> {
        for call in calls {
            let quantized = self.quantized.rows(&call.lhs, &self.values);
            let float = self
                .float
                .as_mut()
                .map(|float| FloatActivations::Inputs(float.rows(&call.lhs, &self.values)));
            visit(LayerInputs { quantized, float })?;
        }
        Ok(())
    }

    /// Returns the inputs of some calls, as tensors before they were reshaped.
    fn inputs_of(&self, calls: &[MatmulOpIr]) -> Vec<TensorId> {
        let origin = |call: &MatmulOpIr| self.origins.get(&call.lhs.id).copied();
        calls
            .iter()
            .map(|call| origin(call).unwrap_or(call.lhs.id))
            .collect()
    }

    /// Returns the second moments of calls of a layer that are known, and the calls whose inputs
    /// have yet to be added.
    fn known(
        &mut self,
        layer: usize,
        inputs: &[TensorId],
        calls: &[MatmulOpIr],
    ) -> (Option<HessianSums>, Vec<MatmulOpIr>) {
        let k = self.layers[layer].k;
        let shared = self.last.take().filter(|(of, sums)| {
            *of == inputs && sums.features() == k && !self.seen.contains_key(&layer)
        });
        match shared {
            Some((_, sums)) => (Some(sums), Vec::new()),
            None => (self.seen.remove(&layer), calls.to_vec()),
        }
    }

    /// Returns the group of one layer.
    fn group(&self, sums: Option<HessianSums>, calls: Calls) -> LayerGroup<Calls> {
        let RecordedLayer {
            paths, n, format, ..
        } = &self.layers[calls.layer];
        LayerGroup {
            layers: vec![GroupLayer {
                name: paths[0].clone(),
                spec: format.spec,
                columns: 0..*n,
            }],
            tokens: 0,
            sums,
            scales: None,
            handle: calls,
        }
    }

    fn failed(&self, layer: usize, source: QuantError) -> LayerError {
        LayerError::new(&self.layers[layer].paths[0], source)
    }

    /// Runs a pending call, and the reshape of its weight.
    fn run_call(&mut self, call: MatmulOpIr) {
        for result in [call.rhs.id, call.out.id] {
            let place = self
                .pending
                .iter()
                .position(|operation| operation.outputs().any(|output| output.id == result));
            if let Some(place) = place {
                let operation = self.pending.remove(place);
                self.execute(operation);
            }
        }
    }

    fn execute(&mut self, operation: OperationIr) {
        let inputs: HashSet<TensorId> = operation.inputs().map(|input| input.id).collect();
        let outputs: Vec<TensorId> = operation.outputs().map(|output| output.id).collect();
        for stream in std::iter::once(&mut self.quantized).chain(&mut self.float) {
            for &input in inputs.iter().filter(|input| !self.ready.contains(input)) {
                stream.require(input, &self.values);
            }
            // A tensor with recorded values also has an operation that creates it. That operation
            // has no effect.
            stream.interpreter.register_op(operation.clone());
        }
        self.ready
            .extend(outputs.iter().filter(|id| !self.values.contains_key(id)));
        for id in inputs {
            if let Some(readers) = self.readers.get_mut(&id) {
                *readers -= 1;
                if *readers == 0 {
                    self.readers.remove(&id);
                    self.drop(id);
                }
            }
        }
        // Results that no operation reads are dropped.
        for id in outputs {
            if !self.readers.contains_key(&id) {
                self.drop(id);
            }
        }
    }

    fn drop(&mut self, id: TensorId) {
        if !self.ready.remove(&id) && !self.quantized.loaded.contains(&id) {
            return;
        }
        for stream in std::iter::once(&mut self.quantized).chain(&mut self.float) {
            stream.loaded.remove(&id);
            // Only the id of the tensor is used.
            let tensor = TensorIr {
                status: TensorStatus::ReadWrite,
                ..TensorIr::uninit(id, Shape::new([0]), DType::F32)
            };
            stream.interpreter.register_op(OperationIr::Drop(tensor));
        }
    }
}

impl<B: BackendIr> BlockRunner for Replay<B>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    type Handle = Calls;
    type Error = CalibrationError;

    fn next_layers(&mut self) -> Result<Option<LayerGroup<Calls>>, CalibrationError> {
        while !self.left.is_empty() {
            self.run();
            let Some((layer, calls, is_complete)) = self.next() else {
                break;
            };
            let inputs = self.inputs_of(&calls);
            let (mut sums, new) = self.known(layer, &inputs, &calls);
            if is_complete {
                self.left.retain(|&other| other != layer);
                return Ok(Some(self.group(sums, Calls { layer, inputs, new })));
            }
            // A later call of the layer depends on these calls: they run with the float weight.
            let added = self.visit_calls(&new, |inputs| inputs.add_to(&mut sums));
            added.map_err(|source| self.failed(layer, source))?;
            self.seen.extend(sums.map(|sums| (layer, sums)));
            calls.into_iter().for_each(|call| self.run_call(call));
        }
        // No call of the other layers has its inputs.
        self.pending.clear();
        let Some(layer) = self.left.pop_front() else {
            return Ok(None);
        };
        let calls = Calls {
            layer,
            ..Calls::default()
        };
        Ok(Some(self.group(None, calls)))
    }

    fn visit_inputs(
        &mut self,
        group: &LayerGroup<Calls>,
        visit: &mut dyn FnMut(LayerInputs) -> Result<(), LayerError>,
    ) -> Result<(), CalibrationError> {
        Ok(self.visit_calls(&group.handle.new, visit)?)
    }

    fn weight(&mut self, group: &LayerGroup<Calls>) -> Result<Tensor<2>, CalibrationError> {
        let layer = group.handle.layer;
        let RecordedLayer { weights, k, n, .. } = &self.layers[layer];
        let read = |reason: String| self.failed(layer, QuantError::Read { reason });
        let data = self
            .values
            .get(&weights[0])
            .ok_or_else(|| read("it has no values".into()))?;
        let values = data
            .clone()
            .convert::<f32>()
            .try_into_vec::<f32>()
            .map_err(|error| read(error.to_string()))?;
        Ok(Tensor::from_data(
            TensorData::new(values, [*k, *n]),
            (&self.device, DType::F32),
        ))
    }

    fn replace(
        &mut self,
        group: LayerGroup<Calls>,
        _: Tensor<2>,
        layers: Vec<CalibratedLayer>,
    ) -> Result<(), CalibrationError> {
        let layer = group.handle.layer;
        let RecordedLayer {
            paths,
            weights: tensors,
            k,
            n,
            ..
        } = &self.layers[layer];
        let float = self.values.get(&tensors[0]);
        let dtype = float.map_or(DType::F32, |data| data.dtype());
        for CalibratedLayer { weight, loss } in layers {
            let data = TensorData::new(weight.dequantize(), [*k, *n]).convert_dtype(dtype);
            for &tensor in tensors {
                if self.readers.contains_key(&tensor) {
                    self.quantized.load(tensor, data.clone());
                }
            }
            for path in paths {
                self.weights.insert(path.clone(), weight.clone());
            }
            self.losses.push(loss);
        }
        self.held.retain(|_, other| *other != layer);
        Ok(())
    }

    fn keep_sums(&mut self, group: &LayerGroup<Calls>, sums: HessianSums) {
        self.last = Some((group.handle.inputs.clone(), sums));
    }
}
