//! The name of the layer in inputs, and the formats in which the layer is read.

use marlin_format::checkpoint::{
    GptqFormat, GptqVersion, LayerFormat, Marlin24Names, PackQuantizedFormat,
};
use marlin_format::{Bits, GroupSize, QuantSpec};

/// The name of the layer in inputs.
pub const LAYER: &str = "l";

/// Returns every format of a layer in every spec; a selector is an index into them.
pub fn formats() -> Vec<LayerFormat> {
    let specs = Bits::ALL.into_iter().flat_map(|bits| {
        GroupSize::ALL.into_iter().flat_map(move |group| {
            [false, true].map(|zero_points| QuantSpec {
                bits,
                zero_points,
                ..QuantSpec::int4(group)
            })
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
