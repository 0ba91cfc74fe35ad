"""Mixtures of experts: a float checkpoint of each architecture, and each format by its packer. Files hold the matrices of the experts one by one; transformers
stacks them."""

import re

import torch
import transformers
from compressed_tensors.quantization.quant_scheme import FP8_BLOCK, MXFP4A16, NVFP4
from gptqmodel.quantization import FORMAT
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from makers import auto_round, awq, compressed_floats, compressed_tensors, gptq
from makers.model import EXPECTED, OUT, Tiny, float_tensor, write

PACKER = f"transformers {transformers.__version__}"
SIZES = dict(vocab_size=32, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
             pad_token_id=0)
# Names of an expert's gate, up and down in files.
QWEN, MIXTRAL = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
ROUTERS = ["lm_head", r"re:.*mlp\.gate$", r"re:.*shared_expert_gate$"]


class Mixture(Tiny):
    """A mixture with random weights, as files name them."""

    def __init__(self, model_class, config):
        self.config, self.model_class = config, model_class
        self.names = MIXTRAL if model_class is MixtralForCausalLM else QWEN
        with torch.device("meta"):
            shapes = {name: tuple(value.shape) for name, value in model_class(config).state_dict().items()}
        self.shapes = {}
        for name, shape in shapes.items():
            self.shapes |= self.apart(name, shape)
        quantised = re.compile(r"_proj\.weight$|\.w[123]\.weight$")
        self.linears = {name.removesuffix(".weight"): shape for name, shape in self.shapes.items() if quantised.search(name)}

    def in_file(self, name):
        return name.replace(".mlp.", ".block_sparse_moe.") if self.names is MIXTRAL else name

    def apart(self, name, shape):
        """The shapes of a tensor's parts in a file: of stacked matrices, those of each expert."""
        gate, up, down = self.names
        prefix, stacked, part = self.in_file(name).rpartition("experts.")
        if not stacked:
            return {self.in_file(name): shape}
        experts, n, k = shape
        layers = {gate: (n // 2, k), up: (n // 2, k)} if part == "gate_up_proj" else {down: (n, k)}
        return {f"{prefix}experts.{expert}.{layer}.weight": of for expert in range(experts) for layer, of in layers.items()}

    def to_model(self, tensors):
        """The tensors by transformers' names, with stacked matrices."""
        gate, up, down = self.names
        with torch.device("meta"):
            wanted = list(self.model_class(self.config).state_dict())
        model = {}
        for name in wanted:
            prefix, stacked, part = self.in_file(name).rpartition("experts.")
            if not stacked:
                if self.in_file(name) in tensors:
                    model[name] = tensors[self.in_file(name)]
                continue
            layers = (gate, up) if part == "gate_up_proj" else (down,)
            of = lambda expert: torch.cat([tensors[f"{prefix}experts.{expert}.{layer}.weight"].float() for layer in layers])
            count = self.config.num_local_experts if hasattr(self.config, "num_local_experts") else self.config.num_experts
            model[name] = torch.stack([of(expert) for expert in range(count)])
        return model

    def from_model(self, tensors):
        """The inverse of [`to_model`]."""
        gate, up, down = self.names
        file = {}
        for name, value in tensors.items():
            prefix, stacked, part = self.in_file(name).rpartition("experts.")
            if not stacked:
                file[self.in_file(name)] = value
                continue
            for expert, matrix in enumerate(value):
                layers = {gate: matrix.chunk(2)[0], up: matrix.chunk(2)[1]} if part == "gate_up_proj" else {down: matrix}
                file |= {f"{prefix}experts.{expert}.{layer}.weight": own for layer, own in layers.items()}
        return file

    @property
    def write_options(self):
        return dict(model_class=self.model_class, to_model=self.to_model)

    def float_tensors(self):
        return {name: float_tensor(name, shape) for name, shape in self.shapes.items()}


def qwen3(**more):
    options = dict(intermediate_size=96, moe_intermediate_size=32, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, num_hidden_layers=1,
                   head_dim=32) | SIZES | more
    return Mixture(Qwen3MoeForCausalLM, Qwen3MoeConfig(**options))


def qwen2(**more):
    options = dict(intermediate_size=96, moe_intermediate_size=32, shared_expert_intermediate_size=64, num_experts=5, num_experts_per_tok=2,
                   num_hidden_layers=1) | SIZES | more
    return Mixture(Qwen2MoeForCausalLM, Qwen2MoeConfig(**options))


def mixtral(**more):
    options = dict(intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=1, head_dim=32) | SIZES | more
    return Mixture(MixtralForCausalLM, MixtralConfig(**options))


def plain(name, model, dtype, note, edit=None):
    model.config.dtype = dtype
    tensors = {key: value.to(dtype) for key, value in model.float_tensors().items()}
    write(name, model.config, tensors, packer=PACKER, config_edit=edit, note=note, **model.write_options)


def to_one(name, expert, note):
    """Every token has a large first channel, which only the row of `expert` in the router reads; the rest of the router is small beside that."""
    model = qwen3(num_experts=4, num_experts_per_tok=1, norm_topk_prob=False)
    model.config.dtype = torch.float16
    tensors = model.float_tensors()
    tensors["model.embed_tokens.weight"][:, 0] = 8.0
    router = tensors["model.layers.0.mlp.gate.weight"]
    router /= 4.0
    router[:, 0] = 0.5 * (torch.arange(len(router)) == expert)
    tensors = {key: value.half() for key, value in tensors.items()}
    write(name, model.config, tensors, packer=PACKER, note=note, **model.write_options)
    assert_all_to(expert, name, model, tensors)


def assert_all_to(expert, name, model, tensors):
    """By transformers: the tokens of the folder, and all of the vocabulary in both directions, have `expert` first by a clear margin."""
    reference = model.model_class(model.config).float().eval()
    reference.load_state_dict({key: value.float() for key, value in model.to_model(tensors).items()})
    every = torch.arange(model.config.vocab_size)[None]
    for ids in (load_file(OUT / name / EXPECTED)["input_ids"], every, every.flip(1)):
        with torch.no_grad():
            [logits] = reference(ids, output_router_logits=True).router_logits
        assert logits.shape == (ids.shape[1], model.config.num_experts)
        first, second = logits.topk(2).values.unbind(-1)
        assert (logits.argmax(-1) == expert).all() and (first - second).min() > 1.0, (name, first - second)
        assert logits.softmax(-1).max() < 0.95, "the expert's own weight counts, too"


def main():
    rename = lambda fields: fields.update(num_experts=fields.pop("num_local_experts"))
    plain("arch-qwen3-moe", qwen3(num_hidden_layers=3, mlp_only_layers=[1]), torch.bfloat16, "the second of three layers has no experts", rename)
    plain("arch-qwen2-moe", qwen2(num_hidden_layers=2, decoder_sparse_step=2), torch.float16,
          "the second of two layers has experts, whose weights are not divided by their sum, and one beside them")
    plain("arch-mixtral", mixtral(), torch.float16, "two of four experts")
    plain("moe-one-of-eight", qwen3(num_experts=8, num_experts_per_tok=1, norm_topk_prob=False), torch.bfloat16, "one expert a token: most have none")
    plain("moe-all", qwen2(num_experts_per_tok=5, norm_topk_prob=True), torch.float16, "every token has every expert")
    to_one("moe-to-one", 2, "all tokens to one expert: the third of four, one a token, whose weights are not divided by their sum")

    v1, v2 = FORMAT.GPTQ, FORMAT.GPTQ_V2
    gptq.checkpoint("moe-gptq-int4-g32-sym", qwen3(), gptq.quantize_config(bits=4, group_size=32, sym=True, desc_act=False, format=v1))
    gptq.checkpoint("moe-gptq-int4-g32-asym-act-order", qwen2(), gptq.quantize_config(bits=4, group_size=32, sym=False, desc_act=True, format=v2),
                    note="each expert has its own order of activations; experts have zero points")
    dynamic = {r"-:.*self_attn.*": {}, r"+:.*experts.*": {"bits": 8}}
    gptq.checkpoint("moe-gptq-dynamic", mixtral(), gptq.quantize_config(bits=4, group_size=32, sym=True, desc_act=False, format=v1, dynamic=dynamic),
                    note="`dynamic`: attention is left, experts have 8 bits")
    # AutoRound leaves a router as it is, and writes this.
    router = {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "fp"}}
    auto_round.checkpoint("moe-auto-round-gptq-sym", "auto_round:auto_gptq", 32, symmetric=True, format="gptq v1", model=qwen3(num_experts=4),
                          extra=router, note="`extra_config` names the router")
    awq.load()
    awq.checkpoint("moe-awq-g32", mixtral(), 32, not_converted=["gate"], spelling="transformers")
    compressed_tensors.checkpoint("moe-ct-int4-g32-sym", compressed_tensors.every_linear(4, 32, True), model=qwen3(), ignore=ROUTERS, dtype=torch.bfloat16)
    compressed_tensors.checkpoint("moe-ct-int4-g32-asym", compressed_tensors.every_linear(4, 32, False), model=qwen2(), ignore=ROUTERS)
    for name, preset, format, shown in [("moe-ct-fp8-block", FP8_BLOCK, "float-quantized", "e4m3 g128 W8A8"), ("moe-ct-mxfp4", MXFP4A16, "mxfp4-pack-quantized", "e2m1 g32"),
                                        ("moe-ct-nvfp4", NVFP4, "nvfp4-pack-quantized", "e2m1 g16")]:
        compressed_floats.every_linear(name, preset, format, shown, model=qwen3(), ignore=ROUTERS)


if __name__ == "__main__":
    main()
