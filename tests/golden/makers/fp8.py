"""`quant_method: fp8`, as in DeepSeek's and Qwen's checkpoints, and `fbgemm_fp8`. Their kernels need a GPU, so the tensors are written by the layout;
compressed-tensors' converter of such files dequantises blocks. transformers' classes write the configs."""

import torch
import transformers
from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer
from transformers import FbgemmFp8Config, FineGrainedFP8Config

from makers.model import E4M3_SPREAD, Tiny, e4m3, float_scales, write

PACKER = f"by the layout; config by transformers {transformers.__version__}"
BLOCKS = FP8BlockDequantizer(dtype=torch.float32)


def block(layer, n, k, scale_dtype):
    scale = float_scales([-(-n // 128), -(-k // 128)], k, E4M3_SPREAD, name=layer).to(scale_dtype)
    values = e4m3(n, k, name=layer)
    return {"weight": values, "weight_scale_inv": scale}, BLOCKS._create_dequantized_weight(values, scale)


def tensor(layer, n, k, scale_dtype):
    scale = float_scales([], k, E4M3_SPREAD, name=layer).to(scale_dtype)
    values = e4m3(n, k, name=layer)
    activations = {"activation_scale": torch.tensor(0.5, dtype=scale_dtype)}
    return {"weight": values, "weight_scale_inv": scale} | activations, values.float() * scale.float()


def channel(layer, n, k, scale_dtype):
    scale = float_scales([n, 1], k, E4M3_SPREAD, name=layer).to(scale_dtype)
    values = e4m3(n, k, name=layer)
    return {"weight": values, "weight_scale": scale}, values.float() * scale.float()


def checkpoint(name, pack, config, shown, *, skipped=(), sizes=None, scale_dtype=torch.float32, note=None):
    model = Tiny(**(sizes or {}))
    tensors = {key: value.bfloat16() for key, value in model.float_tensors().items()}
    weights, formats = {}, {}
    for layer, (n, k) in model.linears.items():
        if layer.endswith(skipped):
            continue
        del tensors[f"{layer}.weight"]
        packed, weights[layer] = pack(layer, n, k, scale_dtype)
        tensors |= {f"{layer}.{key}": value for key, value in packed.items()}
        formats[layer] = shown
    model.config.dtype = torch.bfloat16
    write(name, model.config, tensors, packer=PACKER, weights=weights, formats=formats, dequantized_in="float32", quantization=config.to_dict(),
          note=note)


def main():
    names = ["model.layers.0.self_attn.o_proj", "model.layers.0.input_layernorm", "lm_head"]
    checkpoint("fp8-block", block, FineGrainedFP8Config(modules_to_not_convert=names), "fp8 e4m3 g128 W8A8", skipped=("o_proj",),
               sizes=dict(intermediate=192), note="K = 192 and N = 192 are no whole number of blocks; a skipped layer")
    static = FineGrainedFP8Config(activation_scheme="static", weight_block_size=None, modules_to_not_convert=["lm_head"])
    checkpoint("fp8-tensor-static", tensor, static, "fp8 e4m3 channel W8A8", scale_dtype=torch.bfloat16,
               note="one scale a weight, in bf16; static scales of activations, which are not used")
    fbgemm = FbgemmFp8Config(modules_to_not_convert=["lm_head", "model.layers.0.self_attn"])
    attention = tuple(f"{name}_proj" for name in "qkvo")
    checkpoint("fbgemm-fp8", channel, fbgemm, "fbgemm_fp8 e4m3 channel W8A8", skipped=attention, note="a skipped module")


if __name__ == "__main__":
    main()
