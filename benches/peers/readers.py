"""Writes a model in every form that `burn-marlin quantize` has, opens each folder with transformers on the CPU, and compares logits with `burn-marlin logits`.

transformers reads compressed-tensors' form with the package compressed-tensors, GPTQ's with GPTQModel. README.md says how to set up the environment.
"""

import argparse
import contextlib
import importlib.metadata
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

# The readers look for a GPU and for a hub; these runs have neither. Set before torch is imported.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
os.environ.setdefault("TQDM_DISABLE", "1")
# GPTQModel compiles a kernel for each layer otherwise.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# Largest relative error of logits in f32 where both sides have the same weights: sums are rounded in another order. GPTQModel computes in f16.
ROUNDED = 5e-3
LIMITS = {"compressed-tensors": 2e-5, "gptq": ROUNDED, "marlin-24": 2e-5}
IDS = [1 + 97 * i % 4000 for i in range(24)]


def forms():
    """The options of each form: methods, widths, groups, zero points, orders, patterns and formats, as far as `quantize` takes them together."""
    for method, bits, group, zero_points in itertools.product(["rtn", "awq", "gptq", "sparsegpt"], [4, 8], ["g128", "g32", "channel"], [False, True]):
        if group == "g32" and method != "rtn":
            continue  # in files the same as g128
        sparse = {"rtn": [False, True], "sparsegpt": [True]}.get(method, [False])
        orders = [False, True] if method == "gptq" else [False]
        for is_sparse, act_order in itertools.product(sparse, orders):
            formats = ["compressed-tensors", "gptq"]
            if is_sparse and not zero_points and group != "g32":
                formats.append("marlin-24")
            for format in formats:
                yield format, [
                    "--method", method, "--bits", str(bits), "--group", group, *["--zero-points"] * zero_points, *["--act-order"] * act_order,
                    *["--sparse24"] * (is_sparse and method == "rtn"),
                ]
    for format in ["compressed-tensors", "gptq"]:
        for scales in ["bf16", "f32"]:
            yield format, ["--method", "rtn", "--scales", scales]
        yield format, ["--method", "rtn", "--override", "re:.*down_proj=bits:8,group:g32", "--override", "re:.*k_proj=group:channel", "--exclude", "re:.*[01].mlp.up_proj"]
        yield format, ["--method", "rtn", "--clip"]


def run(*command):
    """The program's standard output; the last line of its errors where it refuses; and its warnings."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    warned = [line for line in done.stderr.splitlines() if "WARN" in line]
    refusal = done.stderr.strip().splitlines()[-1] if done.returncode else None
    return done.stdout, refusal, warned


def read(folder, **options):
    """The logits after `IDS`, of transformers in f32."""
    import torch
    from transformers import AutoModelForCausalLM

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu", attn_implementation="eager", **options)
        return model(torch.tensor([IDS])).logits[0, -1].float()


def short(error):
    """The first line of what a reader raised."""
    text = " ".join(str(error).split())
    return "sizes of tensors do not match" if "ignore_mismatched_sizes" in text else f"{type(error).__name__}: {text[:90]}"


def check(args, format, options, folder):
    """What became of a form: `written` or `refused`, the relative error of its logits or the reader's error, and if that is as it should be."""
    import torch
    from transformers import CompressedTensorsConfig, GPTQConfig

    calibration = ["--calibration", args.calibration, "--samples", "8", "--max-len", "64", "--device", "flex", "--dtype", "f32"]
    needs_text = any(method in options for method in ["awq", "gptq", "sparsegpt"])
    _, refusal, warned = run(args.program, "quantize", args.model, folder, "--format", format, *options, *(calibration if needs_text else []))
    if refusal:
        return "refused", refusal.removeprefix("error: ")[:120], True
    written = "warned" if warned else "written"
    ours, refusal, _ = run(args.program, "logits", folder, "--device", "flex", "--dtype", "f32", "--ids", ",".join(map(str, IDS)))
    if refusal:
        return written, f"burn-marlin: {refusal}", False
    ours = torch.tensor(json.loads(ours)["logits"])
    note = ""
    try:
        theirs = read(folder)
    except Exception as error:  # whatever a reader raises is its verdict
        refused = short(error)
        # The other way that the reader offers. Of GPTQModel's kernels for CPUs the one that it prefers takes no groups of a whole column, its own files' neither.
        way, config = ("backend=torch", GPTQConfig(bits=4, backend="torch")) if format == "gptq" else ("dequantize=True", CompressedTensorsConfig(dequantize=True))
        try:
            theirs = read(folder, quantization_config=config)
            note = f" with {way}; without it {refused}"
        except Exception:
            return written, refused, bool(warned)
    error = float((ours - theirs).norm() / theirs.norm())
    # Dequantised, weights are rounded to the dtype of their scales.
    is_right = error <= (ROUNDED if note else LIMITS[format])
    return written, f"{error:.1e}{note}", is_right and (bool(warned) or not note or format == "gptq")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path, help="the program burn-marlin")
    parser.add_argument("model", type=Path, help="a float Llama with a tokenizer")
    parser.add_argument("calibration", type=Path, help="text to calibrate on")
    parser.add_argument("--only", default="", help="forms whose row has this text")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    packages = ["transformers", "compressed-tensors", "gptqmodel", "torch"]
    print(", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages))
    print(f"{'format':<19} {'options':<79} {'program':<8} relative error of logits, or why there are none")
    failed = total = 0
    for format, options in forms():
        row = f"{format:<19} {' '.join(options):<79}"
        if args.only not in row:
            continue
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "model"
            program, outcome, is_right = check(args, format, options, folder)
            shutil.rmtree(folder, ignore_errors=True)
        print(f"{row} {program:<8} {outcome}{'' if is_right else '  WRONG'}", flush=True)
        total, failed = total + 1, failed + (not is_right)
    print(f"{total} forms, {failed} of them wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
