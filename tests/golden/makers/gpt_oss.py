"""gpt-oss: sinks, a window in every other layer, YaRN, biases and a clamped SwiGLU, with float experts and with MXFP4 experts in one tensor. transformers
dequantises the latter; their codes are random."""

import torch
import transformers
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from makers.model import E2M1_SPREAD, float_tensor, generator, write

PACKER = f"transformers {transformers.__version__}"
# As OpenAI's files have it.
QUANTIZATION = {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
                "quant_method": "mxfp4"}
TOKENS = 320


def gpt_oss(**more):
    """Two layers, of which the first has a window, and positions beyond the context before it was stretched."""
    rope = dict(rope_type="yarn", factor=8.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=64, rope_theta=150000.0)
    options = dict(vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                   num_local_experts=6, num_experts_per_tok=2, sliding_window=24, max_position_embeddings=512, rope_parameters=rope, bos_token_id=1,
                   eos_token_id=2, pad_token_id=0)
    return GptOssConfig(**(options | more))


def float_tensors(config):
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in GptOssForCausalLM(config).state_dict().items()}
    tensors = {name: float_tensor(name, shape) for name, shape in shapes.items()}
    for name, value in tensors.items():
        # Sinks about as large as scores, and gates and ups of which some are above the limit.
        if name.endswith("sinks"):
            tensors[name] = 20 * value
        elif name.endswith("gate_up_proj"):
            tensors[name] = 4 * value
    return tensors


def old_fields(fields):
    """The spelling of the published files, which are older than `rope_parameters`."""
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope.pop("rope_theta")
    fields["rope_scaling"] = rope
    fields |= dict(attention_bias=True, experts_per_token=fields["num_experts_per_tok"], swiglu_limit=7.0)


def packed(config, tensors):
    """The tensors with experts of random codes, and the dequantised experts."""
    reference = dict(tensors)
    for name, value in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, k, n = value.shape
        g = generator(name, "mxfp4")
        blocks = torch.randint(0, 256, (experts, n, k // 32, 16), generator=g, dtype=torch.uint8)
        spread = torch.log2(torch.tensor(E2M1_SPREAD * k ** 0.5)).round().int().item()
        gain = 2 if name.endswith("gate_up_proj") else 0
        scales = torch.randint(126 - spread + gain, 129 - spread + gain, (experts, n, k // 32), generator=g, dtype=torch.uint8)
        del reference[name]
        reference |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return reference


def dequantised(tensors):
    reference = {name: value for name, value in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    for name, blocks in tensors.items():
        if name.endswith("_blocks"):
            stack = name.removesuffix("_blocks")
            reference[stack] = convert_moe_packed_tensors(blocks, tensors[f"{stack}_scales"], dtype=torch.float32)
    return reference


def main():
    config = gpt_oss(dtype=torch.bfloat16)
    tensors = {name: value.to(torch.bfloat16) for name, value in float_tensors(config).items()}
    write("arch-gpt-oss", config, tensors, packer=PACKER, model_class=GptOssForCausalLM, reference=tensors, tokens=TOKENS,
          note="320 tokens; the first layer has a window of 24, sinks are about as large as scores, some gates and ups are above the limit of 7")
    config = gpt_oss(dtype=torch.bfloat16, num_local_experts=5, num_experts_per_tok=4)
    tensors = packed(config, {name: value.to(torch.bfloat16) for name, value in float_tensors(config).items()})
    stacks = {name.removesuffix("_blocks"): "gpt-oss mxfp4 e2m1 g32" for name in tensors if name.endswith("_blocks")}
    weights = {stack: dequantised(tensors)[stack] for stack in stacks}
    # A weight `[N, K]` as others have it: the output features of all experts.
    weights = {stack: weight.transpose(1, 2).reshape(-1, weight.shape[1]) for stack, weight in weights.items()}
    write("moe-gpt-oss-mxfp4", config, tensors, packer=PACKER, model_class=GptOssForCausalLM, weights=weights, formats=stacks, dequantized_in="float32",
          reference=dequantised(tensors), quantization=QUANTIZATION, config_edit=old_fields, tokens=TOKENS,
          note="320 tokens; random codes, dequantised by transformers")


if __name__ == "__main__":
    main()
