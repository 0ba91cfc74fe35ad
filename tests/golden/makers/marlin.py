"""Marlin by AutoGPTQ's packer, and GPTQ marlin_24 by vLLM's `marlin_24_quantize`.

Layers alone: whole models of the sizes that these formats want would be large.
"""

import sys
import types

import torch

from makers.model import Tiny, codes, generator, write_layers
from makers.packages import bare, unpacked

AUTO_GPTQ, VLLM = "0.7.1", "0.6.6.post1"
LAYER = "model.layers.0.mlp.down_proj"


def gptq_json(bits, group, **more):
    return {"bits": bits, "group_size": group, "damp_percent": 0.01, "desc_act": False, "static_groups": False, "sym": True,
            "true_sequential": True, "model_name_or_path": None, "model_file_base_name": None, "quant_method": "gptq", **more}


def sized(n, k):
    """A config of a model whose `LAYER` is `[N, K]`."""
    config = Tiny(hidden=n, intermediate=k, heads=4).config
    config.dtype = torch.float16
    return config


def marlin(name, group, n, k, fields):
    """The packer has no way back: the reference is the weight in f16 that it is given, which holds `scale * (q - 8)` exactly rounded."""
    from auto_gptq.nn_modules.qlinear.qlinear_marlin import QuantLinear

    values = codes(n, k, 4, group, name=LAYER)
    linear = torch.nn.Linear(k, n, bias=False, dtype=torch.float16)
    linear.weight.data = values.weight(torch.float16)
    # The packer takes no -1 for a group, though Marlin has it.
    packer = QuantLinear(4, k if group == -1 else group, k, n, False)
    packer.pack(linear, values.scales)
    write_layers(name, sized(n, k), {f"{LAYER}.{key}": value for key, value in packer.state_dict().items()}, packer=f"auto-gptq {AUTO_GPTQ}",
                 weights={LAYER: linear.weight.data}, formats={LAYER: f"marlin int4 {'channel' if group == -1 else f'g{group}'}"},
                 dequantized_in="float16", quantization=fields, quantize_config=fields)


def marlin_24(name, bits, group, n, k):
    """vLLM prunes and rounds a random weight itself, and says what its values are."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils_test_24 import marlin_24_quantize
    from vllm.scalar_type import scalar_types

    weight = (torch.randn(k, n, generator=generator(name)) / k**0.5).half()
    quant_type = {4: scalar_types.uint4b8, 8: scalar_types.uint8b128}[bits]
    torch.manual_seed(0)
    reference, packed, meta, scales = marlin_24_quantize(weight, quant_type, group)
    assert scales.dtype == reference.dtype == torch.float16
    fields = gptq_json(bits, group, checkpoint_format="marlin_24")
    write_layers(name, sized(n, k), {f"{LAYER}.B_24": packed, f"{LAYER}.B_meta": meta, f"{LAYER}.s": scales}, packer=f"vllm {VLLM}",
                 weights={LAYER: reference.T.contiguous()}, formats={LAYER: f"gptq marlin_24 int{bits} {'channel' if group == -1 else f'g{group}'}"},
                 dequantized_in="float16", quantization=fields, quantize_config=fields)


def main():
    folder = unpacked("auto-gptq", AUTO_GPTQ) / "auto_gptq"
    for package in ["", ".nn_modules", ".nn_modules.qlinear"]:
        bare(f"auto_gptq{package}", folder / package.replace(".", "/").lstrip("/"))
    # Both ask for a card before they pack, which needs none.
    torch.cuda.get_device_capability = lambda: (8, 0)
    torch.Tensor.cuda = lambda tensor: tensor
    marlin("marlin-int4-g128", 128, 256, 256, gptq_json(4, 128, is_marlin_format=True))
    marlin("marlin-int4-channel", -1, 256, 128, gptq_json(4, -1, checkpoint_format="marlin"))

    folder = unpacked("vllm", VLLM) / "vllm"
    for package in ["", ".model_executor", ".model_executor.layers", ".model_executor.layers.quantization",
                    ".model_executor.layers.quantization.utils"]:
        bare(f"vllm{package}", folder / package.replace(".", "/").lstrip("/"))
    # Kernels and what they run on; packing needs neither.
    sys.modules["vllm._custom_ops"] = types.ModuleType("vllm._custom_ops")
    sys.modules["vllm.platforms"] = types.ModuleType("vllm.platforms")
    sys.modules["vllm.platforms"].current_platform = None
    qqq = sys.modules["vllm.model_executor.layers.quantization.qqq"] = types.ModuleType("qqq")
    qqq.MARLIN_QQQ_SUPPORTED_NUM_BITS = []
    marlin_24("marlin24-int4-g128", 4, 128, 128, 384)
    marlin_24("marlin24-int4-channel", 4, -1, 128, 128)


if __name__ == "__main__":
    main()
