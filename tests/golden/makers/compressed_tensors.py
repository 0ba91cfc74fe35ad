"""compressed-tensors pack-quantized: its `PackedQuantizationCompressor` packs and dequantises, its config classes write the config."""

import compressed_tensors
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme, QuantizationStatus

from makers.model import Tiny, codes, write

PACKER = f"compressed-tensors {compressed_tensors.__version__}"


def scheme(targets, bits, group, symmetric, actorder=None) -> QuantizationScheme:
    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, actorder=actorder, **strategy)
    return QuantizationScheme(targets=targets, weights=args, format="pack-quantized")


def config_json(schemes, ignore, format="pack-quantized") -> dict:
    """As `ModelCompressor.update_config` puts it together."""
    config = QuantizationConfig(config_groups={f"group_{i}": s for i, s in enumerate(schemes)}, format=format,
                                quantization_status=QuantizationStatus.COMPRESSED, ignore=ignore)
    fields = config.model_dump(exclude=["quant_method"], mode="json")
    return {"version": compressed_tensors.__version__, "quant_method": "compressed-tensors", "sparsity_config": {}, "transform_config": {}, **fields}


def pack(values, own):
    """The tensors of a layer and its dequantised weight `[N, K]`."""
    # Its integers are signed: zero points are from the middle of the range on.
    state = {"weight": values.weight(), "weight_scale": values.scales,
             "weight_zero_point": (values.zeros - 2 ** (values.bits - 1)).to(torch.int8)}
    packed = PackedQuantizationCompressor.compress(state, own)
    weight = PackedQuantizationCompressor.decompress(packed, own)["weight"]
    assert torch.equal(weight.float(), values.weight(values.scales.dtype).float()), "the packer did not find the values again"
    return packed, weight


def checkpoint(name, layers, *, dtype=torch.float16, ignore=("lm_head",), sizes=None, model=None, note=None):
    """`layers`: by the end of a layer's name, its scheme; the config's groups are these schemes."""
    model = model or Tiny(**(sizes or {}))
    tensors = {key: value.to(dtype) for key, value in model.float_tensors().items()}
    weights, formats = {}, {}
    for layer, (n, k) in (model.linears | {"lm_head": (model.config.vocab_size, model.config.hidden_size)}).items():
        own = next((own for end, own in layers.items() if layer.endswith(end)), None)
        if own is None:
            continue
        args = own.weights
        group = args.group_size or -1
        values = codes(n, k, args.num_bits, group, name=layer, symmetric=args.symmetric, dtype=dtype)
        packed, weights[layer] = pack(values, own)
        del tensors[f"{layer}.weight"]
        tensors |= {f"{layer}.{key}": value for key, value in packed.items()}
        formats[layer] = f"pack-quantized int{args.num_bits} {'channel' if group == -1 else f'g{group}'}{'' if args.symmetric else ' zero-points'}"
    model.config.dtype = dtype
    schemes = list({id(own): own for own in layers.values()}.values())
    write(name, model.config, tensors, packer=PACKER, weights=weights, formats=formats, dequantized_in=str(dtype).removeprefix("torch."),
          quantization=config_json(schemes, list(ignore)), note=note, **model.write_options)


def every_linear(*args, **options):
    return {"_proj": scheme(["Linear"], *args, **options)}


def main():
    bf16 = torch.bfloat16
    two = dict(hidden=64, intermediate=32)
    checkpoint("ct-int4-g32-sym", every_linear(4, 32, True), sizes=two)
    checkpoint("ct-int4-g32-sym-bf16", every_linear(4, 32, True), dtype=bf16)
    checkpoint("ct-int4-g32-asym", every_linear(4, 32, False))
    checkpoint("ct-int8-g32-asym", every_linear(8, 32, False))
    checkpoint("ct-int8-channel-sym-bf16", every_linear(8, -1, True), dtype=bf16)
    checkpoint("ct-int4-g32-actorder-weight", every_linear(4, 32, True, actorder="weight"),
               note="the order is one of quantising only: no `weight_g_idx`")
    both = scheme(["Linear"], 4, -1, False)
    checkpoint("ct-int4-channel-asym-odd-head", {"_proj": both, "lm_head": both}, sizes=dict(intermediate=60, vocab=33), ignore=(),
               note="K = 60 and N = 33 fill no whole word; lm_head is quantised")
    mixed = {
        "q_proj": (eight := scheme([r"re:.*self_attn\.(q|k|v|o)_proj$"], 8, -1, True)), "k_proj": eight, "v_proj": eight, "o_proj": eight,
        "gate_proj": scheme(["model.layers.0.mlp.gate_proj"], 4, 32, False),
        "down_proj": scheme([r"re:.*down_proj$"], 4, 128, True),
    }
    checkpoint("ct-mixed", mixed, ignore=("lm_head", r"re:.*\.up_proj"), sizes=dict(intermediate=256), note="three config_groups and ignored layers")


if __name__ == "__main__":
    main()
