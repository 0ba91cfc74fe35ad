"""Plots the perplexities of a family of models against their sizes, in f16 and quantised, as an SVG.

python benches/plots/family.py RECORD .. all|projections book/src/family.svg

Each RECORD is one of `benches/family/family.py run`; of a model that several have, the first is drawn. The size is that of all tensors, or of the weights of the projections alone, their scales counted. Python's own
library is enough.
"""

import json
import sys

from axes import RIGHT, TOP, WIDTH, Axes

# The variants that are drawn, each as a curve over the models: name, label, colour, dash.
SERIES = [
    ("f16", "f16", "#111827", ""),
    ("int8-g128-gptq", "int8 g128, GPTQ", "#15803d", ""),
    ("int4-g128-rtn", "int4 g128, rounded", "#c2410c", "6 4"),
    ("int4-g128-gptq", "int4 g128, GPTQ", "#1d4ed8", ""),
    ("24-int4-g128-recovered-gptq", "int4 g128 2:4, trained on, GPTQ", "#7e22ce", "2 3"),
]
LEGEND = WIDTH - RIGHT - 300


def point(model, name, size):
    """The size in MB and the perplexity of a model or of a variant of it; none where it was not measured."""
    if name == "f16":
        found = model if model["bytes"] else None
        bits, perplexity = 16, "f16_perplexity"
    else:
        found = next((variant for variant in model["variants"] if variant["name"] == name), None)
        bits, perplexity = found and found["bits_per_weight"], "perplexity"
    if found is None:
        return None
    total = found["bytes"] if size == "all" else bits * model["projection_weights"] / 8
    return total / 1e6, found[perplexity], model["name"]


def ticks(values, factors):
    """Round values on a logarithmic axis, from the last below all values to the first above them."""
    grid = [factor * 10.0**decade for decade in range(-4, 8) for factor in factors]
    low = max(tick for tick in grid if tick < min(values))
    high = min(tick for tick in grid if tick > max(values))
    return [tick for tick in grid if low <= tick <= high]


def main(records, size, out):
    models = {}
    for record in records:
        for model in json.load(open(record))["models"]:
            models.setdefault(model["name"], model)
    curves = []
    for name, label, colour, dash in SERIES:
        points = sorted(found for model in models.values() if (found := point(model, name, size)))
        if points:
            curves.append((points, label, colour, dash))
    if not curves:
        sys.exit(f"{', '.join(records)}: none of the variants that are drawn")
    x_ticks = ticks([x for points, *_ in curves for x, _, _ in points], [1, 2, 5])
    y_ticks = ticks([y for points, *_ in curves for _, y, _ in points], [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9])
    of = "all tensors" if size == "all" else "the projections' weights"
    axes = Axes(x_ticks, y_ticks, f"MB of {of}", "perplexity")
    for index, (points, label, colour, dash) in enumerate(curves):
        titled = [(megabytes, perplexity, f"{name}, {label}: {megabytes:.2f} MB, perplexity {perplexity:.3f}") for megabytes, perplexity, name in points]
        axes.curve(titled, colour, dash)
        # Larger models are better: the upper right corner is free.
        height = TOP + 18 + 20 * index
        axes.parts.append(
            f'<line x1="{LEGEND}" x2="{LEGEND + 24}" y1="{height - 4}" y2="{height - 4}" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        axes.parts.append(f'<text x="{LEGEND + 30}" y="{height}" fill="{colour}">{label}</text>')
    axes.write(out)


if __name__ == "__main__":
    if len(sys.argv) < 4 or sys.argv[-2] not in ("all", "projections"):
        sys.exit(__doc__)
    main(sys.argv[1:-2], *sys.argv[-2:])
