"""AWQ gemm: AutoAWQ's `WQLinear_GEMM.from_linear` packs, its `dequantize_gemm` dequantises, its `AwqConfig` writes the config.

AutoAWQ's gemm always has zero points (`from_linear` refuses a layer without), and no group of a whole channel. GPTQModel's `AwqTorchLinear`
has such groups, bf16, and symmetric layers: there the config says `zero_point: false` and `qzeros` holds 8 everywhere.
"""

import torch

from makers.model import Tiny, codes, write
from makers.packages import bare, unpacked

VERSION = "0.2.9"


def checkpoint(name, model, group, *, lowest_zero=0, not_converted=None, spelling, shards=1):
    from awq.models._config import AwqConfig
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    tensors = {key: value.half() for key, value in model.float_tensors().items()}
    weights, formats = {}, {}
    for layer, (n, k) in model.linears.items():
        if any(part in layer for part in not_converted or []):  # as `exclude_layers_to_not_quantize` of AutoAWQ
            continue
        values = codes(n, k, 4, group, name=layer, symmetric=False, lowest_zero=lowest_zero)
        linear = torch.nn.Linear(k, n, bias=False)
        linear.weight.data = values.weight()
        packer = WQLinear_GEMM.from_linear(linear, 4, group, scales=values.scales.T.contiguous().float(), zeros=values.zeros.T.contiguous())
        weights[layer] = dequantize_gemm(packer.qweight, packer.qzeros, packer.scales, 4, group).T.contiguous()
        assert torch.equal(weights[layer].float(), values.weight(torch.float16).float()), "the packer did not find the values again"
        del tensors[f"{layer}.weight"]
        tensors |= {f"{layer}.{key}": value for key, value in packer.state_dict().items()}
        formats[layer] = f"awq int4 g{group} zero-points"
    config = AwqConfig(q_group_size=group, version="GEMM", modules_to_not_convert=not_converted)
    model.config.dtype = torch.float16
    # Hubs have both spellings: of `to_dict`, in older files, and of `to_transformers_dict`.
    fields = config.to_transformers_dict() if spelling == "transformers" else {"quant_method": "awq"} | config.to_dict()
    write(name, model.config, tensors, packer=f"AutoAWQ {VERSION}", weights=weights, formats=formats, dequantized_in="float16",
          quantization=fields, shards=shards, **model.write_options)


def by_gptqmodel(name, group, *, symmetric, dtype):
    import gptqmodel
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear, dequantize_gemm
    from gptqmodel.quantization import FORMAT, METHOD, QuantizeConfig

    from makers.gptq import config_json

    model = Tiny()
    tensors = {key: value.to(dtype) for key, value in model.float_tensors().items()}
    weights, formats = {}, {}
    for layer, (n, k) in model.linears.items():
        values = codes(n, k, 4, group, name=layer, symmetric=symmetric, dtype=dtype)
        linear = torch.nn.Linear(k, n, bias=False)
        linear.weight.data = values.weight()
        packer = AwqTorchLinear(bits=4, group_size=group, sym=symmetric, desc_act=False, in_features=k, out_features=n)
        packer.pack(linear, values.scales, values.zeros)
        rows = k if group == -1 else group
        weights[layer] = dequantize_gemm(packer.qweight, packer.qzeros, packer.scales, 4, rows).T.contiguous()
        assert torch.equal(weights[layer].float(), values.weight(dtype).float()), "the packer did not find the values again"
        del tensors[f"{layer}.weight"]
        tensors |= {f"{layer}.{key}": value for key, value in packer.state_dict().items()}
        formats[layer] = f"awq int4 {'channel' if group == -1 else f'g{group}'}{'' if symmetric else ' zero-points'}"
    config = QuantizeConfig(bits=4, group_size=group, sym=symmetric, desc_act=False, method=METHOD.AWQ, format=FORMAT.GEMM, offload_to_disk=False)
    fields = config_json(config)
    model.config.dtype = dtype
    write(name, model.config, tensors, packer=f"GPTQModel {gptqmodel.__version__}", weights=weights, formats=formats,
          dequantized_in=str(dtype).removeprefix("torch."), quantization=fields, quantize_config=fields,
          note="zero_point is false, and qzeros holds 8 everywhere" if symmetric else None)


def load():
    """Makes AutoAWQ's modules importable."""
    folder = unpacked("autoawq", VERSION) / "awq"
    for package in ["", ".models", ".modules", ".modules.linear", ".utils"]:
        bare(f"awq{package}", folder / package.replace(".", "/").lstrip("/"))


def main():
    load()
    checkpoint("awq-gemm-g32", Tiny(), 32, spelling="transformers", shards=2)
    checkpoint("awq-gemm-g64", Tiny(hidden=64, heads=2), 64, lowest_zero=1, spelling="own")
    checkpoint("awq-gemm-g128-not-converted", Tiny(intermediate=128), 128, not_converted=["self_attn", "gate_proj", "up_proj"],
               spelling="transformers")
    by_gptqmodel("awq-gptqmodel-g32-sym", 32, symmetric=True, dtype=torch.float16)
    by_gptqmodel("awq-gptqmodel-channel-bf16", -1, symmetric=False, dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
