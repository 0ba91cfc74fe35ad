"""compressed-tensors' formats of floats: its compressors pack, its `dequantize` gives the weights in f32, its config classes write the config."""

from copy import deepcopy

import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import FP8, FP8_BLOCK, FP8_DYNAMIC, MXFP4A16, NVFP4

from makers import compressed_tensors as integers
from makers.model import E2M1_SPREAD, E4M3_SPREAD, Tiny, codes, e2m1, e4m3, float_scales, generator, write

ATTENTION, MLP = r"re:.*self_attn\.(q|k|v|o)_proj$", r"re:.*mlp\.(gate|up|down)_proj$"


def scheme(preset, format, targets=("Linear",)) -> QuantizationScheme:
    return QuantizationScheme(targets=list(targets), format=format, **deepcopy(preset))


def fp8(layer, n, k, own, scale_dtype):
    """The tensors of a layer and its weight `[N, K]` in f32."""
    values = e4m3(n, k, name=layer)
    blocks = [-(-n // 128), -(-k // 128)]
    shape = {"tensor": [1], "channel": [n, 1], "block": blocks}[own.weights.strategy]
    scale = float_scales(shape, k, E4M3_SPREAD, name=layer).to(scale_dtype)
    by_value = scale.float()
    if own.weights.strategy == "block":
        by_value = by_value.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    state = {"weight": values.float() * by_value, "weight_scale": scale.float()}
    packed = FloatQuantizationCompressor.compress(state, own)
    assert torch.equal(packed["weight"].view(torch.uint8), values.view(torch.uint8)), "the packer did not find the values again"
    weight = dequantize(x_q=packed["weight"], scale=scale.float(), args=own.weights)
    packed["weight_scale"] = scale
    assert torch.equal(FloatQuantizationCompressor.decompress(packed, own)["weight"], weight.to(scale_dtype))
    if not own.input_activations.dynamic:
        packed["input_scale"] = torch.tensor([0.5])
    return packed, weight


def fp4(layer, n, k, own, _):
    """The tensors of a layer and its weight `[N, K]` in f32."""
    values, size = e2m1(n, k, name=layer), own.weights.group_size
    if size == 16:
        compressor, global_scale = NVFP4PackedCompressor, float_scales([1], 1, 1, name=layer) * 100 * E2M1_SPREAD * k**0.5
        # 8 to 448 in e4m3.
        drawn = torch.randint(0x50, 0x7F, (n, k // size), generator=generator(layer, n, k, "scales"))
        scale = drawn.to(torch.uint8).view(torch.float8_e4m3fn).float()
        more = {"weight_global_scale": global_scale}
    else:
        compressor, global_scale, more = MXFP4PackedCompressor, None, {}
        scale = 2.0 ** torch.randint(-6, -2, (n, k // size), generator=generator(layer, n, k, "scales")).float()
    effective = scale if global_scale is None else scale / global_scale
    state = {"weight": values * effective.repeat_interleave(size, 1), "weight_scale": scale, **more}
    packed = compressor.compress(state, own)
    stored = packed["weight_scale"]
    stored = decompress_mx_scale(stored).float() if stored.dtype == torch.uint8 else stored.float()
    unpacked = unpack_fp4_from_uint8(packed["weight_packed"], n, k, torch.float32)
    assert torch.equal(unpacked, values), "the packer did not find the values again"
    weight = dequantize(x_q=unpacked, scale=stored, args=own.weights, global_scale=global_scale, dtype=torch.float32)
    # The compressor dequantises in bf16.
    assert torch.equal(compressor.decompress(packed, own)["weight"], weight.bfloat16())
    if own.input_activations is not None:
        packed["input_global_scale"] = torch.tensor([2.5])
    return packed, weight


def int4(layer, n, k, own, _):
    return integers.pack(codes(n, k, 4, own.weights.group_size, name=layer, dtype=torch.float32), own)


KINDS = {"float-quantized": fp8, "nvfp4-pack-quantized": fp4, "mxfp4-pack-quantized": fp4, "pack-quantized": int4}


def checkpoint(name, layers, formats, *, sizes=None, model=None, ignore=("lm_head",), scale_dtype=torch.float32, note=None):
    """`layers`: by a part of a layer's name, its scheme. `formats`: by the same part, how burn-marlin shows the format."""
    model = model or Tiny(**(sizes or {}))
    tensors = {key: value.bfloat16() for key, value in model.float_tensors().items()}
    weights, shown = {}, {}
    for layer, (n, k) in model.linears.items():
        part, own = next((part, own) for part, own in layers.items() if part in layer)
        del tensors[f"{layer}.weight"]
        packed, weights[layer] = KINDS[own.format](layer, n, k, own, scale_dtype)
        tensors |= {f"{layer}.{key}": value for key, value in packed.items()}
        shown[layer] = formats[part]
    model.config.dtype = torch.bfloat16
    used = {own.format for own in layers.values()}
    config = integers.config_json(list(layers.values()), list(ignore), used.pop() if len(used) == 1 else "mixed-precision")
    write(name, model.config, tensors, packer=integers.PACKER, weights=weights, formats=shown, dequantized_in="float32", quantization=config,
          note=note, **model.write_options)


def every_linear(name, preset, format, shown, **options):
    checkpoint(name, {"_proj": scheme(preset, format)}, {"_proj": f"{format} {shown}"}, **options)


def main():
    every_linear("ct-fp8-channel", FP8_DYNAMIC, "float-quantized", "e4m3 channel W8A8", scale_dtype=torch.bfloat16, note="scales in bf16")
    every_linear("ct-fp8-tensor", FP8, "float-quantized", "e4m3 channel W8A8", note="one scale a weight; static scales of activations, which are not used")
    every_linear("ct-fp8-block", FP8_BLOCK, "float-quantized", "e4m3 g128 W8A8", sizes=dict(intermediate=192),
                 note="K = 192 and N = 192 are no whole number of blocks")
    every_linear("ct-nvfp4", NVFP4, "nvfp4-pack-quantized", "e2m1 g16", note="static scales of activations, which are not used")
    every_linear("ct-mxfp4", MXFP4A16, "mxfp4-pack-quantized", "e2m1 g32")
    mixed = {"self_attn": scheme(FP8_DYNAMIC, "float-quantized", [ATTENTION]), "mlp": integers.scheme([MLP], 4, 32, True)}
    checkpoint("ct-mixed-fp8-int4", mixed, {"self_attn": "float-quantized e4m3 channel W8A8", "mlp": "pack-quantized int4 g32"},
               note="two config_groups with a format each")


if __name__ == "__main__":
    main()
