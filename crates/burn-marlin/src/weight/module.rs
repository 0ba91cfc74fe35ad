//! A weight as a Burn module: visitors, mappers and records see the plain form, whatever the device holds.

use super::QuantizedWeight;
use super::tensors::WeightTensors;
use burn::module::{Content, Devices, DisplaySettings, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor};
use burn::tensor::Device;
use marlin_kernels::WeightLayout;
use std::fmt;

impl Module for QuantizedWeight {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.tensors.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.moved(device, |tensors| tensors.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.moved(device, |tensors| tensors.to_device(device))
    }

    fn train(self) -> Self {
        Self { tensors: self.tensors.train(), ..self }
    }

    fn valid(&self) -> Self {
        Self { tensors: self.tensors.valid(), ..*self }
    }

    fn materialize(self) -> Self {
        self
    }

    fn visit<Visitor: ModuleVisitor>(&self, visitor: &mut Visitor) {
        self.plain_tensors().visit(visitor);
    }

    fn map<Mapper: ModuleMapper>(self, mapper: &mut Mapper) -> Self {
        let mapped = self.plain_tensors().map(mapper);
        if self.layout == WeightLayout::Plain || mapped.is_touched() {
            return Self { tensors: mapped, layout: WeightLayout::Plain, ..self }.laid_out();
        }
        let tensors = WeightTensors { row_permutation: mapped.row_permutation, ..self.tensors };
        Self { tensors, ..self }
    }
}

impl QuantizedWeight {
    /// On another device, in the layout that its kernel reads.
    fn moved(self, device: &Device, to_device: impl FnOnce(WeightTensors) -> WeightTensors) -> Self {
        if self.layout == self.layout_on(device) {
            return Self { tensors: to_device(self.tensors), ..self };
        }
        let plain = self.in_layout(WeightLayout::Plain);
        Self { tensors: to_device(plain.tensors), ..plain }.laid_out()
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
        content.add("k", &self.k).add("n", &self.n).add("format", &self.spec.to_string()).optional()
    }
}

impl fmt::Display for QuantizedWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&ModuleDisplay::format(self, DisplaySettings::default()))
    }
}
