"""Plots times of a server against its rate of requests, as an SVG.

python benches/plots/serving.py benches/records/serve-llama-2-7b-h200.json tpot|ttft book/src/serving-tpot.svg

The record has the runs of `bench-serve` at several rates and with several formats of the weights. Python's own library is enough.
"""

import json
import sys

from axes import LEFT, TOP, Axes

RATES = [1, 2, 5, 10, 20, 50, 100, 200]
FIGURES = {
    "tpot": ("mean_tpot_ms", "ms per output token, mean", [1, 2, 5, 10, 20, 50]),
    "ttft": ("mean_ttft_ms", "ms to the first token, mean", [2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]),
}
LINES = [("f16, Burn's layers", "#c2410c", "6 4"), ("int4 g128", "#1d4ed8", ""), ("int4 g128 2:4", "#15803d", "2 3")]


def main(record, figure, out):
    field, name, ticks = FIGURES[figure]
    rows = json.load(open(record))["runs"]
    axes = Axes(RATES, ticks, "requests a second", name)
    for number, (weights, colour, dash) in enumerate(LINES):
        found = [row for row in rows if row["weights"] == weights and row["rate"] <= RATES[-1] and row[field] <= ticks[-1]]
        points = [(row["rate"], row[field], f"{row['rate']:g} a second: {row[field]:.2f} ms") for row in found]
        axes.curve(points, colour, dash)
        axes.parts.append(f'<text x="{LEFT + 15}" y="{TOP + 22 + 20 * number}" fill="{colour}">{weights}</text>')
    axes.write(out)


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[2] not in FIGURES:
        sys.exit(__doc__)
    main(*sys.argv[1:])
