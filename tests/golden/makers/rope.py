"""Plain checkpoints whose `config.json` says something particular about rotary positions, as transformers reads that file."""

import copy

import torch
import transformers
from transformers import (LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Phi3Config, Phi3ForCausalLM, Qwen2Config,
                          Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

from makers.model import float_tensor, write

PACKER = f"transformers {transformers.__version__}"
SIZES = dict(vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0, sliding_window=None, hidden_act="silu",
             rms_norm_eps=1e-5, tie_word_embeddings=False)
LONG = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]}

CASES = [
    ("rope-both", LlamaConfig, LlamaForCausalLM, "`rope_scaling` counts, with nothing of `rope_parameters`: the base is the class's",
     dict(rope_parameters={"rope_type": "default", "rope_theta": 500.0},
          rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16})),
    ("rope-both-empty", LlamaConfig, LlamaForCausalLM, "an empty `rope_scaling` is none",
     dict(rope_parameters={"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}, rope_scaling={})),
    ("rope-yarn-truncate", Qwen2Config, Qwen2ForCausalLM, "YaRN over a range of frequencies that is not rounded",
     dict(rope_theta=20.0, rope_scaling={"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 4, "beta_slow": 0.5,
                                         "truncate": False})),
    ("rope-yarn-mscale", Qwen3Config, Qwen3ForCausalLM, "YaRN with both scales of the attention factor; its context beside it",
     dict(head_dim=16, rope_theta=100.0, original_max_position_embeddings=48,
          rope_scaling={"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 16, "mscale": 0.707, "mscale_all_dim": 1.4})),
    ("rope-yarn-attention", MistralConfig, MistralForCausalLM, "YaRN with an attention factor, its factor and truncation `null`, a beta 0",
     dict(rope_theta=30.0, rope_scaling={"type": "yarn", "factor": None, "original_max_position_embeddings": 24, "attention_factor": 1.3,
                                         "beta_slow": 0, "truncate": None, "mscale": 2.0})),
    ("rope-longrope-factor", Phi3Config, Phi3ForCausalLM, "longrope with a factor; the context beside it counts over that in it",
     dict(original_max_position_embeddings=16,
          rope_scaling={"type": "longrope", "factor": 32.0, "original_max_position_embeddings": 8, **LONG})),
    ("rope-longrope-llama", LlamaConfig, LlamaForCausalLM, "longrope of another class than Phi-3, its context in it",
     dict(rope_scaling={"type": "longrope", "original_max_position_embeddings": 8, **LONG})),
    ("rope-longrope-yarn", Phi3Config, Phi3ForCausalLM, "longrope under its early name `yarn`; without a context beside it that of the class counts",
     dict(max_position_embeddings=8192, rope_scaling={"type": "yarn", "original_max_position_embeddings": 16, **LONG})),
    ("rope-llama3-beside", LlamaConfig, LlamaForCausalLM, "llama3 with the context beside it; as many key as query heads by `null`",
     dict(original_max_position_embeddings=16, num_key_value_heads=None,
          rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0})),
    ("rope-kv-heads-null", Qwen2Config, Qwen2ForCausalLM, "as many key as query heads by `null`, where the class has 32",
     dict(num_key_value_heads=None)),
]


def main():
    for name, config_class, model_class, note, more in CASES:
        fields = {"architectures": [model_class.__name__], "model_type": config_class.model_type, **SIZES, **more, "dtype": "float16"}
        # A copy: reading changes the scaling.
        config = config_class.from_dict(copy.deepcopy(fields))

        def as_given(written, fields=fields):
            written.clear()
            written.update(fields)

        with torch.device("meta"):
            state = model_class(config).state_dict()
        tensors = {key: float_tensor(key, value.shape).to(torch.float16) for key, value in state.items()}
        write(name, config, tensors, packer=PACKER, model_class=model_class, config_edit=as_given, note=note)


if __name__ == "__main__":
    main()
