"""ModelOpt: of its package two files are run, its tensor of NVFP4 and its conversion of configs. Its export needs the whole package and a GPU; the names
of tensors and `hf_quant_config.json` are written as it writes them, and FP8 weights by the layout."""

import sys
import types

import torch

from makers.model import E2M1_SPREAD, E4M3_SPREAD, Tiny, e2m1, e4m3, float_scales, generator, write
from makers.packages import bare, unpacked

VERSION = "0.47.0"
GROUP = 16


class Stored:
    """What `BaseQuantizedTensor` keeps of a tensor."""

    def __init__(self, shape, dtype, data):
        self.metadata, self._quantized_data = {"shape": shape, "dtype": dtype}, data


def own_code():
    """ModelOpt's class `NVFP4QTensor` and its function `convert_hf_quant_config_format`."""
    root = unpacked("nvidia-modelopt", VERSION) / "modelopt"
    quantization = "modelopt.torch.quantization"
    for name in ["modelopt", "modelopt.torch", "modelopt.torch.export", quantization, f"{quantization}.backends", f"{quantization}.qtensor"]:
        bare(name, root.joinpath(*name.split(".")[1:]))
    # These modules import the whole package. A weight of whole groups and with scales needs only the padding, which does nothing.
    utils, base = types.ModuleType(f"{quantization}.utils"), types.ModuleType(f"{quantization}.qtensor.base_qtensor")
    utils.__path__ = [str(root / "torch/quantization/utils")]
    utils.reduce_amax = utils.reduce_block_amax = None
    utils.reduce_block_padding = lambda tensor, block_sizes: tensor
    base.BaseQuantizedTensor = Stored
    sys.modules |= {utils.__name__: utils, base.__name__: base}
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    return NVFP4QTensor, convert_hf_quant_config_format


NVFP4QTensor, convert_config = own_code()


def nvfp4(layer, n, k):
    """The tensors of a layer and its weight `[N, K]` in f32."""
    values = e2m1(n, k, name=layer)
    drawn = torch.randint(0x50, 0x7F, (n, k // GROUP), generator=generator(layer, n, k, "scales"))
    scale = drawn.to(torch.uint8).view(torch.float8_e4m3fn)
    factor = float_scales([], k, 100 * E2M1_SPREAD, name=layer)
    given = values * (scale.float() * factor).repeat_interleave(GROUP, 1)
    packed, scale, factor = NVFP4QTensor.quantize(given.clone(), GROUP, scale, factor)
    weight = packed.dequantize(torch.float32, scale=scale, double_scale=factor, block_sizes={-1: GROUP})
    assert torch.equal(weight, given), "the packer did not find the values again"
    tensors = {"weight": packed._quantized_data, "weight_scale": scale, "weight_scale_2": factor, "input_scale": torch.tensor(0.5)}
    return tensors, weight


def fp8(layer, n, k):
    scale = float_scales([], k, E4M3_SPREAD, name=layer)
    values = e4m3(n, k, name=layer)
    return {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, values.float() * scale


def checkpoint(name, pack, algorithm, shown, *, excluded, cache=None, in_config, note=None):
    model = Tiny()
    tensors = {key: value.bfloat16() for key, value in model.float_tensors().items()}
    weights, formats = {}, {}
    for layer, (n, k) in model.linears.items():
        if "self_attn" in layer and any("self_attn" in entry for entry in excluded):
            continue
        del tensors[f"{layer}.weight"]
        packed, weights[layer] = pack(layer, n, k)
        tensors |= {f"{layer}.{key}": value for key, value in packed.items()}
        formats[layer] = shown
        if cache and layer.endswith(("k_proj", "v_proj")):
            tensors[f"{layer}.{layer[-6]}_scale"] = torch.tensor(1.0)
    model.config.dtype = torch.bfloat16
    details = {"quant_algo": algorithm, "kv_cache_quant_algo": cache, "exclude_modules": excluded}
    if algorithm == "NVFP4":
        details["group_size"] = GROUP
    own = {"producer": {"name": "modelopt", "version": VERSION}, "quantization": details}
    converted = convert_config(own) | {"quant_method": "modelopt"} if in_config else None
    write(name, model.config, tensors, packer=f"modelopt {VERSION}", weights=weights, formats=formats, dequantized_in="float32",
          quantization=converted, quantize_config=own, quantize_file="hf_quant_config.json", note=note)


def main():
    checkpoint("modelopt-fp8", fp8, "FP8", "modelopt fp8 e4m3 channel W8A8", excluded=["lm_head"], cache="FP8", in_config=True,
               note="the config is in both files; scales of a KV cache in 8 bits, which are not used")
    checkpoint("modelopt-nvfp4", nvfp4, "NVFP4", "modelopt nvfp4 e2m1 g16", excluded=["lm_head", "model.layers.0.self_attn*"], in_config=False,
               note="only hf_quant_config.json has the config; skipped layers by a wildcard")


if __name__ == "__main__":
    main()
