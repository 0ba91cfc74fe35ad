//! The formats of a layer's tensors, whatever program wrote them.

use std::fmt;

use crate::QuantSpec;

/// The format of one layer's tensors. Tensors are named `{layer}.{tensor}`.
///
/// K is the number of input features, N of output features, G of groups along K; a word is an i32
/// of eight 4-bit or four 8-bit values. No config has the dtype of scales: `scale_dtype` of the
/// specs here is f16, and the tensors decide.
///
/// [`Display`](fmt::Display) is one line, such as `gptq v1 int4 g128 act-order`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LayerFormat {
    /// Not quantised: `weight` `[N, K]` in f16, bf16 or f32.
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
    /// 2:4 sparse weights in the tile order of Sparse-Marlin, under either set of names. Always
    /// symmetric.
    Marlin24(QuantSpec, Marlin24Names),
}

/// A weight in GPTQ's tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GptqFormat {
    /// Bits, group and symmetry. If it is symmetric, the contents of `qzeros` are ignored.
    pub spec: QuantSpec,
    /// The encoding of zero points in `qzeros`.
    pub version: GptqVersion,
    /// True if the config sets `desc_act`. The contents of `g_idx` decide.
    pub act_order: bool,
}

/// The encoding of the zero point z in `qzeros` of a GPTQ checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GptqVersion {
    /// As z - 1 (`checkpoint_format` is `gptq`, or absent).
    V1,
    /// As z (`checkpoint_format` is `gptq_v2`).
    V2,
}

/// A weight in compressed-tensors' packed tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PackQuantizedFormat {
    /// Bits, group and symmetry.
    pub spec: QuantSpec,
    /// True if `actorder` is `group` in the config. The contents of `weight_g_idx` decide, if it is
    /// present.
    pub act_order: bool,
}

/// The names of a 2:4 weight's tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Marlin24Names {
    /// `weight_packed`, `meta`, `scale_packed` (compressed-tensors, format `marlin-24`).
    CompressedTensors,
    /// `B_24`, `B_meta`, `s` (GPTQ, `checkpoint_format` is `marlin_24`).
    Gptq,
}

impl LayerFormat {
    /// The quantisation of the weight, or `None` if it is not quantised.
    pub fn spec(&self) -> Option<QuantSpec> {
        match self {
            Self::Float => None,
            Self::Gptq(GptqFormat { spec, .. })
            | Self::PackQuantized(PackQuantizedFormat { spec, .. }) => Some(*spec),
            Self::Awq(spec) | Self::Marlin(spec) | Self::Marlin24(spec, _) => Some(*spec),
        }
    }

    /// Its name without the spec, such as `gptq v1`.
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
        }
    }

    /// Returns true if the config declares that rows were quantised in the order of their
    /// activations, with groups in that order.
    pub fn act_order(&self) -> bool {
        match self {
            Self::Gptq(GptqFormat { act_order, .. })
            | Self::PackQuantized(PackQuantizedFormat { act_order, .. }) => *act_order,
            Self::Float | Self::Awq(_) | Self::Marlin(_) | Self::Marlin24(..) => false,
        }
    }
}

impl fmt::Display for LayerFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = self.method().to_string();
        if let Some(QuantSpec {
            bits,
            group,
            zero_points,
            ..
        }) = self.spec()
        {
            text += &format!(
                " {bits} {group}{}",
                if zero_points { " zero-points" } else { "" }
            );
        }
        if self.act_order() {
            text += " act-order";
        }
        f.pad(&text)
    }
}
