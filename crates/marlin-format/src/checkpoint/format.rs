//! Formats of a layer's tensors, independent of the program that wrote the tensors.

use std::fmt;

use crate::QuantSpec;

/// The format of one layer's tensors. Tensors are named `{layer}.{tensor}`.
///
/// K is the number of input features, N is the number of output features, and G is the number of
/// groups along K. A word is an i32 of eight 4-bit or four 8-bit values. Configs do not declare the
/// dtype of scales: `scale_dtype` of the specs of integers is f16, and the tensors decide. Scales
/// of floats are always read as f32.
///
/// [`Display`](fmt::Display) writes one line, such as `gptq v1 int4 g128 act-order`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LayerFormat {
    /// A weight that is not quantised: `weight` `[N, K]` in f16, bf16 or f32.
    Float,
    /// GPTQ: `qweight`, `qzeros`, `scales`, `g_idx`.
    Gptq(GptqFormat),
    /// AWQ, version gemm: `qweight`, `qzeros`, `scales`.
    Awq(QuantSpec),
    /// compressed-tensors, pack-quantized: `weight_packed`, `weight_scale`, `weight_shape`,
    /// `weight_zero_point`, `weight_g_idx`.
    PackQuantized(PackQuantizedFormat),
    /// Dense weights in Marlin's own tile order: `B`, `s`. Always symmetric.
    Marlin(QuantSpec),
    /// 2:4 sparse weights in the tile order of Sparse-Marlin, with either set of tensor names.
    /// Always symmetric.
    Marlin24(QuantSpec, Marlin24Names),
    /// FP8: `weight` `[N, K]` of e4m3 values, `weight_scale` or `weight_scale_inv`.
    Fp8(Fp8Format),
    /// FP4: two e2m1 values a byte in `weight_packed` or `weight`, `weight_scale`, and a scale of
    /// the whole tensor in NVFP4.
    Fp4(Fp4Format),
    /// MXFP4 experts in one tensor, as in gpt-oss: [`stacked`](super::stacked).
    StackedMxFp4,
}

/// The format of a weight in GPTQ's tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GptqFormat {
    /// The bits, group size and symmetry. If the spec is symmetric, the contents of `qzeros` are
    /// ignored.
    pub spec: QuantSpec,
    /// The encoding of zero points in `qzeros`.
    pub version: GptqVersion,
    /// True if the config sets `desc_act`. The contents of `g_idx` decide.
    pub act_order: bool,
}

/// The encoding of the zero point z in `qzeros` of a GPTQ checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GptqVersion {
    /// The stored value is z - 1 (`checkpoint_format` is `gptq`, or absent).
    V1,
    /// The stored value is z (`checkpoint_format` is `gptq_v2`).
    V2,
}

/// The format of a weight in compressed-tensors' packed tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PackQuantizedFormat {
    /// The bits, group size and symmetry.
    pub spec: QuantSpec,
    /// True if `actorder` is `group` in the config. The contents of `weight_g_idx` decide, if it is
    /// present.
    pub act_order: bool,
}

/// The tensor names of a 2:4 weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Marlin24Names {
    /// The names `weight_packed`, `meta`, `scale_packed` (compressed-tensors, format `marlin-24`).
    CompressedTensors,
    /// The names `B_24`, `B_meta`, `s` (GPTQ, `checkpoint_format` is `marlin_24`).
    Gptq,
}

/// The format of a weight of 8-bit floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fp8Format {
    /// The config that declares the weight.
    pub config: Fp8Config,
    /// True if each block of 128 x 128 values has a scale. False if each output feature has a
    /// scale, or the whole weight has one.
    pub blocks: bool,
    /// True if the config declares that activations are rounded to e4m3, too
    /// ([`QuantSpec::fp8_activations`]).
    pub activations: bool,
}

/// The kind of config that declares a weight of 8-bit floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fp8Config {
    /// compressed-tensors, format `float-quantized`.
    CompressedTensors,
    /// `quant_method` is `fp8`, as in DeepSeek's and Qwen's checkpoints.
    Fp8,
    /// `quant_method` is `fbgemm_fp8`.
    FbgemmFp8,
    /// ModelOpt, `quant_algo` is `FP8`.
    ModelOpt,
}

/// The format of a weight of 4-bit floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fp4Format {
    /// compressed-tensors, format `nvfp4-pack-quantized`: the scale of the tensor is a divisor.
    NvFp4Packed,
    /// compressed-tensors, format `mxfp4-pack-quantized`: scales are powers of two.
    MxFp4Packed,
    /// ModelOpt, `quant_algo` is `NVFP4`: the scale of the tensor is a factor.
    ModelOptNvFp4,
}

impl Fp8Format {
    /// Returns the quantisation of the weight.
    pub fn spec(&self) -> QuantSpec {
        let spec = if self.blocks {
            QuantSpec::fp8_blocks()
        } else {
            QuantSpec::fp8()
        };
        spec.with_fp8_activations(self.activations)
    }
}

impl Fp4Format {
    /// Returns the quantisation of the weight.
    pub fn spec(&self) -> QuantSpec {
        match self {
            Self::NvFp4Packed | Self::ModelOptNvFp4 => QuantSpec::nvfp4(),
            Self::MxFp4Packed => QuantSpec::mxfp4(),
        }
    }
}

impl LayerFormat {
    /// Returns the quantisation of the weight, or `None` if the weight is not quantised.
    pub fn spec(&self) -> Option<QuantSpec> {
        match self {
            Self::Float => None,
            Self::Gptq(GptqFormat { spec, .. })
            | Self::PackQuantized(PackQuantizedFormat { spec, .. }) => Some(*spec),
            Self::Awq(spec) | Self::Marlin(spec) | Self::Marlin24(spec, _) => Some(*spec),
            Self::Fp8(format) => Some(format.spec()),
            Self::Fp4(format) => Some(format.spec()),
            Self::StackedMxFp4 => Some(QuantSpec::mxfp4()),
        }
    }

    /// Returns the name of the format without the spec, such as `gptq v1`.
    pub fn method(&self) -> &'static str {
        match self {
            Self::Float => "float",
            Self::Gptq(GptqFormat {
                version: GptqVersion::V1,
                ..
            }) => "gptq v1",
            Self::Gptq(GptqFormat {
                version: GptqVersion::V2,
                ..
            }) => "gptq v2",
            Self::Awq(_) => "awq",
            Self::PackQuantized(_) => "pack-quantized",
            Self::Marlin(_) => "marlin",
            Self::Marlin24(_, Marlin24Names::CompressedTensors) => "marlin-24",
            Self::Marlin24(_, Marlin24Names::Gptq) => "gptq marlin_24",
            Self::Fp8(Fp8Format { config, .. }) => match config {
                Fp8Config::CompressedTensors => "float-quantized",
                Fp8Config::Fp8 => "fp8",
                Fp8Config::FbgemmFp8 => "fbgemm_fp8",
                Fp8Config::ModelOpt => "modelopt fp8",
            },
            Self::Fp4(Fp4Format::NvFp4Packed) => "nvfp4-pack-quantized",
            Self::Fp4(Fp4Format::MxFp4Packed) => "mxfp4-pack-quantized",
            Self::Fp4(Fp4Format::ModelOptNvFp4) => "modelopt nvfp4",
            Self::StackedMxFp4 => "gpt-oss mxfp4",
        }
    }

    /// Returns true if the config declares act-order: rows were quantised in the order of their
    /// activations, and groups follow that order.
    pub fn act_order(&self) -> bool {
        match self {
            Self::Gptq(GptqFormat { act_order, .. })
            | Self::PackQuantized(PackQuantizedFormat { act_order, .. }) => *act_order,
            Self::Float
            | Self::Awq(_)
            | Self::Marlin(_)
            | Self::Marlin24(..)
            | Self::Fp8(_)
            | Self::Fp4(_)
            | Self::StackedMxFp4 => false,
        }
    }
}

impl fmt::Display for LayerFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = self.method().to_string();
        if let Some(spec) = self.spec() {
            let zero_points = if spec.has_zero_points() {
                " zero-points"
            } else {
                ""
            };
            text += &format!(" {} {}{zero_points}", spec.value, spec.scales.group);
            if spec.fp8_activations {
                text += " W8A8";
            }
        }
        if self.act_order() {
            text += " act-order";
        }
        f.pad(&text)
    }
}
