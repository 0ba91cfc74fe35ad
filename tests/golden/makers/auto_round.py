"""AutoRound in its packings: its own layers pack, chosen by its own `dynamic_import_quant_linear_for_packing`.

`auto_round:auto_gptq` stores zero points less 1 and no `g_idx` (GPTQ v1), `auto_round:gptqmodel` as they are with `g_idx` (v2),
`auto_round:auto_awq` as AWQ.
"""

import torch
from auto_round import __version__
from auto_round.export.export_to_autoround.export import dynamic_import_quant_linear_for_packing
from auto_round.export.export_to_awq.utils import dequantize_gemm

from makers.model import Tiny, codes, write


def pack(values, packing, symmetric):
    """The tensors of a layer and its dequantised weight `[N, K]`."""
    n, k = values.q.shape
    linear = torch.nn.Linear(k, n, bias=False)
    linear.weight.data = values.weight()
    layer_class = dynamic_import_quant_linear_for_packing(packing, values.bits, values.group, symmetric, 16)
    scales, zeros = values.scales.float(), values.zeros
    if "awq" in packing:
        packer = layer_class.from_linear(linear, values.bits, values.group, scales=scales.T.contiguous(), zeros=zeros.T.contiguous(), device="cpu")
        tensors = packer.state_dict()
        weight = dequantize_gemm(packer.qweight, packer.qzeros, packer.scales, values.bits, values.group).T.contiguous()
    else:
        packer = layer_class(values.bits, values.group, k, n, bias=False, weight_dtype=torch.float16)
        packer.device = "cpu"
        # A symmetric layer's zero point is one number.
        packer.pack(linear, scales, int(zeros[0, 0]) if symmetric else zeros, None, device="cpu")
        tensors = packer.state_dict()
        # It has no function that dequantises: what it makes of the unit matrix is the weight. With a `g_idx` it fails where N > K; its
        # other branch takes the same groups.
        packer._buffers.pop("g_idx", None)
        weight = packer(torch.eye(k, dtype=torch.float16)).T.contiguous()
    assert torch.equal(weight.float(), values.weight(torch.float16).float()), "the packer did not find the values again"
    return tensors, weight


def checkpoint(name, packing, group, *, symmetric, format, extra=None, model=None, note=None, **sizes):
    model = model or Tiny(**sizes)
    tensors = {key: value.half() for key, value in model.float_tensors().items()}
    weights, formats = {}, {}
    for layer, (n, k) in model.linears.items():
        own = (extra or {}).get(layer, {})
        if own.get("bits") == 16:
            continue
        bits, rows = own.get("bits", 4), own.get("group_size", group)
        values = codes(n, k, bits, rows, name=layer, symmetric=symmetric, lowest_zero=1 if "gptq" in format and "v1" in format else 0)
        packed, weights[layer] = pack(values, packing, symmetric)
        del tensors[f"{layer}.weight"]
        tensors |= {f"{layer}.{key}": value for key, value in packed.items()}
        zero_points = not symmetric or format == "awq"  # AWQ files hold zero points even where each is 8
        formats[layer] = f"{format} int{bits} {'channel' if rows == -1 else f'g{rows}'}{' zero-points' if zero_points else ''}"
    # The fields of `save_quantized_as_autoround`.
    fields = {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": group, "sym": symmetric, "data_type": "int",
              "autoround_version": __version__, "block_name_to_quantize": "model.layers"}
    if extra:
        fields["extra_config"] = extra
    model.config.dtype = torch.float16
    write(name, model.config, tensors, packer=f"auto-round {__version__}", weights=weights, formats=formats, dequantized_in="float16",
          quantization=fields, note=note, **model.write_options)


def main():
    mlp = "model.layers.0.mlp"
    extra = {f"{mlp}.up_proj": {"bits": 16, "data_type": "float"}, f"{mlp}.down_proj": {"bits": 8, "group_size": 64}}
    checkpoint("auto-round-gptq-sym", "auto_round:auto_gptq", 32, symmetric=True, format="gptq v1", extra=extra)
    checkpoint("auto-round-gptq-asym", "auto_round:auto_gptq", 32, symmetric=False, format="gptq v1")
    checkpoint("auto-round-gptqmodel-asym", "auto_round:gptqmodel", 32, symmetric=False, format="gptq v2")
    checkpoint("auto-round-awq-asym", "auto_round:auto_awq", 32, symmetric=False, format="awq")
    checkpoint("auto-round-awq-sym", "auto_round:auto_awq", 32, symmetric=True, format="awq")


if __name__ == "__main__":
    main()
