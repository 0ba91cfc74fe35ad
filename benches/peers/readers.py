"""Writes models in every form that `burn-marlin quantize` has, opens each folder with transformers
on the CPU, and compares logits with those of `burn-marlin logits`.

transformers reads compressed-tensors' form with the package compressed-tensors, GPTQ's with
GPTQModel, which opens folders by itself, too. README.md says how to set up the environment, and
what the rows say.
"""

import argparse
import contextlib
import importlib.metadata
import io
import itertools
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

# The readers look for a GPU and for a hub; these runs have neither. Set before torch is imported.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "GPTQMODEL_CPU_WORKERS": "2",
    "TQDM_DISABLE": "1",
    "LOGURU_LEVEL": "CRITICAL",
    # The whole report of a file that is not read.
    "COLUMNS": "400",
    # GPTQModel compiles a kernel for each layer otherwise.
    "TORCHDYNAMO_DISABLE": "1",
}
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = REPOSITORY / "tests/golden"
LLAMA = "llama"
# Tiny models of the other architectures, and of mixtures. `made` has all sizes that groups of 128
# and a quantised head need.
DENSE = ["arch-llama3", "arch-mistral", "arch-phi3", "arch-qwen2", "arch-qwen3", "arch-seed-oss"]
MADE = "made-qwen3-moe"
MIXTURES = [MADE, "arch-qwen3-moe", "arch-qwen2-moe", "arch-mixtral", "arch-gpt-oss"]
# Files of the readers' own packers, whose logits are known.
OWN = [
    ("compressed-tensors", "ct-int4-g32-asym", "zero points"),
    ("compressed-tensors", "moe-ct-int4-g32-asym", "experts with zero points"),
    ("compressed-tensors", "moe-ct-nvfp4", "experts in NVFP4"),
    ("compressed-tensors", "ct-mxfp4", "MXFP4"),
    ("gptq", "gptq-v1-dynamic", "layers of settings of their own"),
    ("gptq", "gptq-v2-int4-channel-asym-act-order-head", "a quantised head"),
    ("gptq", "gptq-whole-qwen3-moe", "experts"),
    ("gptq", "gptq-whole-phi3", "Phi-3"),
]

# The largest relative error of logits. Both sides have the same weights and compute in f32: sums
# are rounded in another order.
EXACT = 2e-5
# Weights are rounded to the dtype of their scales, or products to f16.
ROUNDED = 5e-3
# Products are rounded to bf16, as those of experts may be, whatever the dtype of the model.
BF16 = 3e-2
# Activations of all layers are rounded to e4m3, which burn-marlin does on a GPU alone.
E4M3 = 0.15
TOKENS = 24


def forms():
    """The forms: a model, a format, and the options of `quantize`."""
    yield from ((LLAMA, *form) for form in itertools.chain(integers(), settings(), floats()))
    for model in DENSE:
        for format in ["compressed-tensors", "gptq"]:
            yield model, format, ["--group", "channel"]
        yield model, "compressed-tensors", ["--format-values", "fp8"]
    yield from ((model, *form) for model in MIXTURES for form in of_mixtures())


def integers():
    """Methods, widths, groups, zero points, orders, patterns and formats of integers, as far as
    `quantize` takes them together."""
    methods = ["rtn", "awq", "gptq", "sparsegpt"]
    groups = ["g128", "g64", "g32", "channel"]
    for method, bits, group, zeros in itertools.product(methods, [4, 8], groups, [False, True]):
        if group in ["g64", "g32"] and method != "rtn":
            continue  # in files the same as g128
        sparse = {"rtn": [False, True], "sparsegpt": [True]}.get(method, [False])
        orders = [False, True] if method == "gptq" else [False]
        for is_sparse, act_order in itertools.product(sparse, orders):
            formats = ["compressed-tensors", "gptq"]
            if is_sparse and not zeros and group in ["g128", "channel"]:
                formats.append("marlin-24")
            for format in formats:
                options = ["--method", method, "--bits", str(bits), "--group", group]
                options += ["--zero-points"] * zeros + ["--act-order"] * act_order
                yield format, options + ["--sparse24"] * (is_sparse and method == "rtn")


def settings():
    """Scales, clipping, and layers of settings of their own, the head among them."""
    down = "re:.*down_proj"
    for format in ["compressed-tensors", "gptq"]:
        for scales in ["bf16", "f32"]:
            yield format, ["--scales", scales]
        yield format, ["--clip"]
        yield format, ["--exclude", down]
        yield format, ["--override", f"{down}=bits:8"]
        yield format, ["--override", f"{down}=bits:8,group:g32", "--override",
                       "re:.*k_proj=group:channel", "--exclude", "re:.*[01].mlp.up_proj"]
        yield format, ["--bits", "8", "--override", f"{down}=bits:4"]
        yield format, ["--zero-points", "--override", f"{down}=bits:8"]
        for bits, head in itertools.product(["4", "8"], ["4", "8"]):
            yield format, ["--bits", bits, "--head", head]
        yield format, ["--zero-points", "--head", "8"]
        yield format, ["--sparse24", "--head", "8"]
        yield format, ["--method", "gptq", "--head", "8"]
        yield format, ["--exclude", down, "--head", "8"]
    yield "marlin-24", ["--sparse24", "--exclude", down]
    yield "marlin-24", ["--sparse24", "--override", f"{down}=bits:8"]
    yield "marlin-24", ["--sparse24", "--head", "8"]


def floats():
    """Values of floats, alone and beside others."""
    down = "re:.*down_proj"
    for values in ["fp8", "fp8-w8a8", "mxfp4", "nvfp4"]:
        floats = ["--format-values", values]
        yield "compressed-tensors", floats
        yield "compressed-tensors", [*floats, "--clip"]
        for method in ["awq", "gptq"]:
            yield "compressed-tensors", [*floats, "--method", method]
        yield "compressed-tensors", [*floats, "--exclude", down]
        for head in ["4", "8"]:
            yield "compressed-tensors", [*floats, "--head", head]
        yield "compressed-tensors", ["--override", f"{down}={values}"]
        yield "compressed-tensors", ["--zero-points", "--override", f"{down}={values}"]
    for values, other in [("fp8", "bits:8"), ("fp8", "nvfp4"), ("mxfp4", "bits:4"),
                          ("mxfp4", "nvfp4"), ("nvfp4", "fp8")]:
        yield "compressed-tensors", ["--format-values", values, "--override", f"{down}={other}"]
    yield "gptq", ["--format-values", "fp8"]


def of_mixtures():
    """Forms of mixtures, whose experts have files, and readers, of their own."""
    g32, experts, attention = ["--group", "g32"], r"re:.*\.experts\.", "re:.*self_attn"
    ordered = ["--method", "gptq", "--route-all", "--act-order"]
    for format in ["compressed-tensors", "gptq"]:
        yield format, g32
        yield format, [*g32, "--bits", "8"]
        yield format, ["--group", "channel"]
        yield format, [*g32, "--zero-points"]
        yield format, [*g32, "--head", "8"]
        yield format, [*g32, "--exclude", experts]
        yield format, [*g32, "--exclude", attention]
        yield format, [*g32, "--override", f"{experts}=bits:8"]
        yield format, [*g32, "--override", f"{attention}=bits:8"]
        yield format, [*g32, "--override", rf"{experts}.*(down_proj|w2)=bits:8"]
        yield format, [*g32, "--override", rf"{experts}0\..*=bits:8"]
        yield format, [*g32, "--method", "awq"]
    yield "gptq", [*g32, *ordered]
    yield "compressed-tensors", ["--group", "channel", *ordered]
    yield "compressed-tensors", [*g32, "--sparse24"]
    for values in ["fp8", "fp8-w8a8", "mxfp4", "nvfp4"]:
        yield "compressed-tensors", ["--format-values", values]
        yield "compressed-tensors", ["--format-values", values, "--exclude", experts]
        yield "compressed-tensors", [*g32, "--override", f"{experts}={values}"]
    yield "compressed-tensors", ["--format-values", "fp8", "--override", f"{experts}=mxfp4"]
    yield "compressed-tensors", ["--format-values", "fp8", "--head", "8"]


class Program:
    """The program burn-marlin."""

    def __init__(self, path):
        self.path = path

    def run(self, *arguments):
        """Its output, the last line of its errors where it refuses, and its warnings."""
        command = [str(part) for part in [self.path, *arguments]]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = done.stderr.strip().splitlines()
        refusal = lines[-1].removeprefix("error: ") if done.returncode else None
        return done.stdout, refusal, [line for line in lines if "WARN" in line]

    def logits(self, folder, ids):
        """Its logits after tokens, and why there are none."""
        ids = ",".join(map(str, ids))
        out, refusal, _ = self.run(
            "logits", folder, "--device", "flex", "--dtype", "f32", "--ids", ids)
        return json.loads(out)["logits"] if refusal is None else None, refusal


def open_transformers(folder, ids, dtype, way):
    """The logits of transformers, or why there are none, and the weights that it made up."""
    import torch
    import transformers

    warnings.filterwarnings("ignore")
    options = {
        "": {},
        "dequantize=True": {
            "quantization_config": transformers.CompressedTensorsConfig(dequantize=True)},
        "backend=torch": {
            "quantization_config": transformers.GPTQConfig(bits=4, backend="torch")},
    }[way]
    report = io.StringIO()
    logger = logging.getLogger("transformers")
    logger.handlers[:], logger.propagate = [logging.StreamHandler(report)], False
    try:
        with quietly(), torch.no_grad():
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype), device_map="cpu", output_loading_info=True,
                attn_implementation="eager", **options)
            logits = model(torch.tensor([ids])).logits[0, -1].float().tolist()
        return logits, None, made_up(info["missing_keys"])
    except Exception as error:  # whatever a reader raises is its verdict
        missing = re.findall(r"^(\S.*?) +\| MISSING", report.getvalue(), re.MULTILINE)
        # Uninitialised memory explains an index.
        missing = missing if isinstance(error, IndexError) else []
        return None, short(error, report.getvalue()), made_up(missing)


def open_gptqmodel(folder, ids):
    """The same of GPTQModel itself, in f16."""
    import torch

    warnings.filterwarnings("ignore")
    try:
        with quietly(), torch.no_grad():
            from gptqmodel import BACKEND, GPTQModel

            model = GPTQModel.load(
                str(folder), device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16)
            logits = model.model(torch.tensor([ids])).logits[0, -1].float().tolist()
        return logits, None, ""
    except Exception as error:
        return None, short(error, ""), ""


@contextlib.contextmanager
def quietly():
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def kind(name):
    """The name of a weight in all blocks and experts."""
    return re.sub(r"\.(\d+|\{[^}]*\})(?=\.)", ".*", name).removeprefix("model.layers.*.")


def made_up(names):
    """The names of the layers that a reader initialises, each once for all blocks."""
    layers = {re.sub(r"\.(g_idx|qweight|qzeros|scales)$", "", kind(name)) for name in names}
    return ", ".join(sorted(layers))


def short(error, report):
    """What a reader raised, in a line, with the reason in its report."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    mismatches = re.findall(
        r"^([^|\n]+?) +\| MISMATCH +\| .*ckpt: torch.Size\((.*?)\).*torch.Size\((.*?)\)",
        report, re.MULTILINE)
    conversion = re.findall(r"^(\w+(?:Error|Exception)\b.*)$", report, re.MULTILINE)
    if "ignore_mismatched_sizes" in text and mismatches:
        key, file, model = min(mismatches)
        text = f"{kind(key)} is {file} in the file, {model} in the model"
    elif "automatic conversion" in text and conversion:
        text = conversion[0]
    # Numbers of uninitialised memory.
    text = re.sub(r"index -?\d+ is", "index .. is", text)
    return re.sub(r"/tmp/\S+?/", "", text)[:110]


class Readers:
    """Processes that read: each package has one, since GPTQModel changes transformers' classes."""

    def __init__(self):
        self.pools = {}

    def read(self, process, function, *arguments):
        pool = self.pools.setdefault(process, ProcessPoolExecutor(1, get_context("spawn")))
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            del self.pools[process]
            return None, "the process ended", ""

    def ways(self, format, folder, ids):
        """What the ways of reading a format make of a folder: each has a name, and the logits."""
        if format == "gptq":
            found = self.read("gptq", open_transformers, folder, ids, "float32", "")
            if found[0] is None:
                # Of GPTQModel's kernels for CPUs the one that it prefers takes no groups of a whole
                # column, its own files' neither.
                again = self.read(
                    "gptq", open_transformers, folder, ids, "float32", "backend=torch")
                if again[0] is not None:
                    found = (again[0], f"with backend=torch; without {found[1]}", again[2])
            yield "transformers", *found
            yield "GPTQModel", *self.read("gptqmodel", open_gptqmodel, folder, ids)
            return
        found = self.read("tensors", open_transformers, folder, ids, "float32", "")
        if found[0] is None:
            again = self.read("tensors", open_transformers, folder, ids, "bfloat16", "")
            if again[0] is not None:
                found = (again[0], f"in bf16; in f32 {found[1]}", again[2])
        yield "transformers", *found
        way = "dequantize=True"
        yield way, *self.read("tensors", open_transformers, folder, ids, "float32", way)


def relative_error(found, expected):
    difference = sum((a - b) ** 2 for a, b in zip(found, expected, strict=True))
    return math.sqrt(difference / sum(value**2 for value in expected))


def limit(name, format, options, note, is_mixture):
    """The largest error of logits that were read right."""
    is_w8a8 = any("fp8-w8a8" in option for option in options)
    if name == "transformers" and is_w8a8:
        return E4M3
    if format == "gptq":
        return ROUNDED
    if is_mixture or note:
        return BF16
    return EXACT if name == "transformers" else ROUNDED


def check(program, readers, source, folder, format, options, calibration):
    """What became of a form: what the program said, what each reader made of it, and whether the
    program said what it had to."""
    needs_text = any(method in options for method in ["awq", "gptq", "sparsegpt"])
    calibrated = ["--calibration", calibration, "--samples", "8", "--max-len", "64",
                  "--device", "flex", "--dtype", "f32"]
    arguments = [*options, *calibrated * needs_text]
    _, refusal, warned = program.run("quantize", source, folder, "--format", format, *arguments)
    if refusal:
        return "refused", refusal[:150], True
    config = json.loads((source / "config.json").read_text())
    is_mixture = any("num_" in field and "experts" in field for field in config)
    ids = [(1 + 97 * i) % min(config["vocab_size"], 4000) for i in range(TOKENS)]
    written = "warned" if warned else "written"
    ours, refusal = program.logits(folder, ids)
    if refusal:
        return written, f"burn-marlin: {refusal}", False

    is_read, is_silent, outcomes = False, False, []
    for name, logits, note, missing in readers.ways(format, folder, ids):
        made = f", made up {missing}" if missing else ""
        if logits is None:
            outcomes.append(f"{name} {note}{made}")
            continue
        error = relative_error(logits, ours)
        is_right = error <= limit(name, format, options, note, is_mixture)
        outcomes.append(f"{name} {'' if is_right else 'wrong '}{error:.1e}"
                        f"{' ' + note if note else ''}{made}")
        is_silent |= not is_right
        if name == "transformers":
            in_bf16 = (note or "").startswith("in bf16")
            is_bf16 = config.get("dtype", config.get("torch_dtype")) == "bfloat16"
            is_read = is_right and (not in_bf16 or is_bf16)
    says_silent = any("without an error" in line for line in warned)
    is_said = (is_read or bool(warned)) and (not is_silent or says_silent)
    return written, "; ".join(outcomes), is_said


def own_mixed(folder):
    """A file that compressed-tensors writes itself: layers in 4 bits and a head in 8."""
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs, QuantizationConfig, QuantizationScheme, apply_quantization_config)
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with quietly():
        model = LlamaForCausalLM(LlamaConfig(
            hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=128, tie_word_embeddings=False))

        def group(bits, target):
            weights = QuantizationArgs(
                num_bits=bits, type="int", symmetric=True, strategy="group", group_size=128)
            return QuantizationScheme(targets=[target], weights=weights, format="pack-quantized")

        groups = {"group_0": group(4, "Linear"), "group_1": group(8, "lm_head")}
        config = QuantizationConfig(config_groups=groups, ignore=[], format="pack-quantized")
        apply_quantization_config(model, config)
        for module in model.modules():
            scheme = getattr(module, "quantization_scheme", None)
            if scheme is None:
                continue
            rows = module.weight.detach().unflatten(-1, (-1, 128))
            scale, zero = calculate_qparams(rows.amin(-1), rows.amax(-1), scheme.weights)
            module.weight_scale.data.copy_(scale)
            module.weight_zero_point.data.copy_(zero)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(folder)


def make_mixture(folder):
    """A random mixture of transformers, in bf16, whose sizes are multiples of 128."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=128, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=4,
        num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        vocab_size=32, max_position_embeddings=64, initializer_range=0.1)
    with quietly():
        Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def with_tokenizer(source, folder):
    """A copy of a folder of 32 tokens with a tokenizer: a token for each letter."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    if not folder.exists():
        ignored = shutil.ignore_patterns("expected.safetensors")
        shutil.copytree(source, folder, ignore=ignored)
    letters = {letter: 1 + i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz .,`-")}
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, **letters}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"})
    (folder / "tokenizer_config.json").write_text(text)
    return folder


def own_files(readers, parent):
    """What the readers make of files of their own packers."""
    from safetensors.torch import load_file

    print("\nfiles of the packers themselves, with the relative error to the logits that they give")
    index = {entry["name"]: entry for entry in json.loads((GOLDEN / "index.json").read_text())}
    for format, name, what in OWN:
        expected = load_file(GOLDEN / index[name]["expected"])
        folder = with_tokenizer(GOLDEN / name, parent / name)
        ids = expected["input_ids"][0].tolist()
        logits = expected["logits"][0, -1].tolist()
        outcomes = []
        for way, found, note, missing in readers.ways(format, folder, ids):
            error = f"{relative_error(found, logits):.1e} " if found else ""
            made = f", made up {missing}" if missing else ""
            outcomes.append(f"{way} {error}{note or ''}{made}".strip())
        print(f"{format:<18} {what:<33} {'; '.join(outcomes)}", flush=True)
    own_mixed(parent / "mixed")
    plain, dequantised = (
        found[1] for found in readers.ways("compressed-tensors", parent / "mixed", [1, 2, 3, 4]))
    error = relative_error(dequantised, plain)
    print(f"{'compressed-tensors':<18} {'layers in 4 bits, a head in 8':<33} "
          f"dequantize=True {error:.1e} from the logits without it", flush=True)


def commit():
    """The commit of the repository, and whether the sources differ from it."""
    def git(*arguments):
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "crates", "benches/peers")
    return git("rev-parse", "--short=8", "HEAD") + (" with changes" if changed else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path, help="the program burn-marlin")
    parser.add_argument("--only", default="", help="forms whose row has this text")
    args = parser.parse_args()
    packages = ["transformers", "compressed-tensors", "gptqmodel", "torch"]
    versions = (f"{package} {importlib.metadata.version(package)}" for package in packages)
    print(f"{', '.join(versions)}; burn-marlin {commit()}")
    print("the program's verdict, and each reader's relative error of logits or what it raised")
    program, readers = Program(args.program), Readers()
    calibration = REPOSITORY / "book/src/quantise.md"
    failed = total = 0
    with tempfile.TemporaryDirectory() as parent:
        parent = Path(parent)
        make_mixture(parent / MADE)
        sources = {model: with_tokenizer(GOLDEN / model, parent / model)
                   for model in [*DENSE, *MIXTURES]}
        sources[LLAMA] = REPOSITORY / "examples/train-tiny-llama/model"
        for model, format, options in forms():
            row = f"{model:<14} {format:<18} {' '.join(options):<58}"
            if args.only not in row:
                continue
            folder = parent / "target"
            said, outcome, is_right = check(
                program, readers, sources[model], folder, format, options, calibration)
            shutil.rmtree(folder, ignore_errors=True)
            print(f"{row} {said:<7} {outcome}{'' if is_right else '  WRONG'}", flush=True)
            total, failed = total + 1, failed + (not is_right)
        if not args.only:
            own_files(readers, parent)
    print(f"{total} forms, {failed} of them wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
