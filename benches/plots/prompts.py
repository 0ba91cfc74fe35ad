"""Plots the time to the first token of one prompt against its length, beside PyTorch's, as an SVG.

python benches/plots/prompts.py benches/records/prompts-h200.json benches/plots/pytorch-h200.json book/src/prompts.svg

The first file is a record of `cargo xtask bench prompts --record`; the second one of the same shape with `prompts`, `tokens` and `ttft_ms`. Python's own library
is enough.
"""

import json
import sys

from axes import LEFT, TOP, Axes

X_TICKS = [64, 256, 1024, 4096]
Y_TICKS = [2, 5, 10, 20, 50, 100, 200]


def points(path, model):
    """The lengths and times of single prompts in a record, by length, with their titles."""
    rows = json.load(open(path))["rows"]
    found = sorted((row["tokens"], row["ttft_ms"]) for row in rows if row["prompts"] == 1 and row.get("model", model) == model)
    return [(tokens, time, f"{tokens} tokens: {time:.1f} ms") for tokens, time in found]


def main(ours, pytorch, out):
    axes = Axes(X_TICKS, Y_TICKS, "tokens of the prompt", "ms to the first token")
    for record, name, colour, dash, label_at in [
        (pytorch, "PyTorch 2.11, f16, compiled", "#c2410c", "6 4", TOP + 45),
        (ours, "burn-marlin, int4 in groups of 128", "#1d4ed8", "", TOP + 22),
    ]:
        axes.curve(points(record, "llama-2-7b"), colour, dash)
        axes.parts.append(f'<text x="{LEFT + 15}" y="{label_at}" fill="{colour}">{name}</text>')
    axes.write(out)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
