//! A weight as a Burn module. Visitors, mappers and records see the tensors of a record
//! ([`RecordTensors`]), whatever layout the device holds.

use super::attached::{Attached, PlaceholderState};
use super::description::{self, FORMAT};
use super::record::{RecordTensors, mapped, visited};
use super::tensors::DeviceTensors;
use super::{Passed, QuantizedWeight};
use crate::device::scale_dtype;
use burn::module::{
    Content, Devices, DisplaySettings, LoraAdapter, Module, ModuleDisplay, ModuleDisplayDefault,
    ModuleMapper, ModuleVisitor, Param, Reparameterization,
};
use burn::tensor::{DType, Device, Shape, Tensor};
use marlin_format::{WeightDescriptor, WeightLayout};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Burn's name for the container of a reparameterisation's own tensors.
pub(crate) const REPARAMETERIZATION: &str = "Reparameterization";

impl Module for QuantizedWeight {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.adapter
            .collect_devices(self.tensors.collect_devices(devices))
    }

    fn fork(self, device: &Device) -> Self {
        self.moved(
            device,
            |tensors| tensors.fork(device),
            |adapter| adapter.fork(device),
        )
    }

    fn to_device(self, device: &Device) -> Self {
        self.moved(
            device,
            |tensors| tensors.to_device(device),
            |adapter| adapter.to_device(device),
        )
    }

    fn train(self) -> Self {
        Self {
            tensors: Module::train(self.tensors),
            adapter: self.adapter.map(Module::train),
            attached: self.attached.as_ref().map(Attached::moved),
            ..self
        }
    }

    fn valid(&self) -> Self {
        Self {
            tensors: self.tensors.valid(),
            adapter: self.adapter.as_ref().map(Module::valid),
            attached: self.attached.as_ref().map(Attached::moved),
            ..*self
        }
    }

    fn materialize(self) -> Self {
        self
    }

    fn visit<Visitor: ModuleVisitor>(&self, visitor: &mut Visitor) {
        let [k, n] = self.dims();
        let elements = self.experts() * k * n;
        let counted = self
            .attached
            .as_ref()
            .map_or(0, |attached| attached.elements(elements));
        let format = description::parameter(
            self.recorded(),
            self.format_id,
            elements - counted,
            &self.device(),
        );
        let format = Passed::weight(self.clone()).attach(format);
        visited(visitor, FORMAT, |visitor| visitor.visit_float(&format));
        RecordTensors::of(self).visit(visitor);
        let Some(adapter) = &self.adapter else { return };
        beside(&mut Visiting(visitor), self.attached.is_some(), |visitor| {
            visitor.enter(LoraAdapter::NAME);
            adapter.visit(visitor.0);
            visitor.exit(LoraAdapter::NAME);
        });
    }

    fn map<Mapper: ModuleMapper>(self, mapper: &mut Mapper) -> Self {
        let expected = description::expected(&self.descriptor, self.format_id, &self.device());
        let format = mapped(mapper, FORMAT, |mapper| mapper.map_float(expected));
        let (replacement, renewed) = Passed::mapped(&format);
        let (weight, given) = match replacement {
            Some(replacement) => (self.replaced_by(replacement, renewed), true),
            None => self.map_tensors(mapper, description::loaded(&format), renewed),
        };
        let mut weight = Self {
            format_id: format.id,
            ..weight
        };
        let is_attached = weight.attached.is_some();
        beside(&mut Mapping(mapper), is_attached, |mapper| {
            let adapter = weight.adapter.take();
            // No float parameter or adapter has the shape of several matrices.
            if !given && weight.experts() == 1 {
                weight = weight.offered(mapper.0, adapter.is_some());
            }
            if let Some(adapter) = adapter {
                mapper.enter(LoraAdapter::NAME);
                weight.adapter = Some(adapter.map(mapper.0));
                mapper.exit(LoraAdapter::NAME);
            }
            weight
        })
    }
}

/// A traversal that enters and exits reparameterisations.
trait Traversal {
    fn enter(&mut self, name: &str);
    fn exit(&mut self, name: &str);
}

struct Visiting<'a, V>(&'a mut V);

impl<V: ModuleVisitor> Traversal for Visiting<'_, V> {
    fn enter(&mut self, name: &str) {
        self.0.enter_module(name, REPARAMETERIZATION);
    }

    fn exit(&mut self, name: &str) {
        self.0.exit_module(name, REPARAMETERIZATION);
    }
}

struct Mapping<'a, M>(&'a mut M);

impl<M: ModuleMapper> Traversal for Mapping<'_, M> {
    fn enter(&mut self, name: &str) {
        self.0.enter_module(name, REPARAMETERIZATION);
    }

    fn exit(&mut self, name: &str) {
        self.0.exit_module(name, REPARAMETERIZATION);
    }
}

/// Traverses what belongs beside an attached weight: a LoRA adapter, and the float parameter that
/// the weight replaces. They have the paths that they have in a float model, at the parameter
/// itself, because a parameter takes only one reparameterisation and the weight is that one. So the
/// traversal leaves the weight for as long as they last.
fn beside<T: Traversal, R>(
    traversal: &mut T,
    is_attached: bool,
    traverse: impl FnOnce(&mut T) -> R,
) -> R {
    if is_attached {
        traversal.exit(QuantizedWeight::NAME);
    }
    let result = traverse(traversal);
    if is_attached {
        traversal.enter(QuantizedWeight::NAME);
    }
    result
}

impl QuantizedWeight {
    /// Returns the descriptor of the weight in a record, in the plain layout.
    fn recorded(&self) -> WeightDescriptor {
        self.descriptor.in_layout(WeightLayout::Plain)
    }

    /// Offers a mapper the tensors of a record, in the `recorded` format. Returns the weight with
    /// the tensors that the mapper loads or changes, and whether the mapper loaded or changed any.
    /// `renewed` is the state of a placeholder that the mapper has put into the parameter.
    fn map_tensors<Mapper: ModuleMapper>(
        self,
        mapper: &mut Mapper,
        recorded: Option<WeightDescriptor>,
        renewed: Option<Arc<PlaceholderState>>,
    ) -> (Self, bool) {
        let (own, device) = (self.recorded(), self.device());
        // A record carries its format: its tensors are read in that format.
        let target = recorded
            .filter(|recorded| own.has_shape_of(recorded))
            .unwrap_or(own);
        let tensors = match recorded {
            Some(recorded) if recorded != own => {
                tracing::warn!(model = %own, record = %recorded, "a record holds a weight in another format than the model");
                RecordTensors::expected(&own, &recorded, &device)
            }
            _ => RecordTensors::of(&self),
        };
        let tensors = tensors.map(mapper);
        let refused = recorded.is_some() && tensors.refuse_other_dtypes(mapper);
        let given = !refused
            && if recorded.is_none_or(|recorded| recorded == own) {
                tensors.is_touched()
            } else {
                tensors.is_complete()
            };
        let attached = self
            .attached
            .as_ref()
            .map(|attached| attached.traversed(recorded.is_some() && given, renewed));
        let weight = Self { attached, ..self };
        if !given {
            return (weight, false);
        }
        let tensors = tensors.into_plain(&target, scale_dtype(target.spec().scales.dtype, &device));
        (
            Self {
                tensors,
                descriptor: target,
                ..weight
            }
            .laid_out(),
            true,
        )
    }

    /// Replaces this weight's values with those of another weight. `renewed` is the state of a
    /// placeholder that the mapper has put into the parameter.
    fn replaced_by(
        self,
        Self {
            tensors,
            descriptor,
            ..
        }: Self,
        renewed: Option<Arc<PlaceholderState>>,
    ) -> Self {
        let attached = self
            .attached
            .as_ref()
            .map(|attached| attached.traversed(false, renewed));
        Self {
            tensors,
            descriptor,
            attached,
            ..self
        }
    }

    /// Moves the weight to another device, in the layout that its kernel reads.
    fn moved(
        self,
        device: &Device,
        tensors_to: impl FnOnce(DeviceTensors) -> DeviceTensors,
        adapter_to: impl FnOnce(LoraAdapter) -> LoraAdapter,
    ) -> Self {
        let held = self.device_layout(device);
        let weight = if self.descriptor == held {
            self
        } else {
            self.held_as(held.in_layout(WeightLayout::Plain))
        };
        Self {
            tensors: tensors_to(weight.tensors),
            adapter: weight.adapter.map(adapter_to),
            attached: weight.attached.as_ref().map(Attached::moved),
            ..weight
        }
        .laid_out()
    }

    /// Offers a mapper the float parameter [K, N] that this weight replaces.
    ///
    /// Burn drops anything that a mapper attaches to the placeholder parameter, since a parameter
    /// takes only one reparameterisation. A [`LoraAdapter`] that the mapper attaches to the offered
    /// parameter is kept if the weight has no adapter yet. Float values that the mapper loads are
    /// rounded to the weight's spec, and also kept.
    fn offered<Mapper: ModuleMapper>(self, mapper: &mut Mapper, adapted: bool) -> Self {
        let (shape, dtype) = (self.dims(), DType::from(self.activations()));
        let read = Arc::new(AtomicBool::new(false));
        let was_read = read.clone();
        let init = move |device: &Device, _: bool| {
            was_read.store(true, Ordering::Relaxed);
            Tensor::<2>::full([1, 1], f32::NAN, (device, dtype)).expand(shape)
        };
        // The parameter is on the scales' device, which has autodiff.
        let param = Param::uninitialized(
            self.format_id,
            init,
            self.tensors.scales.lazy_device(),
            false,
            Shape::new(shape),
        );
        let param = mapper.map_float(param);
        if let Some(adapter) = param.adapter() {
            return Self {
                adapter: Some(adapter.clone()),
                ..self
            };
        }
        if !param.is_initialized() {
            return self;
        }
        if read.load(Ordering::Relaxed) {
            // A mapper that reads floats may also have changed the values of the placeholder
            // parameter. If the weight has an adapter, the mapper is assumed to be an optimiser,
            // which reads all floats at every step. Checking the values again would cost a read
            // from the device each time.
            let attached = self.attached.as_ref().map(|attached| {
                if adapted {
                    attached.clone()
                } else {
                    attached.unknown()
                }
            });
            return Self { attached, ..self };
        }
        match Self::quantize(param.base().detach(), &self.spec()) {
            Ok(Self {
                tensors,
                descriptor,
                ..
            }) => Self {
                tensors,
                descriptor,
                ..self
            },
            Err(error) => {
                tracing::error!(%error, "a float weight was loaded that cannot be rounded to {}: the layer computes NaN", self.spec());
                let descriptor = WeightDescriptor::plain(self.spec(), shape[0], shape[1]);
                let tensors = DeviceTensors::unloaded(
                    &descriptor,
                    self.tensors.scales.dtype(),
                    &self.device(),
                );
                Self {
                    tensors,
                    descriptor,
                    ..self
                }
            }
        }
    }
}

impl ModuleDisplayDefault for QuantizedWeight {
    fn content(&self, content: Content) -> Option<Content> {
        content.set_top_level_type("QuantizedWeight").optional()
    }

    fn num_params(&self) -> usize {
        Module::num_params(self)
    }
}

impl ModuleDisplay for QuantizedWeight {
    fn custom_content(&self, content: Content) -> Option<Content> {
        let [k, n] = self.dims();
        content
            .add("k", &k)
            .add("n", &n)
            .add("format", &self.descriptor.format.to_string())
            .optional()
    }
}

impl fmt::Display for QuantizedWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&ModuleDisplay::format(self, DisplaySettings::default()))
    }
}
