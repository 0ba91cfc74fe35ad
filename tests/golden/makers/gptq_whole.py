"""GPTQModel from beginning to end: a float folder in, `quantize` over random text, `save` out. Nothing here packs.

What only a whole run shows: that it splits a Phi-3's `gate_up_proj` in two and leaves `qkv_proj` as it is, that it writes a last group
which is not full, and how it names a mixture's experts.
"""

import json
import os
import shutil

# It asks for two workers and takes half of the cores.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig, __version__  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM  # noqa: E402
from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: E402

from makers.mixtures import qwen3  # noqa: E402
from makers.model import Tiny, generator, float_tensor, save_tokenizer, write  # noqa: E402
from makers.packages import CACHE  # noqa: E402


def quantize(name, model_class, config, options):
    """The folder that GPTQModel makes of a model of random weights, and its own dequantisation of each layer in f16."""
    source, target = CACHE / f"{name}-float", CACHE / name
    for folder in (source, target):
        shutil.rmtree(folder, ignore_errors=True)
    model = model_class(config)
    model.load_state_dict({key: float_tensor(key, value.shape) for key, value in model.state_dict().items()})
    model.to(config.dtype).save_pretrained(source)
    save_tokenizer(source, config.vocab_size)

    packer = GPTQModel.load(str(source), QuantizeConfig(device="cpu", offload_to_disk=False, **options), dtype=config.dtype)
    texts = [torch.randint(0, config.vocab_size, (64,), generator=generator("text", i)) for i in range(16)]
    packer.quantize([{"input_ids": ids.tolist(), "attention_mask": [1] * len(ids)} for ids in texts], batch_size=1)
    packer.save(str(target))

    loaded = GPTQModel.load(str(target), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16)
    weights = {layer: module.dequantize_weight().T.contiguous().clone() for layer, module in loaded.model.named_modules()
               if hasattr(module, "dequantize_weight")}
    return target, weights


def checkpoint(name, model_class, config, *, note, fused=(), to_model=None, **options):
    """`fused`: layers of the architecture that the file holds in two halves, by the names of these. `to_model` as for `write`."""
    folder, weights = quantize(name, model_class, config, {"bits": 4, "group_size": 32, **options})
    tensors = load_file(folder / "model.safetensors")
    reference = {key: value.float() for key, value in tensors.items() if key.rsplit(".", 1)[0] not in weights}
    parts = dict(weights)
    for whole, halves in fused:
        reference[f"{whole}.weight"] = torch.cat([parts.pop(half) for half in halves]).float()
    reference |= {f"{layer}.weight": weight.float() for layer, weight in parts.items()}
    reference = to_model(reference) if to_model else reference
    form = f"gptq v1 int4 g32{'' if options.get('sym', True) else ' zero-points'}{' act-order' if options['desc_act'] else ''}"
    fields = json.loads((folder / "quantize_config.json").read_text())
    # How the quantiser ran, which differs from one machine to the next, is left out.
    fields["meta"] = {key: fields["meta"][key] for key in ("quantizer", "uri")}
    write(name, AutoConfig.from_pretrained(folder), tensors, packer=f"GPTQModel {__version__}", weights=weights,
          formats={layer: form for layer in weights}, dequantized_in="float16", quantization=fields, quantize_config=fields,
          model_class=model_class, reference=reference, note=note)


def mixture():
    model, block = qwen3(num_experts=4), modeling_qwen3_moe.Qwen3MoeSparseMoeBlock
    model.config.dtype = torch.float16

    def to_model(tensors):
        # The packer's loader has put a block of its own in place of this one.
        modeling_qwen3_moe.Qwen3MoeSparseMoeBlock = block
        return model.to_model(tensors)

    checkpoint("gptq-whole-qwen3-moe", model.model_class, model.config, sym=True, desc_act=False, to_model=to_model,
               note="a whole run: two of four experts a token; bf16 beside scales in f16")


def main():
    mlp = "model.layers.0.mlp"
    phi3 = Phi3Config(vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                      max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
                      sliding_window=None, dtype=torch.bfloat16)
    checkpoint("gptq-whole-phi3", Phi3ForCausalLM, phi3, sym=True, desc_act=False,
               fused=[(f"{mlp}.gate_up_proj", [f"{mlp}.gate_proj", f"{mlp}.up_proj"])],
               note="a whole run: gate_proj and up_proj are a layer each, qkv_proj is one; bf16 beside scales in f16")
    for end, options in [("sym", dict(sym=True, desc_act=False)), ("asym", dict(sym=False, desc_act=False)),
                         ("act-order", dict(sym=True, desc_act=True, act_group_aware=False))]:
        config = Tiny(intermediate=344).config
        config.dtype, config.pad_token_id = torch.float16, 0
        checkpoint(f"gptq-whole-incomplete-{end}", LlamaForCausalLM, config, **options,
                   note="a whole run: down_proj has K = 344, ten groups of 32 and one of 24")
    mixture()


if __name__ == "__main__":
    main()
