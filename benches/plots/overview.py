"""Draws the README's picture as an SVG: tokens a second of Llama 2 7B, and the time of a matmul.

python benches/plots/overview.py benches wide book/src/overview.svg
python benches/plots/overview.py benches narrow book/src/overview-narrow.svg

The first argument is the folder that has `records` and `plots`. The halves are side by side, or in
the narrow picture, which is for phones, one below the other. Python's own library is enough.
"""

import json
import sys

from axes import Axes, HEIGHT, TOP

INT4, SPARSE, F16, FLOOR = "#1d4ed8", "#0f766e", "#c2410c", "#777"
SHAPE = "7b.qkv"
X_TICKS = [1, 4, 16, 64, 256, 1024, 4096]
Y_TICKS = [4, 10, 20, 50, 100, 200, 500, 1000]
BAR, GAP = 26, 10
WIDTH, LEFT, FONT = 480, 86, 18
# Between the halves, and to the right of the second, where the last tick ends.
SPACE, EDGE = 16, 8


def rows(folder, name):
    with open(f"{folder}/{name}.json") as file:
        return json.load(file)["rows"]


def decode(folder, batch):
    """The tokens a second of each kind of weights at a batch, all of one run."""
    found = rows(folder, "records/decode-formats-llama-2-7b-h200")
    return {row["weights"]: row["tokens_per_second"] for row in found if row["batch"] == batch}


def bars(folder):
    """The first half: two groups of bars, each on a scale of its own."""
    parts, y = [], TOP + 30
    parts.append(f'<text x="{WIDTH / 2}" y="{TOP - 8}" text-anchor="middle" font-weight="bold">Llama 2 7B, tokens per second</text>')
    for batch, title in [(1, "1 sequence"), (64, "64 sequences")]:
        found = decode(folder, batch)
        longest = max(found.values())
        parts.append(f'<text x="{LEFT + 8}" y="{y}" font-weight="bold">{title}</text>')
        y += GAP
        for weights, name, colour in [("w4a16-24", "int4, 2:4", SPARSE), ("w4a16", "int4", INT4), ("f16", "f16", F16)]:
            length = found[weights] / longest * (WIDTH - LEFT - 76)
            parts.append(f'<text x="{LEFT}" y="{y + BAR * 0.7:.1f}" text-anchor="end">{name}</text>')
            parts.append(f'<rect x="{LEFT + 8}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>')
            parts.append(f'<text x="{LEFT + 16 + length:.1f}" y="{y + BAR * 0.7:.1f}">{found[weights]:.0f}</text>')
            y += BAR + GAP
        y += 3 * GAP
    return parts


def matmul(folder):
    """The second half: the time of one matmul against the rows of activations."""
    axes = Axes(X_TICKS, Y_TICKS, "rows of activations, M", "microseconds", WIDTH, LEFT, FONT)
    axes.parts.append(f'<text x="{WIDTH / 2}" y="{TOP - 8}" text-anchor="middle" font-weight="bold">One matmul, 4096 x 12288</text>')
    curves = [
        ("plots/cublas-h200", "us", "cuBLAS, f16", F16, "6 4"),
        ("records/h200", "us", "int4", INT4, ""),
        ("records/h200-24", "us", "int4, 2:4", SPARSE, ""),
        ("records/h200", "floor_us", "floor of int4: bytes or flops", FLOOR, "2 3"),
    ]
    for place, (name, field, label, colour, dash) in enumerate(curves):
        points = sorted((row["m"], row[field]) for row in rows(folder, name) if row["shape"] == SHAPE)
        axes.curve([(m, us, f"{label}, {m} rows: {us:.1f} us") for m, us in points], colour, dash)
        axes.parts.append(f'<text x="{LEFT + 15}" y="{TOP + 24 + 24 * place}" fill="{colour}">{label}</text>')
    return axes.parts[2:]


def main(folder, form, out):
    if form == "wide":
        width, height, second = 2 * WIDTH + SPACE + EDGE, HEIGHT, (WIDTH + SPACE, 0)
    else:
        width, height, second = WIDTH + EDGE, 2 * HEIGHT, (0, HEIGHT)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="{FONT}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *bars(folder),
        f'<g transform="translate({second[0]} {second[1]})">',
        *matmul(folder),
        "</g>",
        "</svg>",
    ]
    with open(out, "w") as file:
        file.write("\n".join(parts) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[2] not in ("wide", "narrow"):
        sys.exit(__doc__)
    main(*sys.argv[1:])
