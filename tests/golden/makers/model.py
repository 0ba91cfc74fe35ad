"""What every maker shares: the tiny Llama, its quantised layers as integers, the reference logits, and the writing of a folder."""

import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

OUT = Path(__file__).resolve().parent.parent
INDEX = OUT / "index.json"
EXPECTED = "expected.safetensors"
TOKENS = 5


def generator(*seed) -> torch.Generator:
    """Random numbers that depend on nothing but `seed`: the same layer is the same in every format."""
    return torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))


@dataclass
class Codes:
    """A quantised weight as integers: `weight[n, k] = scales[n, g_idx[k]] * (q[n, k] - zeros[n, g_idx[k]])`."""

    bits: int
    group: int  # -1: one group, all of K
    q: torch.Tensor  # int32 [N, K], 0 ..= 2^bits - 1
    scales: torch.Tensor  # f16, bf16 or f32 [N, G]
    zeros: torch.Tensor  # int32 [N, G]
    g_idx: torch.Tensor  # int32 [K]

    def weight(self, dtype=torch.float32) -> torch.Tensor:
        """What a packer is given: it finds `q` again by rounding."""
        g = self.g_idx.long()
        return (self.scales.float()[:, g] * (self.q - self.zeros[:, g])).to(dtype)


def codes(n, k, bits, group, *, name, symmetric=True, lowest_zero=0, order=None, dtype=torch.float16) -> Codes:
    """Random values over the whole range. `lowest_zero` is the least zero point; `order` seeds a random `g_idx`, and
    what reads the same activations has the same seed."""
    g = generator(name, n, k, bits, group, symmetric)
    top = 2**bits - 1
    rows = k if group == -1 else group
    q = torch.randint(0, top + 1, (n, k), generator=g, dtype=torch.int32)
    spread = 0.29 * (top + 1)  # the standard deviation of q
    groups = -(-k // rows)  # the last one may not be full
    scales = ((0.5 + torch.rand(n, groups, generator=g)) / (spread * k**0.5)).to(dtype)
    zeros = torch.randint(0, top + 1, (n, groups), generator=g, dtype=torch.int32).clamp(min=lowest_zero)
    if symmetric:
        zeros = torch.full_like(zeros, (top + 1) // 2)
    g_idx = torch.arange(k, dtype=torch.int32) // rows
    if order is not None:
        g_idx = g_idx[torch.randperm(k, generator=generator("order", order, k))].contiguous()
    return Codes(bits, group, q, scales, zeros, g_idx)


def e4m3(n, k, *, name) -> torch.Tensor:
    """Random values of 8 bits: every code except for the two of NaN, `[N, K]` in `float8_e4m3fn`."""
    codes = torch.randint(0, 254, (n, k), generator=generator(name, n, k, "e4m3"))
    return (codes + (codes >= 0x7F)).to(torch.uint8).view(torch.float8_e4m3fn)


def e2m1(n, k, *, name) -> torch.Tensor:
    """Random values of 4 bits: every number, `[N, K]` in f32. The zeros are positive: not every packer writes negative ones."""
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.randint(0, 16, (n, k), generator=generator(name, n, k, "e2m1"))
    return numbers[codes % 8] * torch.where(codes < 8, 1.0, -1.0) + 0.0  # -0.0 + 0.0 is 0.0


def float_scales(shape, k, spread, *, name) -> torch.Tensor:
    """Random scales in f32, for values with the standard deviation `spread`."""
    return (0.5 + torch.rand(shape, generator=generator(name, *shape, "scales"))) / (spread * k**0.5)


# The standard deviations of the values of `e4m3` and `e2m1`.
E4M3_SPREAD, E2M1_SPREAD = 130.0, 2.93


class Tiny:
    # Options of `write` for models that are no Llama.
    write_options: dict = {}

    """A Llama of one layer, its sizes, and its weights in f32 as far as nothing else is said of them."""

    def __init__(self, hidden=32, intermediate=64, heads=1, kv_heads=1, head_dim=32, vocab=32, **more):
        self.config = LlamaConfig(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=1, num_attention_heads=heads,
            num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
            bos_token_id=1, eos_token_id=2, **more,
        )
        q, kv = heads * head_dim, kv_heads * head_dim
        attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
        # [N, K] of every linear layer that formats quantise.
        self.linears = {
            f"{attention}.q_proj": (q, hidden), f"{attention}.k_proj": (kv, hidden), f"{attention}.v_proj": (kv, hidden),
            f"{attention}.o_proj": (hidden, q), f"{mlp}.gate_proj": (intermediate, hidden), f"{mlp}.up_proj": (intermediate, hidden),
            f"{mlp}.down_proj": (hidden, intermediate),
        }

    def float_tensors(self) -> dict:
        """Random values for every tensor of the model."""
        with torch.device("meta"):
            shapes = {name: value.shape for name, value in LlamaForCausalLM(self.config).state_dict().items()}
        return {name: float_tensor(name, shape) for name, shape in shapes.items()}


def float_tensor(name, shape) -> torch.Tensor:
    """In f32; f16 and bf16 hold it as it is."""
    value = torch.randn(shape, generator=generator(name, *shape))
    if len(shape) == 1:
        value = 0.1 * value + (1.0 if name.lower().endswith("norm.weight") else 0.0)
    elif "embed" not in name:
        value = value / (shape[-1] if len(shape) == 2 else shape[1]) ** 0.5
    return (value * 256).round().clamp(-1023, 1023) / 256


def logits_of(model_class, config, tensors, tokens=TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids `[1, T]` and the logits `[1, T, vocab]` of transformers, in f32 without a fused attention."""
    config._attn_implementation = "eager"
    model = model_class(config).float().eval()
    missing, unexpected = model.load_state_dict({name: value.float() for name, value in tensors.items()}, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert set(missing) <= tied and not unexpected, (missing, unexpected)
    ids = torch.randint(0, config.vocab_size, (1, tokens), generator=generator("ids", config.vocab_size))
    with torch.no_grad():
        return ids, model(ids).logits.float()


def write(name, config, tensors, *, packer, weights=None, formats=None, dequantized_in=None, quantization=None, quantize_config=None,
          quantize_file="quantize_config.json", shards=1, file="model.safetensors", model_class=LlamaForCausalLM, to_model=None, reference=None,
          config_edit=None, note=None, tokens=TOKENS):
    """Writes `tests/golden/{name}` and its entry of the index.

    `tensors`: what the file holds. `weights`: by layer, the packer's own dequantisation `[N, K]` in the dtype it computes in.
    `reference`: the float tensors of the reference model, where they are not `tensors` with `weights` in place of packed ones. `to_model`: what makes
    these of tensors with the file's names.
    """
    if reference is None and to_model is not None:
        reference = to_model(tensors | {f"{layer}.weight": weight.float() for layer, weight in (weights or {}).items()})
    if reference is None:
        with torch.device("meta"):
            wanted = set(model_class(config).state_dict())
        reference = {key: value for key, value in tensors.items() if key in wanted}
        reference |= {f"{layer}.weight": weight.float() for layer, weight in (weights or {}).items()}
    ids, logits = logits_of(model_class, config, reference, tokens)
    write_folder(name, config, tensors, {"input_ids": ids, "logits": logits}, packer=packer, weights=weights or {}, formats=formats or {},
                 dequantized_in=dequantized_in, quantization=quantization, quantize_config=quantize_config, quantize_file=quantize_file,
                 shards=shards, file=file, model_class=model_class, config_edit=config_edit, note=note)


def write_layers(name, config, tensors, *, note="the quantised layers alone, without the rest of a model", **options):
    """As [`write`], for a checkpoint that holds some layers only: there are no logits."""
    write_folder(name, config, tensors, {}, model_class=LlamaForCausalLM, note=note, **options)


def write_folder(name, config, tensors, whole, *, packer, weights, formats, dequantized_in, model_class, quantization=None, quantize_config=None,
                 quantize_file="quantize_config.json", shards=1, file="model.safetensors", config_edit=None, note=None):
    """The files of a checkpoint, and what is expected of it: `weights` and, of the `whole` model, token ids and logits."""
    folder = OUT / name
    folder.mkdir(exist_ok=True)
    fields = json.loads(config.to_json_string(use_diff=True))
    fields["architectures"] = [model_class.__name__]
    if quantization is not None:
        fields["quantization_config"] = quantization
    if config_edit is not None:
        config_edit(fields)
    write_json(folder / "config.json", fields)
    if quantize_config is not None:
        write_json(folder / quantize_file, quantize_config)
    write_tensors(folder, {key: value.contiguous() for key, value in sorted(tensors.items())}, shards, file)

    expected = {f"{layer}.weight": weight.contiguous() for layer, weight in weights.items()}
    save_file(expected | whole, folder / EXPECTED)
    dtypes = {str(weight.dtype).removeprefix("torch.") for weight in weights.values()}
    assert dtypes <= {dequantized_in}, (name, dtypes)
    entry = {"name": name, "packer": packer, "architecture": model_class.__name__, "layers": formats, "dequantized_in": dequantized_in,
             "logits": bool(whole)}
    record(entry | ({"note": note} if note else {}) | {"expected": f"{name}/{EXPECTED}"})
    print(f"{name}: {sum(f.stat().st_size for f in folder.iterdir()) / 1000:.1f} kB")


def write_tensors(folder, tensors, shards, file):
    """One file, or several with their index."""
    if shards == 1:
        save_file(tensors, folder / file, metadata={"format": "pt"})
        return
    names = list(tensors)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": {}}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard * len(names) // shards:(shard + 1) * len(names) // shards]
        save_file({key: tensors[key] for key in part}, folder / file, metadata={"format": "pt"})
        index["weight_map"] |= {key: file for key in part}
    write_json(folder / "model.safetensors.index.json", index)


def save_tokenizer(folder, vocab):
    """One word a token: packers that run as a whole want a tokenizer in the folder they read."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{token}": token for token in range(3, vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>").save_pretrained(folder)


def record(entry):
    """Puts the entry of a folder in place of an older one of its name."""
    entries = {old["name"]: old for old in json.loads(INDEX.read_text())} if INDEX.exists() else {}
    entries[entry["name"]] = entry
    write_json(INDEX, [entries[name] for name in sorted(entries)])


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
