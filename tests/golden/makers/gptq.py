"""GPTQ v1 and v2: GPTQModel's `TorchLinear` packs and dequantises, its `QuantizeConfig` writes the config; two as AutoGPTQ wrote them."""

import sys
import types

import torch
from gptqmodel import __version__
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization import FORMAT, QuantizeConfig
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
from transformers import Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from makers.model import Tiny, codes, float_tensor, write
from makers.packages import bare, unpacked

PACKER = f"GPTQModel {__version__}"
LINEARS_OF = {"q": "attn_in", "k": "attn_in", "v": "attn_in", "o": "attn_out", "gate": "mlp_in", "up": "mlp_in", "down": "mlp_out", "lm_head": "out",
              "w1": "mlp_in", "w3": "mlp_in", "w2": "mlp_out"}


def inputs_of(layer: str) -> str:
    """What a layer reads: layers that read the same have the same order of activations."""
    block, _, name = layer.rpartition(".")
    inputs = LINEARS_OF[name.removesuffix("_proj")]
    return f"{block} {inputs}" if "experts" in block else inputs


def quantize_config(**options) -> QuantizeConfig:
    return QuantizeConfig(act_group_aware=False, offload_to_disk=False, **options)


def config_json(config: QuantizeConfig) -> dict:
    """The config as the package's `save_quantized` completes it."""
    config.meta_set_versionable(key="quantizer", value=[f"gptqmodel:{__version__}"])
    config.meta_set(key="uri", value="https://github.com/modelcloud/gptqmodel")
    fields = config.to_dict()
    # What says how the quantiser ran, not what it wrote.
    fields["meta"] = {key: fields["meta"][key] for key in ("quantizer", "uri")}
    return fields


def pack(values, config: QuantizeConfig, bias=None):
    """The tensors of a layer, and its dequantised weight `[N, K]`, which v1 and v2 share: `TorchLinear` computes with v2's zero points."""
    n, k = values.q.shape
    packer = TorchLinear(bits=values.bits, group_size=values.group, sym=config.sym, desc_act=config.desc_act, in_features=k, out_features=n,
                         bias=bias is not None, format=FORMAT.GPTQ_V2)
    linear = torch.nn.Linear(k, n, bias=bias is not None)
    linear.weight.data = values.weight()
    if bias is not None:
        linear.bias.data = bias.float()
    packer.pack_original(linear, values.scales.float(), values.zeros, values.g_idx)
    packer.qzero_format(format=2)
    packer.post_init()
    weight = packer.dequantize_weight().T.contiguous()
    assert torch.equal(weight.float(), values.weight(torch.float16).float()), "the packer did not find the values again"
    if config.format == FORMAT.GPTQ:
        convert_gptq_v2_to_v1_format_module(packer, config)
    tensors = {key: value.clone() for key, value in packer.state_dict().items() if not key.startswith("wf_")}
    return tensors, weight


def layer_options(config: QuantizeConfig, layer: str):
    """Bits, group, symmetry and act-order of a layer, by the package's own matching of `dynamic`; `None`: it stays as it is."""
    if layer == "lm_head" and not config.lm_head:
        return None
    if config.dynamic and config.dynamic_get(layer) is False:
        return None
    get = (lambda key, default: config.dynamic_get(layer, key, default)) if config.dynamic else (lambda key, default: default)
    return get("bits", config.bits), get("group_size", config.group_size), get("sym", config.sym), get("desc_act", config.desc_act)


def checkpoint(name, model, config: QuantizeConfig, *, head=False, only=None, edit=None, lowest_zero=None, **write_options):
    """Writes the model with each layer packed that `config` names. v1 has zero points from 1 on where `lowest_zero` does not say 0."""
    version = "v1" if config.format == FORMAT.GPTQ else "v2"
    tensors = {key: value.half() for key, value in model.float_tensors().items()}
    weights, formats = {}, {}
    linears = dict(model.linears) | ({"lm_head": (model.config.vocab_size, model.config.hidden_size)} if head else {})
    for layer, (n, k) in linears.items():
        options = layer_options(config, layer)
        if options is None or (only and not any(layer.endswith(part) for part in only)):
            continue
        bits, group, symmetric, act_order = options
        lowest = lowest_zero if lowest_zero is not None else 1 if version == "v1" else 0
        values = codes(n, k, bits, group, name=layer, symmetric=symmetric, lowest_zero=lowest, order=inputs_of(layer) if act_order else None)
        packed, weights[layer] = pack(values, config)
        del tensors[f"{layer}.weight"]
        tensors |= {f"{layer}.{key}": value for key, value in packed.items()}
        formats[layer] = f"gptq {version} int{bits} {'channel' if group == -1 else f'g{group}'}{'' if symmetric else ' zero-points'}" + (
            " act-order" if act_order else "")
    fields = config_json(config)
    if edit:
        edit(fields)
    model.config.dtype = torch.float16
    write(name, model.config, tensors, packer=PACKER, weights=weights, formats=formats, dequantized_in="float16", quantization=fields,
          quantize_config=fields, **model.write_options, **write_options)


def other_architecture(name, model_class, config_class, note, **more):
    """A model that is no Llama, each layer with 4 bits and groups of 32."""
    config = config_class(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
                          max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False, **more)
    config.dtype = torch.float16
    with torch.device("meta"):
        shapes = {key: value.shape for key, value in model_class(config).state_dict().items()}
    tensors = {key: float_tensor(key, shape).half() for key, shape in shapes.items()}
    options = quantize_config(bits=4, group_size=32, sym=True, desc_act=False, format=FORMAT.GPTQ)
    weights, formats, biases = {}, {}, {key: value for key, value in tensors.items() if key.endswith(".bias")}
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        layer = key.removesuffix(".weight")
        n, k = tensors.pop(key).shape
        packed, weights[layer] = pack(codes(n, k, 4, 32, name=layer), options, bias=tensors.pop(f"{layer}.bias", None))
        tensors |= {f"{layer}.{part}": value for part, value in packed.items()}
        formats[layer] = "gptq v1 int4 g32"
    reference = {key: value for key, value in tensors.items() if "_proj." not in key} | biases
    reference |= {f"{layer}.weight": weight for layer, weight in weights.items()}
    fields = config_json(options)
    write(name, config, tensors, packer=PACKER, weights=weights, formats=formats, dequantized_in="float16", quantization=fields,
          quantize_config=fields, model_class=model_class, reference=reference, note=note)


def auto_gptq(name, bits, group, *, symmetric, old, dtype=torch.float16, file="model.safetensors", note=None):
    """By AutoGPTQ. Its `old` versions wrote the config to `quantize_config.json` only; no version wrote `checkpoint_format`. Its layer has no
    function that dequantises: what it makes of the unit matrix is the weight, each sum having one term that is not 0. Its scales are of the
    model's dtype."""
    folder = unpacked("auto-gptq", "0.7.1") / "auto_gptq"
    for package in ["", ".nn_modules", ".nn_modules.qlinear"]:
        bare(f"auto_gptq{package}", folder / package.replace(".", "/").lstrip("/"))
    # Its kernels need a card; the packing and the slow path need none of them.
    sys.modules["autogptq_cuda_64"] = sys.modules["autogptq_cuda_256"] = types.ModuleType("kernels")
    from auto_gptq.nn_modules.qlinear.qlinear_cuda_old import QuantLinear

    model = Tiny()
    tensors = {key: value.to(dtype) for key, value in model.float_tensors().items()}
    weights, formats = {}, {}
    for layer, (n, k) in model.linears.items():
        values = codes(n, k, bits, group, name=layer, symmetric=symmetric, lowest_zero=1, dtype=dtype)
        linear = torch.nn.Linear(k, n, bias=False)
        linear.weight.data = values.weight()
        packer = QuantLinear(bits, group, k, n, False)
        packer.pack(linear, values.scales.float(), values.zeros.clone(), None)
        packer.scales = packer.scales.to(dtype)
        packed = packer.state_dict()
        weights[layer] = packer(torch.eye(k, dtype=dtype)).T.contiguous()
        assert torch.equal(weights[layer].float(), values.weight(dtype).float()), "the packer did not find the values again"
        del tensors[f"{layer}.weight"]
        tensors |= {f"{layer}.{key}": value for key, value in packed.items()}
        formats[layer] = f"gptq v1 int{bits} {'channel' if group == -1 else f'g{group}'}{'' if symmetric else ' zero-points'}"
    # The fields of `BaseQuantizeConfig.to_dict`, whose module no longer imports: the rest of it asks for an old transformers.
    fields = {"bits": bits, "group_size": group, "damp_percent": 0.01, "desc_act": False, "static_groups": False, "sym": symmetric,
              "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model" if file == "model.safetensors" else None}
    if not old:
        fields |= {"is_marlin_format": False, "quant_method": "gptq"}
    model.config.dtype = dtype
    write(name, model.config, tensors, packer="auto-gptq 0.7.1", weights=weights, formats=formats,
          dequantized_in=str(dtype).removeprefix("torch."), quantization=None if old else fields, quantize_config=fields, file=file, note=note)


def main():
    v1, v2 = FORMAT.GPTQ, FORMAT.GPTQ_V2
    two = dict(hidden=64, intermediate=32)  # two groups of 32 in every layer that reads the residual stream
    wide = dict(hidden=64, heads=2)  # K = 64 in every layer
    for name, sizes, options, head in [
        ("gptq-v1-int4-g32-sym", two, dict(bits=4, group_size=32, sym=True, desc_act=False, format=v1), False),
        ("gptq-v2-int4-g32-sym", two, dict(bits=4, group_size=32, sym=True, desc_act=False, format=v2), False),
        ("gptq-v1-int4-g32-asym", {}, dict(bits=4, group_size=32, sym=False, desc_act=False, format=v1), False),
        ("gptq-v2-int4-g32-asym", {}, dict(bits=4, group_size=32, sym=False, desc_act=False, format=v2), False),
        ("gptq-v1-int4-g32-sym-act-order", two, dict(bits=4, group_size=32, sym=True, desc_act=True, format=v1), False),
        ("gptq-v2-int4-channel-asym-act-order-head", {}, dict(bits=4, group_size=-1, sym=False, desc_act=True, format=v2, lm_head=True), True),
        ("gptq-v1-int4-g64-asym", wide, dict(bits=4, group_size=64, sym=False, desc_act=False, format=v1), False),
        ("gptq-v1-int8-channel-sym", {}, dict(bits=8, group_size=-1, sym=True, desc_act=False, format=v1), False),
        ("gptq-v1-int8-g32-asym", {}, dict(bits=8, group_size=32, sym=False, desc_act=False, format=v1), False),
        ("gptq-v2-int8-g32-asym-act-order", {}, dict(bits=8, group_size=32, sym=False, desc_act=True, format=v2), False),
    ]:
        checkpoint(name, Tiny(**sizes), quantize_config(**options), head=head, shards=2 if name == "gptq-v1-int4-g32-asym" else 1)

    # v1 subtracts 1 from packed words: a zero point of 0 borrows from the one above it, and the packer's reader, which adds 1 to the words, undoes that.
    for bits, sizes in [(4, {}), (8, two)]:
        config = quantize_config(bits=bits, group_size=32, sym=False, desc_act=False, format=v1)
        checkpoint(f"gptq-v1-int{bits}-g32-asym-zero-0", Tiny(**sizes), config, lowest_zero=0, note="zero points of 0, which borrow from those above them")

    mixed = {
        r"-:.*\.up_proj": {},
        r"+:.*\.down_proj": {"group_size": 128, "desc_act": True},
        r".*\.gate_proj": {"bits": 8, "group_size": 32},
        r"+:.*self_attn\.(k|v)_proj": {"group_size": -1, "sym": False},
    }
    config = quantize_config(bits=4, group_size=32, sym=True, desc_act=False, format=v1, dynamic=mixed)
    checkpoint("gptq-v1-dynamic", Tiny(intermediate=256), config,
               note="`dynamic`: one layer left, one with groups of 128 and act-order, one of 8 bits, two a channel with zero points")

    # Which layers are packed, by transformers' field; GPTQModel itself has none of this name.
    config = quantize_config(bits=4, group_size=32, sym=True, desc_act=False, format=v1)
    blocks = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.down_proj"]]
    checkpoint("gptq-v1-modules-in-block", Tiny(), config, only=[part for block in blocks for part in block],
               edit=lambda fields: fields.update(modules_in_block_to_quantize=blocks))
    other_architecture("gptq-v1-qwen2-bias", Qwen2ForCausalLM, Qwen2Config, "q, k and v have a bias beside their packed tensors")
    other_architecture("gptq-v1-phi3", Phi3ForCausalLM, Phi3Config, "qkv_proj and gate_up_proj are a layer each", sliding_window=None)
    auto_gptq("gptq-auto-gptq-int4-g32-asym", 4, 32, symmetric=False, old=True)
    auto_gptq("gptq-auto-gptq-int8-g32-sym", 8, 32, symmetric=True, old=False)
    # Its `save_quantized` names the file so where the config has no `model_file_base_name`.
    auto_gptq("gptq-auto-gptq-default-file", 4, 32, symmetric=True, old=True, file="gptq_model-4bit-32g.safetensors",
              note="the file has AutoGPTQ's default name, the config is in quantize_config.json only")
    auto_gptq("gptq-auto-gptq-f32", 4, 32, symmetric=False, old=False, dtype=torch.float32, note="a model in f32, scales too")


if __name__ == "__main__":
    main()
