//! The name of the layer in fuzz inputs, and the formats in which the layer is read.

use marlin_format::checkpoint::{
    GptqFormat, GptqVersion, LayerFormat, Marlin24Names, PackQuantizedFormat,
};
use marlin_format::{GroupSize, QuantSpec, WeightValue};

/// The name of the layer in fuzz inputs.
pub const LAYER: &str = "l";

/// Returns every format of a layer in every spec. A selector is an index into this list.
pub fn formats() -> Vec<LayerFormat> {
    let specs = WeightValue::ALL.into_iter().flat_map(|bits| {
        GroupSize::ALL.into_iter().flat_map(move |group| {
            [false, true]
                .map(|zero_points| QuantSpec::new(bits, group).with_zero_point(zero_points.into()))
        })
    });
    specs
        .flat_map(|spec| {
            [
                LayerFormat::Gptq(GptqFormat {
                    spec,
                    version: GptqVersion::V1,
                    act_order: false,
                }),
                LayerFormat::Gptq(GptqFormat {
                    spec,
                    version: GptqVersion::V2,
                    act_order: true,
                }),
                LayerFormat::Awq(spec),
                LayerFormat::PackQuantized(PackQuantizedFormat {
                    spec,
                    act_order: true,
                }),
                LayerFormat::Marlin(spec),
                LayerFormat::Marlin24(spec, Marlin24Names::CompressedTensors),
                LayerFormat::Marlin24(spec, Marlin24Names::Gptq),
            ]
        })
        .collect()
}
