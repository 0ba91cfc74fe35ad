//! Valid inputs that serve as seeds for the fuzz targets.

use std::fs;

use half::f16;
use marlin_format::checkpoint::{
    CheckpointWriter, Dtype, Fp4Format, Fp8Config, Fp8Format, LayerFormat, Marlin24Names,
    TensorData, TensorSpec, compressed_tensors, gptq,
};
use marlin_format::layout::PlainLayout;
use marlin_format::{GroupSize, PlainParts, PlainWeight, Scales, WeightValue};

use super::formats::{LAYER, formats};

/// The number of input and output features: whole tiles of every format, and an incomplete last
/// group of 64 or 128 rows.
const SHAPE: (usize, usize) = (160, 64);

/// Returns configs of every method, with every field that is read.
pub fn config_seeds() -> Vec<Vec<u8>> {
    [
        r#"{"quantization_config":{"bits":4,"group_size":128,"desc_act":true,"sym":true,"quant_method":"gptq","checkpoint_format":"gptq_v2",
            "lm_head":true,"pack_dtype":"int32","dynamic":{"-:.*\\.layers\\.0\\..*":{},"+:.*up_proj":{"bits":8,"group_size":-1,"sym":false},
            "^(?!.*down).*proj$":{"desc_act":false}}}}"#,
        r#"{"quantization_config":{"bits":4,"group_size":64,"quant_method":"gptq","block_name_to_quantize":"model.layers",
            "modules_in_block_to_quantize":[["self_attn.q_proj","self_attn.k_proj"],["mlp.up_proj"]],"is_marlin_format":false}}"#,
        r#"{"text_config":{"quantization_config":{"bits":4,"group_size":-1,"quant_method":"awq","version":"GEMM","zero_point":true,
            "modules_to_not_convert":["visual","layers.(0|1)","mlp.*gate$"]}}}"#,
        r#"{"compression_config":{"quant_method":"compressed-tensors","format":"mixed-precision","quantization_status":"compressed",
            "config_groups":{"a":{"targets":["Linear"],"format":"pack-quantized","input_activations":null,"weights":{"num_bits":4,"type":"int",
            "symmetric":false,"strategy":"group","group_size":32,"actorder":"group","dynamic":false}},"b":{"targets":["re:.*q_proj$","lm_head"],
            "format":"marlin-24","weights":{"num_bits":8,"strategy":"channel","group_size":null}}},"ignore":["re:.*up_proj","model.norm"],
            "sparsity_config":{"format":"dense"},"transform_config":{"config_groups":{}},"kv_cache_scheme":null}}"#,
        r#"{"quantization_config":{"quant_method":"auto-round","bits":4,"group_size":128,"sym":true,"data_type":"int","act_bits":16,
            "packing_format":"auto_round:auto_gptq","block_name_to_quantize":"model.layers,visual","extra_config":{"lm_head":{"bits":8},
            "model.layers.0.mlp.up_proj":{"bits":16,"act_bits":16},".*self_attn.*":{"group_size":32,"sym":false}}}}"#,
        r#"{"quantization_config":{"quant_method":"compressed-tensors","format":"mixed-precision","config_groups":{"a":{"targets":["Linear"],
            "format":"float-quantized","input_activations":{"num_bits":8,"type":"float"},"weights":{"num_bits":8,"type":"float",
            "strategy":"block","block_structure":[128,128]}},"b":{"targets":["re:.*up_proj"],"format":"nvfp4-pack-quantized","weights":
            {"num_bits":4,"type":"float","strategy":"tensor_group","group_size":16}},"c":{"targets":["re:.*down_proj"],
            "format":"mxfp4-pack-quantized","weights":{"num_bits":4,"type":"float","strategy":"group","group_size":32}}}}}"#,
        r#"{"quantization_config":{"quant_method":"fp8","fmt":"e4m3","scale_fmt":"ue8m0","activation_scheme":"dynamic",
            "weight_block_size":[128,128],"modules_to_not_convert":["lm_head","model.layers.0","mlp.*gate$"]}}"#,
        r#"{"quantization_config":{"quant_method":"auto-round","bits":4,"group_size":32,"data_type":"mx_fp","act_bits":4,
            "packing_format":"auto_round:llm_compressor"}}"#,
        r#"{"quantization":{"quant_algo":"MIXED_PRECISION","quantized_layers":{"model.layers.0.mlp.up_proj":{"quant_algo":"NVFP4",
            "group_size":16},"lm_head":{"quant_algo":"FP8"}},"exclude_modules":["model.layers.1*","*q_proj"]}}"#,
        r#"{"bits":4,"group_size":128,"desc_act":false,"checkpoint_format":"marlin"}"#,
        r#"{"zero_point":true,"q_group_size":128,"w_bit":4,"version":"GEMM"}"#,
    ]
    .map(|text| text.as_bytes().to_vec())
    .into()
}

/// Returns a seed for every format and spec that can be written: its selector, and the bytes of a
/// file with a layer in that format.
pub fn tensor_seeds() -> Vec<Vec<u8>> {
    let formats = formats().into_iter().enumerate();
    formats
        .filter_map(|(selector, format)| {
            Some([&[selector as u8][..], &file(&layer(&format)?)].concat())
        })
        .collect()
}

/// Returns the tensors of a layer, or `None` if the format does not support its spec.
fn layer(format: &LayerFormat) -> Option<Vec<TensorData>> {
    let ((k, n), spec) = (SHAPE, format.spec()?);
    let groups = spec.scales.group.count(k);
    let marlin = !spec.has_zero_points()
        && matches!(spec.scales.group, GroupSize::Channel | GroupSize::G128);
    let words = |name: &str, dtype: Dtype, shape: [usize; 2], byte: u8| {
        let bytes = vec![byte; shape[0] * shape[1] * dtype.bitsize() / 8];
        TensorData {
            spec: TensorSpec::new(format!("{LAYER}.{name}"), dtype, shape),
            bytes,
        }
    };
    // 0x2c2c is a finite scale; in 0x44 every nibble is metadata that names the first two rows of
    // four.
    let scales = |name: &str| words(name, Dtype::F16, [groups, n], 0x2c);
    match format {
        LayerFormat::Gptq(_) => Some(gptq::tensors_of(LAYER, &plain(format)?)),
        LayerFormat::PackQuantized(_) => {
            Some(compressed_tensors::tensors_of(LAYER, &plain(format)?))
        }
        LayerFormat::Awq(_) if spec.value == WeightValue::Int4 => {
            let zero_points = spec
                .has_zero_points()
                .then(|| words("qzeros", Dtype::I32, [groups, n / 8], 0x75));
            Some(
                [
                    words("qweight", Dtype::I32, [k, n / 8], 0x31),
                    scales("scales"),
                ]
                .into_iter()
                .chain(zero_points)
                .collect(),
            )
        }
        LayerFormat::Marlin(_) if marlin && spec.value == WeightValue::Int4 => Some(vec![
            words("B", Dtype::I32, [k / 16, 2 * n], 0x29),
            scales("s"),
        ]),
        LayerFormat::Marlin24(_, names) if marlin => {
            let [weight, metadata, scale] = match names {
                Marlin24Names::CompressedTensors => ["weight_packed", "meta", "scale_packed"],
                Marlin24Names::Gptq => ["B_24", "B_meta", "s"],
            };
            let columns = n * spec.value.bits() / 2;
            Some(vec![
                words(weight, Dtype::I32, [k / 32, columns], 0x29),
                words(metadata, Dtype::I16, [k / 32, 2 * n], 0x44),
                scales(scale),
            ])
        }
        LayerFormat::Fp8(Fp8Format { config, blocks, .. }) => {
            let scale = match config {
                Fp8Config::Fp8 => "weight_scale_inv",
                _ => "weight_scale",
            };
            let shape = match blocks {
                true => [n.div_ceil(128), groups],
                false => [n, 1],
            };
            Some(vec![
                words("weight", Dtype::F8_E4M3, [n, k], 0x31),
                words(scale, Dtype::F32, shape, 0x3c),
            ])
        }
        LayerFormat::Fp4(format) => {
            let (weight, scales, whole) = match format {
                Fp4Format::NvFp4Packed => {
                    ("weight_packed", Dtype::F8_E4M3, Some("weight_global_scale"))
                }
                Fp4Format::MxFp4Packed => ("weight_packed", Dtype::U8, None),
                _ => ("weight", Dtype::F8_E4M3, Some("weight_scale_2")),
            };
            let tensors = [
                words(weight, Dtype::U8, [n, k / 2], 0x31),
                words("weight_scale", scales, [n, groups], 0x3c),
            ];
            let whole = whole.map(|name| TensorData {
                spec: TensorSpec::new(format!("{LAYER}.{name}"), Dtype::F32, [1]),
                bytes: 0.5f32.to_le_bytes().to_vec(),
            });
            Some(tensors.into_iter().chain(whole).collect())
        }
        _ => None,
    }
}

/// Returns a weight, with its rows in reverse order if the format has act-order.
fn plain(format: &LayerFormat) -> Option<PlainWeight> {
    let ((k, n), spec) = (SHAPE, format.spec()?);
    let groups = spec.scales.group.count(k);
    PlainWeight::new(PlainParts {
        k,
        n,
        spec,
        qweight: PlainLayout::new(k, n, spec.value)
            .pack_with(|row, column| ((row * 5 + column * 3) % 16) as u8),
        metadata: None,
        scales: Scales::F16(vec![f16::from_f32(0.125); groups * n]),
        zero_points: spec
            .has_zero_points()
            .then(|| (0..groups * n).map(|i| (i % 15) as u8).collect()),
        row_permutation: format.act_order().then(|| (0..k as u32).rev().collect()),
    })
    .ok()
}

/// Returns the bytes of a file that holds these tensors.
fn file(tensors: &[TensorData]) -> Vec<u8> {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let dir = parent.path().join("model");
    let mut writer = CheckpointWriter::create(&dir).expect("a new folder");
    writer
        .declare(tensors.iter().map(|tensor| tensor.spec.clone()))
        .expect("tensors of different names");
    for tensor in tensors {
        writer
            .write_tensor(&tensor.spec.name, &tensor.bytes)
            .expect("as declared");
    }
    writer.finish().expect("all are written");
    fs::read(dir.join("model.safetensors")).expect("it was written")
}
