"""Writes the golden files beside this script: tiny checkpoints of every format, by the formats' own packers. README.md says how to run it.

    python make.py [MAKER ...]    all makers, or those named
"""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
INDEX = HERE / "index.json"
MAKERS = ["plain", "architectures", "mixtures", "gpt_oss", "rope", "generation", "chat_templates", "tokenizer_configs", "tokenizer_patterns", "template_table", "gptq", "gptq_whole", "awq", "auto_round", "compressed_tensors", "compressed_tensors_old",
          "compressed_floats", "fp8", "modelopt", "llm_compressor", "marlin"]


def main():
    chosen = sys.argv[1:] or MAKERS
    if unknown := set(chosen) - set(MAKERS):
        sys.exit(f"no such maker: {', '.join(sorted(unknown))}; there are {', '.join(MAKERS)}")
    if chosen == MAKERS and INDEX.exists():
        for entry in json.loads(INDEX.read_text()):
            shutil.rmtree(HERE / entry["name"], ignore_errors=True)
        INDEX.unlink()
    for maker in chosen:
        subprocess.run([sys.executable, "-W", "ignore", "-m", f"makers.{maker}"], cwd=HERE, check=True)
    share_expectations()
    entries = json.loads(INDEX.read_text())
    print(f"{len(entries)} checkpoints, {sum(f.stat().st_size for f in HERE.rglob('*') if f.is_file()) / 1e6:.2f} MB")


def share_expectations():
    """Of expectations that are the same byte for byte one is kept, and the index says whose."""
    entries, kept = json.loads(INDEX.read_text()), {}
    for entry in entries:
        own = HERE / entry["name"] / "expected.safetensors"
        if not own.exists():
            continue  # shared by an earlier run
        digest = hashlib.sha256(own.read_bytes()).digest()
        if digest in kept:
            entry["expected"] = kept[digest]
            own.unlink()
        else:
            kept[digest] = entry["expected"]
    INDEX.write_text(json.dumps(entries, indent=2) + "\n")


if __name__ == "__main__":
    main()
