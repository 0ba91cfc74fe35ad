"""Quantises a Llama with two published quantisers, GPTQModel and llm-compressor, on the CPU, and measures perplexities.

The two need different versions of torch and transformers, so each has an environment of its own; README.md says how to set
them up. `text` needs Python alone, `calibration` the package tokenizers, and `perplexity` runs in the environment of
llm-compressor: it takes the folders of both.
"""

import argparse
import json
import math
import os
import random
import statistics
from pathlib import Path

# The quantisers look for a GPU and for a hub; these runs have neither. Set before torch is imported.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# GPTQModel's loader asks for two of these workers, and on a machine of one or two cores it makes one and stops.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

# Crates of the held-out text: never calibrated on.
HELD_OUT = ("indexmap-", "itertools-", "regex-syntax-", "tempfile-", "url-")


# --- calibration text -------------------------------------------------------------------------------------------------


def text(args):
    """Writes every n-th .rs and .md file of the unpacked crates into one file, sorted by path."""
    root = Path(args.root).expanduser()
    files = []
    for path in sorted(root.glob("*/*/**/*")):
        crate = path.relative_to(root).parts[1]
        if path.suffix in (".rs", ".md") and path.is_file() and not crate.startswith(HELD_OUT):
            files.append(path)
    with open(args.out, "w", encoding="utf-8", newline="") as out:
        taken = files[:: args.every]
        for path in taken:
            content = path.read_bytes()[: args.max_bytes].decode("utf-8", errors="ignore")
            out.write(content if content.endswith("\n") else content + "\n")
    print(f"{len(taken)} of {len(files)} files, {os.path.getsize(args.out) / 1e6:.1f} MB")


def encode_file(tokenizer, path, chunk=1 << 20):
    """The tokens of a file, encoded in chunks of about 1 MiB that end at a line's end, to keep memory small."""
    ids, lines, size = [], [], 0

    def flush():
        ids.extend(tokenizer.encode("".join(lines)).ids)
        lines.clear()

    with open(path, encoding="utf-8", newline="") as file:
        for line in file:
            lines.append(line)
            size += len(line)
            if size >= chunk:
                flush()
                size = 0
    flush()
    return ids


def calibration(args):
    """Draws samples of max_len tokens whose decoded text encodes to the very same tokens again."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(args.model) / "tokenizer.json"))
    ids = encode_file(tokenizer, args.text)
    pieces = [ids[start : start + args.max_len] for start in range(0, len(ids) - args.max_len + 1, args.max_len)]
    random.Random(args.seed).shuffle(pieces)
    samples, tried = [], 0
    for piece in pieces:
        if len(samples) == args.samples:
            break
        tried += 1
        sample = tokenizer.decode(piece, skip_special_tokens=False)
        if tokenizer.encode(sample).ids == piece:
            samples.append(sample)
    if len(samples) < args.samples:
        raise SystemExit(f"only {len(samples)} samples in {args.text}")
    with open(args.out, "w", encoding="utf-8") as out:
        for sample in samples:
            out.write(json.dumps({"text": sample}) + "\n")
    print(f"{len(ids)} tokens; {len(samples)} samples of {args.max_len} tokens, {tried - len(samples)} dropped")


def read_samples(path, model):
    """The tokens of the samples, as the tokenizer of the model gives them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [tokenizer.encode(json.loads(line)["text"]).ids for line in lines]


# --- the quantisers ---------------------------------------------------------------------------------------------------


def gptqmodel(args):
    """Quantises to 4 bits with GPTQModel. Without options, its default settings."""
    import torch
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.quantization.config import FOEMConfig, GPTAQConfig, QuantizeConfig

    options = {"bits": 4, "group_size": args.group, "sym": True, "device": "cpu", "offload_to_disk": False}
    if args.act_order:
        options.update(desc_act=args.act_order == "desc", act_group_aware=False)
    if args.mse:
        options["mse"] = args.mse
    if args.damp:
        options["damp_percent"] = args.damp
    if args.gptaq:
        options["gptaq"] = GPTAQConfig()
    if args.foem:
        options["foem"] = FOEMConfig()
    config = QuantizeConfig(**options)

    samples = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in read_samples(args.calibration, args.model)]
    # In f32, as burn-marlin on a CPU; so too in llmcompressor.
    model = GPTQModel.load(args.model, config, dtype=torch.float32, backend=BACKEND.TORCH)
    model.quantize(samples, batch_size=1, calibration_data_min_length=1)
    model.save(args.out)
    used = ("group_size", "desc_act", "act_group_aware", "static_groups", "mse", "damp_percent", "gptaq", "foem")
    print(args.out, {key: getattr(config, key) for key in used})


def llmcompressor(args):
    """Quantises to 4 bits with llm-compressor. Without options, the default settings of its GPTQModifier."""
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.pruning.sparsegpt import SparseGPTModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": args.group}
    if args.observer:
        weights["observer"] = args.observer
    options = {}
    if args.act_order:
        options["actorder"] = None
    if args.damp:
        options["dampening_frac"] = args.damp
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    recipe = [GPTQModifier(config_groups={"group_0": scheme}, ignore=["lm_head"], **options)]
    if args.sparse24:
        recipe.insert(0, SparseGPTModifier(sparsity=0.5, mask_structure="2:4", targets=["Linear"], ignore=["re:.*lm_head"]))

    ids = read_samples(args.calibration, args.model)
    samples = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(sample) for sample in ids]})
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=samples,
        recipe=recipe,
        num_calibration_samples=len(samples),
        max_seq_length=max(map(len, ids)),
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(args.out, save_compressed=True)
    tokenizer.save_pretrained(args.out)
    gptq = recipe[-1]
    print(args.out, gptq.resolved_config.config_groups["group_0"].weights, f"damping {gptq.dampening_frac}")


# --- perplexity -------------------------------------------------------------------------------------------------------


def unpack_int32(packed, dim):
    """Unsigned integers of 4 bits from int32 words, lowest bits first, along `dim`."""
    import torch

    values = torch.stack([(packed >> shift) & 15 for shift in range(0, 32, 4)], dim + 1)
    return values.flatten(dim, dim + 1)


def dequantise_gptq(tensors, name, version):
    """The float weight, [outputs, inputs], of one layer in GPTQ's form."""
    codes = unpack_int32(tensors[f"{name}.qweight"], 0)  # [inputs, outputs]
    zeros = unpack_int32(tensors[f"{name}.qzeros"], 1)  # [groups, outputs]
    if version == "gptq":  # the first form stores each zero point less one
        zeros = (zeros + 1) & 15
    scales = tensors[f"{name}.scales"].float()
    group = tensors[f"{name}.g_idx"].long()
    return ((codes - zeros[group]).float() * scales[group]).T.contiguous()


def load(folder):
    """A LlamaForCausalLM in f32 from a folder with float weights, GPTQ weights or compressed-tensors weights."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    quantised = json.loads(Path(folder, "config.json").read_text()).get("quantization_config", {})
    method = quantised.get("quant_method")
    if method == "gptq":
        tensors = {}
        for path in sorted(Path(folder).glob("*.safetensors")):
            tensors.update(load_file(path))
        version = quantised.get("checkpoint_format") or quantised.get("format", "gptq")
        names = [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]
        for name in names:
            tensors[f"{name}.weight"] = dequantise_gptq(tensors, name, version)
            for part in ("qweight", "qzeros", "scales", "g_idx"):
                del tensors[f"{name}.{part}"]
        config = AutoConfig.from_pretrained(folder)
        del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        if unexpected or [key for key in missing if key != "lm_head.weight"]:
            raise SystemExit(f"{folder}: missing {missing}, unexpected {unexpected}")
        model.tie_weights()
    elif method == "compressed-tensors":
        from transformers import CompressedTensorsConfig

        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def window_nlls(model, ids, window):
    """The mean negative log-likelihood of each window; windows do not overlap, and the first token of each is not predicted."""
    import torch

    nlls = []
    with torch.no_grad():
        for start in range(0, len(ids) - window + 1, window):
            piece = torch.tensor([ids[start : start + window]])
            logits = model(input_ids=piece, use_cache=False).logits[0, :-1].float()
            nlls.append(torch.nn.functional.cross_entropy(logits, piece[0, 1:]).item())
    return nlls


def keeps_24(model):
    """The share of runs of four neighbouring weights, in the layers, with at least two zeros."""
    import torch

    kept, runs = 0, 0
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            zeros = (module.weight.reshape(-1, 4) == 0).sum(dim=1)
            kept += (zeros >= 2).sum().item()
            runs += zeros.numel()
    return kept / runs


def perplexity(args):
    """Prints a table of perplexities; the first folder is the one that the others are compared with."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(args.folders[0]) / "tokenizer.json"))
    content = Path(args.text).read_bytes().decode("utf-8")
    ids = tokenizer.encode(content).ids[: args.max_tokens]
    base = None
    print("| folder | mean NLL | perplexity | change | runs kept 2:4 |")
    print("|---|---|---|---|---|")
    for folder in args.folders:
        model = load(folder)
        nlls = window_nlls(model, ids, args.window)
        base = base or nlls
        nll = statistics.mean(nlls)
        changes = [found - expected for found, expected in zip(nlls, base)]
        ratio = math.exp(statistics.mean(changes))
        error = ratio * statistics.stdev(changes) / math.sqrt(len(changes))
        print(f"| {Path(folder).name} | {nll:.5f} | {math.exp(nll):.4f} | {100 * (ratio - 1):+.2f} ± {100 * error:.2f} % "
              f"| {100 * keeps_24(model):.1f} % |", flush=True)


# --- command line -----------------------------------------------------------------------------------------------------


def main():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("text", help="make a calibration text of the crates that cargo has unpacked")
    command.add_argument("out")
    command.add_argument("--root", default="~/.cargo/registry/src")
    command.add_argument("--every", type=int, default=10, help="take every n-th file")
    command.add_argument("--max-bytes", type=int, default=200_000, help="bytes of a file at most")
    command.set_defaults(run=text)

    command = commands.add_parser("calibration", help="cut a text into samples that encode to the same tokens again")
    command.add_argument("text")
    command.add_argument("out")
    command.add_argument("--model", required=True)
    command.add_argument("--samples", type=int, default=128)
    command.add_argument("--max-len", type=int, default=512)
    command.add_argument("--seed", type=int, default=0)
    command.set_defaults(run=calibration)

    def quantiser(name, run, orders):
        command = commands.add_parser(name, help=run.__doc__)
        command.add_argument("model")
        command.add_argument("calibration")
        command.add_argument("out")
        command.add_argument("--group", type=int, default=128)
        command.add_argument("--act-order", choices=orders, help="the default of the quantiser when not given")
        command.add_argument("--damp", type=float, help="share of the mean diagonal that is added to the Hessian")
        command.set_defaults(run=run)
        return command

    command = quantiser("gptqmodel", gptqmodel, ["none", "desc"])
    command.add_argument("--mse", type=float, default=0.0, help="exponent of the search for scales; 0 is no search")
    command.add_argument("--gptaq", action="store_true", help="with GPTAQ's term for the error of earlier layers")
    command.add_argument("--foem", action="store_true", help="with FOEM's first-order term")

    command = quantiser("llmcompressor", llmcompressor, ["none"])
    command.add_argument("--observer", help="how scales are chosen, such as minmax or mse")
    command.add_argument("--sparse24", action="store_true", help="SparseGPT to 2:4 before GPTQ")

    command = commands.add_parser("perplexity", help="perplexities, and the change over the first folder's")
    command.add_argument("folders", nargs="+")
    command.add_argument("--text", required=True)
    command.add_argument("--max-tokens", type=int, default=16384)
    command.add_argument("--window", type=int, default=512)
    command.set_defaults(run=perplexity)

    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
