//! The name of the layer in fuzz inputs, and the formats in which the layer is read.

use marlin_format::checkpoint::{
    Fp4Format, Fp8Config, Fp8Format, GptqFormat, GptqVersion, LayerFormat, Marlin24Names,
    PackQuantizedFormat,
};
use marlin_format::{GroupSize, QuantSpec, WeightValue};

/// The name of the layer in fuzz inputs.
pub const LAYER: &str = "l";

/// Returns every format of a layer in every spec. A selector is an index into this list.
pub fn formats() -> Vec<LayerFormat> {
    let specs = WeightValue::INTEGERS.into_iter().flat_map(|bits| {
        GroupSize::INTEGERS.into_iter().flat_map(move |group| {
            [false, true]
                .map(|zero_points| QuantSpec::new(bits, group).with_zero_point(zero_points.into()))
        })
    });
    let fp8 = [
        Fp8Config::CompressedTensors,
        Fp8Config::Fp8,
        Fp8Config::FbgemmFp8,
        Fp8Config::ModelOpt,
    ]
    .into_iter()
    .flat_map(|config| {
        [false, true].map(|blocks| Fp8Format {
            config,
            blocks,
            activations: false,
        })
    });
    let fp4 = [
        Fp4Format::NvFp4Packed,
        Fp4Format::MxFp4Packed,
        Fp4Format::ModelOptNvFp4,
    ];
    let floats = fp8
        .map(LayerFormat::Fp8)
        .chain(fp4.into_iter().map(LayerFormat::Fp4));
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
        .chain(floats)
        .collect()
}
