"""Models that llm-compressor quantises from beginning to end: a float folder in, `oneshot`, `save_pretrained` out. Nothing here packs.

The other makers give their packers one layer at a time; here rounding, config and names are all llm-compressor's own: of a BERT, which is no
decoder, of a Llama whose cache is quantised too, and of a mixture.
"""

import json
import shutil
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, CompressedTensorsConfig, LlamaForCausalLM, Qwen3MoeForCausalLM

from makers.model import EXPECTED, OUT, TOKENS, Tiny, float_tensor, generator, record, save_tokenizer, write
from makers.packages import CACHE, unpacked

LLM_COMPRESSOR = "0.14.0.1"
# The one that it asks for. It asks for older ones of torch and transformers too, and runs with these.
COMPRESSED_TENSORS = "0.19.0"
sys.path[:0] = [str(unpacked("llmcompressor", LLM_COMPRESSOR)), str(unpacked("compressed-tensors", COMPRESSED_TENSORS))]

NAME = "bert-ct-int4-g32"


def float_model(folder):
    """A BERT of two layers with random weights in f16, as a folder: `oneshot` wants one."""
    config = BertConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, max_position_embeddings=32,
                        num_labels=3, dtype=torch.float16)
    model = BertForSequenceClassification(config).half()
    state = {name: float_tensor(name, value.shape) for name, value in model.state_dict().items() if value.is_floating_point()}
    model.load_state_dict(state, strict=False)
    model.save_pretrained(folder)


def quantize(source, target):
    """Round to nearest, which needs no data: 4 bits, groups of 32, every Linear but the classifier."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    model = BertForSequenceClassification.from_pretrained(source)
    oneshot(model=model, recipe=QuantizationModifier(config_groups=groups, ignore=["classifier"]))
    model.save_pretrained(target, save_compressed=True)


def reload(folder, dtype):
    """The quantised model as transformers loads it, its weights dequantised in the dtype of its scales."""
    config = CompressedTensorsConfig(dequantize=True)
    return BertForSequenceClassification.from_pretrained(folder, dtype=dtype, attn_implementation="eager", quantization_config=config).eval()


def with_f32_scales(folder):
    """The same folder in which no product of a value and its scale is rounded."""
    copy = CACHE / f"{NAME}-f32-scales"
    shutil.copytree(folder, copy)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: value.float() if name.endswith(".weight_scale") else value for name, value in tensors.items()}
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def quantized_cache():
    """A Llama with 4-bit weights and an 8-bit cache: beside the packed weights the file holds a scale of the keys and one of the values, which
    the reference does without."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    name = "ct-whole-int4-g32-kv-cache"
    source, target = CACHE / f"{name}-float", CACHE / name
    for folder in (source, target):
        shutil.rmtree(folder, ignore_errors=True)
    config = Tiny(heads=2, head_dim=16).config
    config.dtype, config.pad_token_id = torch.float16, 0
    model = LlamaForCausalLM(config)
    model.load_state_dict({key: float_tensor(key, value.shape) for key, value in model.state_dict().items()})
    model.half().save_pretrained(source)
    save_tokenizer(source, config.vocab_size)

    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    cache = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="tensor", dynamic=False)
    recipe = QuantizationModifier(config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}, ignore=["lm_head"],
                                  kv_cache_scheme=cache)
    texts = [torch.randint(0, config.vocab_size, (64,), generator=generator("text", i)).tolist() for i in range(16)]
    data = Dataset.from_list([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in texts])
    model = LlamaForCausalLM.from_pretrained(source)
    oneshot(model=model, recipe=recipe, dataset=data, num_calibration_samples=len(texts), max_seq_length=64)
    model.save_pretrained(target, save_compressed=True)

    tensors = load_file(target / "model.safetensors")
    assert {key.split(".")[-1] for key in tensors} >= {"k_scale", "v_scale"}
    half = LlamaForCausalLM.from_pretrained(target, dtype=torch.float16, quantization_config=CompressedTensorsConfig(dequantize=True))
    weights = {layer: half.get_submodule(layer).weight.detach() for layer in Tiny(heads=2, head_dim=16).linears}
    fields = json.loads((target / "config.json").read_text())
    write(name, config, tensors, packer=f"llmcompressor {LLM_COMPRESSOR}, compressed-tensors {COMPRESSED_TENSORS}", weights=weights,
          formats={layer: "pack-quantized int4 g32" for layer in weights}, dequantized_in="float16", quantization=fields["quantization_config"],
          note="a whole run; kv_cache_scheme, and self_attn.k_scale and v_scale in the file: the logits are without them")


def mixture():
    """A Qwen3-MoE by GPTQ. By default all tokens calibrate every expert, and columns are quantised in the order of activations, without `weight_g_idx`."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.linearize import load_quantizable_moe
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

    from makers.mixtures import qwen3

    name, own = "ct-whole-qwen3-moe", qwen3(num_experts=4)
    source, target = CACHE / f"{name}-float", CACHE / name
    for folder in (source, target):
        shutil.rmtree(folder, ignore_errors=True)
    own.config.dtype = torch.float16
    model = Qwen3MoeForCausalLM(own.config)
    model.load_state_dict(own.to_model(own.float_tensors()))
    model.half().save_pretrained(source)
    save_tokenizer(source, own.config.vocab_size)

    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    recipe = GPTQModifier(config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}, ignore=["lm_head", "re:.*mlp.gate$"])
    texts = [torch.randint(0, own.config.vocab_size, (64,), generator=generator("text", i)).tolist() for i in range(16)]
    data = Dataset.from_list([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in texts])
    # Loaded so, the architecture stays one whose experts transformers reads one by one; it is put back for the reference.
    reading = get_checkpoint_conversion_mapping(own.config.model_type)
    with load_quantizable_moe(Qwen3MoeForCausalLM):
        model = Qwen3MoeForCausalLM.from_pretrained(source)
    oneshot(model=model, recipe=recipe, dataset=data, num_calibration_samples=len(texts), max_seq_length=64)
    model.save_pretrained(target, save_compressed=True)
    register_checkpoint_conversion_mapping(own.config.model_type, reading, overwrite=True)

    tensors = load_file(target / "model.safetensors")
    half, read = Qwen3MoeForCausalLM.from_pretrained(target, dtype=torch.float16, quantization_config=CompressedTensorsConfig(dequantize=True),
                                                     output_loading_info=True)
    assert not read["missing_keys"] and not read["unexpected_keys"], read
    state = own.from_model(half.state_dict())
    weights = {layer: state[f"{layer}.weight"] for layer in own.linears}
    fields = json.loads((target / "config.json").read_text())
    write(name, own.config, tensors, packer=f"llmcompressor {LLM_COMPRESSOR}, compressed-tensors {COMPRESSED_TENSORS}", weights=weights,
          formats={layer: "pack-quantized int4 g32" for layer in weights}, dequantized_in="float16", quantization=fields["quantization_config"],
          note="a whole run, of GPTQ: `actorder` is static, and there is no `weight_g_idx`", **own.write_options)


def bert():
    source, target = CACHE / NAME, OUT / NAME
    for folder in (source, target, CACHE / f"{NAME}-f32-scales"):
        shutil.rmtree(folder, ignore_errors=True)
    float_model(source)
    quantize(source, target)
    model, half = reload(with_f32_scales(target), torch.float32), reload(target, torch.float16)
    layers = [name for name, module in half.named_modules() if isinstance(module, torch.nn.Linear) and name != "classifier"]
    weights = {f"{layer}.weight": half.get_submodule(layer).weight.detach().contiguous() for layer in layers}
    for name, weight in weights.items():
        exact = model.get_parameter(name)
        assert torch.equal(exact.half(), weight) and not torch.equal(exact, weight.float()), "f32 is not the same product, unrounded"
    ids = torch.randint(0, model.config.vocab_size, (1, TOKENS), generator=generator("ids", model.config.vocab_size))
    types = (torch.arange(TOKENS) > TOKENS // 2).long()[None]
    with torch.no_grad():
        hidden = model.bert(input_ids=ids, token_type_ids=types).last_hidden_state
        logits = model(input_ids=ids, token_type_ids=types).logits
    save_file(weights | {"input_ids": ids, "token_type_ids": types, "last_hidden_state": hidden, "logits": logits}, target / EXPECTED)
    for file in target.iterdir():
        file.chmod(0o644)
    record({"name": NAME, "packer": f"llmcompressor {LLM_COMPRESSOR}, compressed-tensors {COMPRESSED_TENSORS}",
            "architecture": type(model).__name__, "layers": {layer: "pack-quantized int4 g32" for layer in layers}, "dequantized_in": "float16",
            "logits": True, "note": f"a whole run of a packer, not layer by layer; read back by transformers {transformers.__version__}",
            "expected": f"{NAME}/{EXPECTED}"})
    print(f"{NAME}: {sum(file.stat().st_size for file in target.iterdir()) / 1000:.1f} kB")


def main():
    bert()
    quantized_cache()
    mixture()


if __name__ == "__main__":
    main()
