"""Quantises the models of a family in many ways with burn-marlin, and measures all of them on the same tokens.

Python's own library is enough. `run` writes one record of results, again after every variant that is done; started again with
the same arguments it goes on after the variants that it has. `table` prints a record as Markdown. README.md has the commands.
"""

import argparse
import concurrent.futures
import hashlib
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

RECOVERED = "recovered"


@dataclass(frozen=True)
class Variant:
    """A way to quantise a model, or the model that was trained on with its mask held."""

    name: str
    bits: int
    group: str
    method: str
    sparsity: str = "dense"
    source: str = "model"

    def quantize(self, args, source, out):
        """The command that makes the variant; none for one that is a folder already."""
        if self.bits == 16:
            return None
        command = [args.burn_marlin, "quantize", source, out, "--bits", str(self.bits), "--group", self.group, "--method", self.method, "--json"]
        if self.sparsity == "2:4" and self.method == "rtn":
            command.append("--sparse24")
        if self.method != "rtn":
            command += ["--calibration", args.calibration, "--samples", str(args.samples), "--max-len", str(args.max_len)]
            command += ["--seed", str(args.seed), "--device", args.device, "--dtype", args.dtype]
        return command


def variants():
    """All variants of a model."""
    formats = [(8, "g128"), (4, "g128"), (4, "g64"), (4, "g32"), (4, "channel")]
    found = [Variant(f"int{bits}-{group}-{method}", bits, group, method) for bits, group in formats for method in ("rtn", "gptq", "awq")]
    return found + [
        Variant("24-int4-g128-magnitude", 4, "g128", "rtn", "2:4"),
        Variant("24-int4-g128-sparsegpt", 4, "g128", "sparsegpt", "2:4"),
        # The zeros of a recovered folder stay, whatever the method.
        Variant("24-f16-recovered", 16, "", "", "2:4", RECOVERED),
        Variant("24-int4-g128-recovered-rtn", 4, "g128", "rtn", "2:4", RECOVERED),
        Variant("24-int4-g128-recovered-gptq", 4, "g128", "sparsegpt", "2:4", RECOVERED),
    ]


# --- folders ----------------------------------------------------------------------------------------------------------


def digest(path):
    """The SHA-256 of a file, or of the weights of a folder."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise SystemExit(f"{path} has no .safetensors file: it is no model")
    sha = hashlib.sha256()
    for file in files:
        sha.update(file.read_bytes())
    return sha.hexdigest()


def sizes(folder):
    """The parameters of a float folder, and those that are weights of projections."""
    parameters = projections = 0
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                count = math.prod(tensor["shape"])
                parameters += count
                projections += count if name.endswith("_proj.weight") else 0
    return parameters, projections


def training(folder):
    """What the trainer wrote of a model; none for one that it has not trained."""
    path = folder / "training.json"
    return json.loads(path.read_text()) if path.is_file() else None


# --- runs -------------------------------------------------------------------------------------------------------------


class Failed(Exception):
    """A command that failed, with the end of what it said."""


def call(command, args, log):
    """Runs a command, and returns its output as JSON and its seconds. What it says besides goes to `log`."""
    # Every process would take all cores otherwise.
    threads = str(max(1, (os.cpu_count() or 1) // args.jobs))
    start = time.monotonic()
    with open(log, "a") as errors:
        offset = errors.tell()
        print("$", *command, file=errors, flush=True)
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=errors, timeout=args.timeout, env={**os.environ, "RAYON_NUM_THREADS": threads}
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Failed(str(error)) from error
    if done.returncode != 0:
        said = log.read_bytes()[offset:].decode(errors="replace").strip()
        raise Failed(f"exit status {done.returncode}: {said[-500:]}")
    return json.loads(done.stdout), time.monotonic() - start


def measure(args, model, source, variant):
    """Makes and evaluates a variant, or takes its result of an earlier run with the same program, commands and weights."""
    place = args.out / model.name
    place.mkdir(parents=True, exist_ok=True)
    out, result, log = (place / f"{variant.name}{suffix}" for suffix in ("", ".json", ".log"))
    quantize = variant.quantize(args, str(source), str(out))
    evaluate = [args.burn_marlin, "evaluate", str(model.folder), "--with", str(out if quantize else source), "--text", args.text]
    evaluate += ["--max-tokens", str(args.max_tokens), "--device", args.device, "--dtype", args.dtype, "--json"]
    digests = [args.program_digest, model.digest, digest(source), args.text_digest, args.calibration_digest]
    inputs = {"commands": [quantize, evaluate], "digests": digests}
    if result.is_file():
        found = json.loads(result.read_text())
        if found["inputs"] == inputs:
            return found
    # What a run that was killed has left; the program goes on with `.partial` by itself.
    shutil.rmtree(out, ignore_errors=True)
    report, seconds = call(quantize, args, log) if quantize else (None, None)
    evaluation, _ = call(evaluate, args, log)
    found = {"inputs": inputs, "quantize": report, "seconds": seconds, "evaluate": evaluation}
    # A result that is there is whole.
    partial = result.with_suffix(".new")
    partial.write_text(json.dumps(found))
    partial.replace(result)
    return found


def row(variant, found):
    """A variant in the record. Bits per weight count scales and metadata, of the projections alone; bytes are those of all tensors."""
    if found["quantize"] is None:
        bits = 16.0
    else:
        layers = found["quantize"]["quantized"]
        weights = sum(layer["k"] * layer["n"] for layer in layers)
        bits = sum(layer["bits_per_weight"] * layer["k"] * layer["n"] for layer in layers) / weights
    measured = found["evaluate"]["models"][1]
    against = measured["against"]
    ratio, error = math.exp(against["nll_change"]["mean"]), against["nll_change"]["standard_error"]
    return {
        "name": variant.name,
        "bits": variant.bits,
        "group": variant.group,
        "method": variant.method,
        "sparsity": variant.sparsity,
        "source": variant.source,
        "bits_per_weight": bits,
        "bytes": measured["bytes"],
        "perplexity": measured["perplexity"],
        "change": ratio - 1,
        # Of one window alone there is none.
        "change_standard_error": None if error is None else ratio * error,
        "divergence": against["divergence"]["mean"],
        "agreement": against["agreement"]["mean"],
        "quantize_seconds": found["seconds"],
    }


class Model:
    """A model of the family, and what is known of it."""

    def __init__(self, name, folder, recovered):
        self.name, self.folder, self.recovered = name, folder, recovered
        self.digest = digest(folder)
        self.reference = None
        self.rows, self.failed = {}, {}

    def record(self, order):
        """The model in the record; `order` is that of the variants."""
        parameters, projections = sizes(self.folder)
        reference = self.reference or {}
        return {
            "name": self.name,
            "parameters": parameters,
            "projection_weights": projections,
            "bytes": reference.get("bytes"),
            "f16_perplexity": reference.get("perplexity"),
            "f16_nll_standard_error": reference.get("nll", {}).get("standard_error"),
            "sha256": self.digest,
            "training": training(self.folder),
            "recovery": training(self.recovered) if self.recovered else None,
            "variants": [self.rows[name] for name in order if name in self.rows],
            "failed": [{"name": name, "error": self.failed[name]} for name in order if name in self.failed],
        }


def named(text):
    """A name and a folder of `NAME=FOLDER`."""
    name, sign, folder = text.partition("=")
    if not (sign and name and Path(folder).is_dir()):
        raise argparse.ArgumentTypeError(f"`{text}` is not NAME=FOLDER with a folder that exists")
    return name, Path(folder)


def run(args):
    """Quantises and measures all variants of all models."""
    program = shutil.which(args.burn_marlin)
    if program is None:
        raise SystemExit(f"--burn-marlin {args.burn_marlin}: there is no such program")
    args.program_digest, args.text_digest, args.calibration_digest = (digest(Path(path)) for path in (program, args.text, args.calibration))
    recovered = dict(args.recovered)
    unknown = set(recovered) - {name for name, _ in args.model}
    if unknown:
        raise SystemExit(f"--recovered {', '.join(sorted(unknown))}: there is no --model of that name")
    models = [Model(name, folder, recovered.get(name)) for name, folder in args.model]
    chosen = [variant for variant in variants() if not args.only or variant.name in args.only]
    order = [variant.name for variant in chosen]
    version = subprocess.run([args.burn_marlin, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    settings = {key: getattr(args, key) for key in ("device", "dtype", "max_tokens", "samples", "max_len", "seed")}
    settings |= {"program": version, "text_sha256": args.text_digest, "calibration_sha256": args.calibration_digest}

    def write():
        record = json.dumps({"settings": settings, "models": [model.record(order) for model in models]}, indent=1)
        args.record.write_text(record + "\n")

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        jobs = {}
        for model in models:
            for variant in chosen:
                source = model.recovered if variant.source == RECOVERED else model.folder
                if source:
                    jobs[pool.submit(measure, args, model, source, variant)] = (model, variant)
        for done, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            model, variant = jobs[job]
            place = f"[{done}/{len(jobs)}] {model.name} {variant.name}"
            try:
                found = job.result()
                model.rows[variant.name] = row(variant, found)
                model.reference = found["evaluate"]["models"][0]
                print(f"{place}: perplexity {model.rows[variant.name]['perplexity']:.4f}", flush=True)
            except Exception as error:  # whatever stops one variant must not stop the others
                model.failed[variant.name] = f"{type(error).__name__}: {error}"
                print(f"{place}: {model.failed[variant.name]}", file=sys.stderr, flush=True)
            write()
    failed = sum(len(model.failed) for model in models)
    if failed:
        sys.exit(f"{failed} of {len(jobs)} variants failed: see `failed` in {args.record}")


# --- table ------------------------------------------------------------------------------------------------------------


def f16_bytes(models, perplexity):
    """The size of a float model of this perplexity, on the line between the two of the family on either side, both axes logarithmic; none outside."""
    points = sorted((model["f16_perplexity"], model["bytes"]) for model in models if model["bytes"])
    for (low, large), (high, small) in zip(points, points[1:]):
        if low <= perplexity <= high and low < high:
            part = math.log(perplexity / low) / math.log(high / low)
            return large * (small / large) ** part
    return None


def table(args):
    """Prints a record as Markdown."""
    models = json.loads(args.record.read_text())["models"]
    print("| model | | bits a weight | all tensors | perplexity | over f16 | bytes of an f16 model as good |")
    print("|---|---|---|---|---|---|---|")
    for model in models:
        if model["bytes"]:
            print(f"| {model['name']} | f16 | 16 | {model['bytes'] / 1e3:.1f} kB | {model['f16_perplexity']:.4f} | | |")
        for found in model["variants"]:
            error = found["change_standard_error"]
            change = f"{100 * found['change']:+.2f}" + ("" if error is None else f" ± {100 * error:.2f}")
            float_bytes = f16_bytes(models, found["perplexity"])
            times = "" if float_bytes is None else f"{float_bytes / found['bytes']:.2f} times as many"
            print(f"| {model['name']} | {found['name']} | {found['bits_per_weight']:.2f} | {found['bytes'] / 1e3:.1f} kB "
                  f"| {found['perplexity']:.4f} | {change} % | {times} |")
        for failed in model["failed"]:
            print(f"| {model['name']} | {failed['name']} | | | failed | | |")


# --- command line -----------------------------------------------------------------------------------------------------


def main():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("run", help=run.__doc__)
    command.add_argument("--model", type=named, action="append", required=True, metavar="NAME=FOLDER", help="a float model; several times")
    command.add_argument("--recovered", type=named, action="append", default=[], metavar="NAME=FOLDER",
                         help="the 2:4 model that `train-tiny-llama train --sparse24` made of the model of that name")
    command.add_argument("--text", required=True, help="the held-out text")
    command.add_argument("--calibration", required=True, help="text to calibrate on, .jsonl")
    command.add_argument("--out", type=Path, required=True, help="folder for the quantised models, their results and logs")
    command.add_argument("--record", type=Path, required=True, help="the file of results")
    command.add_argument("--burn-marlin", default="burn-marlin", help="the program")
    command.add_argument("--device", choices=["flex", "cuda"], default="flex", help="the device that calibrates and evaluates")
    command.add_argument("--dtype", choices=["f32", "f16", "bf16"], default="f32", help="of activations")
    command.add_argument("--jobs", type=int, default=1, help="variants at a time; the cores are shared among them")
    command.add_argument("--samples", type=int, default=128)
    command.add_argument("--max-len", type=int, default=512)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--max-tokens", type=int, default=16384)
    command.add_argument("--timeout", type=float, default=3600, help="seconds for a command")
    command.add_argument("--only", action="append", choices=[variant.name for variant in variants()], help="measure this variant; several times")
    command.set_defaults(run=run)

    command = commands.add_parser("table", help=table.__doc__)
    command.add_argument("record", type=Path)
    command.set_defaults(run=table)

    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
