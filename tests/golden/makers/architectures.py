"""A plain checkpoint of each architecture beside Llama, with random weights, from transformers' own classes."""

import torch
import transformers
from transformers import (LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Phi3Config, Phi3ForCausalLM, Qwen2Config,
                          Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM, SeedOssConfig, SeedOssForCausalLM)

from makers.model import float_tensor, write

PACKER = f"transformers {transformers.__version__}"
SIZES = dict(vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0 + 0.05 * i for i in range(4)], "long_factor": [1.0 + 0.5 * i for i in range(4)],
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}


def old_spelling(fields):
    """`config.json` as hubs hold it from before transformers 5: `rope_theta` at the top, `torch_dtype`."""
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    fields["rope_scaling"] = {"type": kind, **rope} if kind != "default" else None
    fields["torch_dtype"] = fields.pop("dtype")


def old_spelling_llama3(fields):
    """Llama 3.1 names its scaling `rope_type`."""
    old_spelling(fields)
    fields["rope_scaling"]["rope_type"] = fields["rope_scaling"].pop("type")


def main():
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
              "rope_theta": 500000.0}
    cases = [
        ("arch-llama3", LlamaConfig(rope_parameters=llama3, **SIZES), LlamaForCausalLM, torch.float16, old_spelling_llama3, None),
        ("arch-mistral", MistralConfig(head_dim=8, sliding_window=None, **SIZES), MistralForCausalLM, torch.float16, None, None),
        ("arch-mistral-window", MistralConfig(head_dim=8, sliding_window=3, **SIZES), MistralForCausalLM, torch.float16, old_spelling,
         "a sliding window of 3 positions, shorter than the text"),
        ("arch-qwen2", Qwen2Config(tie_word_embeddings=True, **SIZES), Qwen2ForCausalLM, torch.float16, None, "q, k and v have a bias; tied head"),
        ("arch-qwen3", Qwen3Config(head_dim=16, **SIZES), Qwen3ForCausalLM, torch.bfloat16, None, "norms on q and k; head_dim is not hidden / heads"),
        ("arch-phi3", Phi3Config(sliding_window=None, **SIZES), Phi3ForCausalLM, torch.float16, None, "qkv_proj and gate_up_proj in one tensor each"),
        ("arch-phi3-longrope", Phi3Config(sliding_window=None, original_max_position_embeddings=64, rope_parameters=LONGROPE,
                                          **(SIZES | {"max_position_embeddings": 256})),
         Phi3ForCausalLM, torch.float16, old_spelling, "longrope; the text is shorter than the original context, so short_factor holds"),
        ("arch-seed-oss", SeedOssConfig(head_dim=16, **SIZES), SeedOssForCausalLM, torch.bfloat16, None,
         "q, k and v have a bias; head_dim is not hidden / heads"),
    ]
    for name, config, model_class, dtype, edit, note in cases:
        config.dtype = dtype
        with torch.device("meta"):
            state = model_class(config).state_dict()
        tensors = {key: float_tensor(key, value.shape).to(dtype) for key, value in state.items()}
        if config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        write(name, config, tensors, packer=PACKER, model_class=model_class, config_edit=edit, note=note)


if __name__ == "__main__":
    main()
