"""What compressed-tensors 0.10 writes and the installed one does not: act-order by group (`weight_g_idx`), marlin-24, and 2:4 float weights.

Version 0.10.2 stands in for the installed one in this process.
"""

import json
import sys
import tempfile
from pathlib import Path

from makers.packages import unpacked

VERSION = "0.10.2"
sys.path.insert(0, str(unpacked("compressed-tensors", VERSION)))

import compressed_tensors  # noqa: E402
import torch  # noqa: E402
from compressed_tensors.compressors import ModelCompressor  # noqa: E402
from compressed_tensors.compressors.quantized_compressors.pack_quantized import PackedQuantizationCompressor  # noqa: E402
from compressed_tensors.compressors.sparse_quantized_compressors.marlin_24 import Marlin24Compressor  # noqa: E402
from compressed_tensors.config import Sparse24BitMaskConfig  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme, QuantizationStatus  # noqa: E402
from compressed_tensors.quantization.lifecycle.forward import fake_quantize  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

from makers.model import Tiny, codes, generator, logits_of, write, write_folder, write_json, write_layers  # noqa: E402

assert compressed_tensors.__version__ == VERSION
PACKER = f"compressed-tensors {VERSION}"


def config_of(bits, group, format, actorder=None, ignore=("lm_head",)):
    """The scheme, and the config as `ModelCompressor.update_config` writes it."""
    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=bits, symmetric=True, actorder=actorder, **strategy))
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=format, quantization_status=QuantizationStatus.COMPRESSED,
                                ignore=list(ignore))
    return scheme, config.model_dump(mode="json")


def act_order():
    scheme, fields = config_of(4, 32, "pack-quantized", actorder="group")
    compressor = PackedQuantizationCompressor()
    model = Tiny(hidden=64, intermediate=32)
    tensors = {key: value.half() for key, value in model.float_tensors().items()}
    weights, formats = {}, {}
    for layer, (n, k) in model.linears.items():
        reads = {"q_proj": "attn_in", "k_proj": "attn_in", "v_proj": "attn_in", "o_proj": "attn_out", "down_proj": "mlp_out"}
        values = codes(n, k, 4, 32, name=layer, order=reads.get(layer.split(".")[-1], "mlp_in"))
        packed = compressor.compress_weight(values.weight(), values.scales, scheme.weights, g_idx=values.g_idx)
        packed |= {"weight_scale": values.scales, "weight_g_idx": values.g_idx}
        weights[layer] = compressor.decompress_weight(packed, scheme.weights).contiguous()
        assert torch.equal(weights[layer].float(), values.weight(torch.float16).float()), "the packer did not find the values again"
        del tensors[f"{layer}.weight"]
        tensors |= {f"{layer}.{key}": value for key, value in packed.items()}
        formats[layer] = "pack-quantized int4 g32 act-order"
    model.config.dtype = torch.float16
    write("ct-int4-g32-actorder-group", model.config, tensors, packer=PACKER, weights=weights, formats=formats, dequantized_in="float16",
          quantization=fields)


def kept(n, k, *seed):
    """Two of every four along K, at random."""
    scores = torch.rand(n, k // 4, 4, generator=generator("prune", n, k, *seed))
    dropped = scores.argsort(-1)[..., :2]
    return torch.ones(n, k // 4, 4, dtype=torch.bool).scatter(-1, dropped, False).view(n, k)


def prune(values):
    """Two of four along K to the middle of the range; the others are random, and some of them are the middle as well."""
    values.q = torch.where(kept(*values.q.shape), values.q, 2 ** (values.bits - 1))
    return values


def marlin_24(name, bits, group, n, k):
    """One layer alone: a whole model of the sizes that this format wants would be large. 0.10.2 cannot unpack what it packs; the reference is
    its own `fake_quantize` of the same weight, in f16 as the packer computes."""
    layer = "model.layers.0.mlp.down_proj"
    scheme, fields = config_of(bits, group, "marlin-24", ignore=("lm_head", "re:.*self_attn.*", r"re:.*\.(gate|up)_proj"))
    values = prune(codes(n, k, bits, group, name=layer))
    weight = values.weight(torch.float16)
    state = {f"{layer}.weight": weight, f"{layer}.weight_scale": values.scales}
    packed = Marlin24Compressor().compress(state, {layer: scheme})
    reference = fake_quantize(weight, values.scales, torch.zeros_like(values.scales), scheme.weights)
    assert torch.equal(reference, weight), "the packer did not find the values again"
    model = Tiny(hidden=n, intermediate=k, heads=4)
    model.config.dtype = torch.float16
    write_layers(name, model.config, packed, packer=PACKER, weights={layer: reference},
                 formats={layer: f"marlin-24 int{bits} {'channel' if group == -1 else f'g{group}'}"}, dequantized_in="float16", quantization=fields)


def bitmask(name, dtype, shards=1, note=""):
    """A whole model whose projections are 2:4 in floats. K = 44 of down_proj is no multiple of 8: of its mask's rows the last byte is half used."""
    model = Tiny(intermediate=44)
    model.config.dtype = dtype
    tensors = {key: value.to(dtype) for key, value in model.float_tensors().items()}
    for layer, (n, k) in model.linears.items():
        weight = tensors[f"{layer}.weight"].where(kept(n, k, layer), 0)
        # Fours without a value, and with one in each place; the zeros of both signs.
        none, one = torch.zeros(4, 4), torch.eye(4) / 4
        weight[:4, :16] = torch.cat([none, -none, one, -one], 1)
        tensors[f"{layer}.weight"] = weight
    zeros = sum((value == 0).sum().item() for value in tensors.values()) / sum(value.numel() for value in tensors.values())
    # As llm-compressor 0.6 fills it in.
    sparsity = Sparse24BitMaskConfig(global_sparsity=zeros, targets=["Linear"], ignore=["lm_head"])
    with torch.device("meta"):
        modules = LlamaForCausalLM(model.config)
    compressor = ModelCompressor.from_pretrained_model(modules, sparsity_config=sparsity)
    packed = compressor.compress(modules, tensors)
    # The packer drops the sign of a zero that it does not store; `torch.equal` does not ask for it.
    found = dict(compressor.sparsity_compressor.decompress_from_state_dict(packed))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], value) for key, value in tensors.items()), "the packer did not find the values again"
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        write_json(config, {})
        compressor.update_config(folder)
        fields = json.loads(config.read_text())["quantization_config"]
    ids, logits = logits_of(LlamaForCausalLM, model.config, found)
    whole = {f"{layer}.weight": found[f"{layer}.weight"] for layer in model.linears} | {"input_ids": ids, "logits": logits}
    write_folder(name, model.config, packed, whole, packer=PACKER, weights={}, formats={}, dequantized_in=None, model_class=LlamaForCausalLM,
                 quantization=fields, shards=shards, note=f"not quantised: 2:4 floats, their weights in the expected file{note}")


def main():
    act_order()
    # Groups of 128 in K = 384: at 256 the packer takes the scales' order of a channel, since it asks for K / 2 > 128.
    marlin_24("ct-marlin24-int4-g128", 4, 128, 128, 384)
    marlin_24("ct-marlin24-int4-channel", 4, -1, 128, 128)
    marlin_24("ct-marlin24-int8-channel", 8, -1, 128, 128)
    bitmask("ct-sparse24-bitmask-f16", torch.float16)
    bitmask("ct-sparse24-bitmask-bf16-shards", torch.bfloat16, shards=3, note="; the tensors of gate_proj and of o_proj are in two shards each")


if __name__ == "__main__":
    main()
