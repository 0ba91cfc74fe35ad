"""Plots the time to the first token of one prompt against its length, beside PyTorch's, as an SVG.

python benches/plots/prompts.py benches/records/prompts-h200.json benches/plots/pytorch-h200.json book/src/prompts.svg

The first file is a record of `cargo xtask bench prompts --record`; the second one of the same shape with `prompts`, `tokens` and `ttft_ms`. Python's own library
is enough.
"""

import json
import math
import sys

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 30, 50
X_TICKS = [64, 256, 1024, 4096]
Y_TICKS = [2, 5, 10, 20, 50, 100, 200]


def points(path, model):
    """The lengths and times of single prompts in a record, by length."""
    rows = json.load(open(path))["rows"]
    return sorted((row["tokens"], row["ttft_ms"]) for row in rows if row["prompts"] == 1 and row.get("model", model) == model)


def place(value, ticks, start, end):
    """The place of a value on a logarithmic axis between the first tick and the last."""
    low, high = math.log(ticks[0]), math.log(ticks[-1])
    return start + (math.log(value) - low) / (high - low) * (end - start)


def x(tokens):
    return place(tokens, X_TICKS, LEFT, WIDTH - RIGHT)


def y(milliseconds):
    return place(milliseconds, Y_TICKS, HEIGHT - BOTTOM, TOP)


def curve(series, name, colour, dash, label_at):
    line = " ".join(f"{x(tokens):.1f},{y(time):.1f}" for tokens, time in series)
    yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
    for tokens, time in series:
        yield f'<circle cx="{x(tokens):.1f}" cy="{y(time):.1f}" r="3.5" fill="{colour}"><title>{tokens} tokens: {time:.1f} ms</title></circle>'
    yield f'<text x="{LEFT + 15}" y="{label_at}" fill="{colour}">{name}</text>'


def main(ours, pytorch, out):
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tokens in X_TICKS:
        parts.append(f'<line x1="{x(tokens):.1f}" x2="{x(tokens):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        parts.append(f'<text x="{x(tokens):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{tokens}</text>')
    for time in Y_TICKS:
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(time):.1f}" y2="{y(time):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(time) + 4:.1f}" text-anchor="end">{time}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">tokens of the prompt</text>')
    parts.append(f'<text x="18" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 18 {HEIGHT / 2})">ms to the first token</text>')
    parts.extend(curve(points(pytorch, "llama-2-7b"), "PyTorch 2.11, f16, compiled", "#c2410c", "6 4", TOP + 45))
    parts.extend(curve(points(ours, "llama-2-7b"), "burn-marlin, int4 in groups of 128", "#1d4ed8", "", TOP + 22))
    parts.append("</svg>")
    with open(out, "w") as file:
        file.write("\n".join(parts) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
