"""Draws the kernels of some layers of a decode step in time, with ordinary and with programmatic edges, as an SVG.

python benches/plots/timeline.py benches/records/overlap-trace-h100.csv book/src/timeline.svg

The record has a line for each kernel: its edges, its name, and when it began and ended in microseconds. A kernel is pale until the one before it has ended, and waits then
for what that one writes. Python's own library is enough.
"""

import csv
import sys

WIDTH, LEFT, RIGHT, TOP, LANE, GAP = 760, 10, 10, 24, 16, 34
COLOURS = {"qkv": "#1d4ed8", "attention": "#15803d", "o": "#7e22ce", "gate_up": "#c2410c", "down": "#0e7490"}


def kernels(path):
    """The kernels by edges, each (name, start, end), in the order in which they end."""
    found = {}
    for row in csv.DictReader(open(path)):
        found.setdefault(row["edges"], []).append((row["kernel"], float(row["start_us"]), float(row["end_us"])))
    return found


def main(record, out):
    found = kernels(record)
    longest = max(end for rows in found.values() for _, _, end in rows)
    x = lambda time: LEFT + max(time, 0.0) / longest * (WIDTH - LEFT - RIGHT)
    parts, y = [], TOP
    for edges, rows in found.items():
        parts.append(f'<text x="{LEFT}" y="{y - 8}">{edges} edges</text>')
        before = 0.0
        for index, (name, start, end) in enumerate(rows):
            # Kernels that overlap are in different lanes.
            top, colour = y + index % 3 * (LANE + 3), COLOURS[name]
            runs = max(start, before)
            parts.append(f'<rect x="{x(start):.1f}" y="{top}" width="{x(end) - x(start):.1f}" height="{LANE}" fill="{colour}" fill-opacity="0.25"/>')
            parts.append(f'<rect x="{x(runs):.1f}" y="{top}" width="{x(end) - x(runs):.1f}" height="{LANE}" fill="{colour}"/>')
            before = end
        y += 3 * (LANE + 3) + GAP
    y -= GAP - 14
    # The unit takes the place of a tick that is too near to the edge.
    for tick in range(0, int(longest) + 1, 10):
        if x(tick) < WIDTH - RIGHT - 40:
            parts.append(f'<text x="{x(tick):.1f}" y="{y}" text-anchor="middle">{tick}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{y}" text-anchor="end">us</text>')
    y += 22
    for index, (name, colour) in enumerate(COLOURS.items()):
        parts.append(f'<rect x="{LEFT + 110 * index}" y="{y - 11}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 110 * index + 18}" y="{y}">{name}</text>')
    height = y + 12
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="15">'
    lines = [head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *parts, "</svg>"]
    open(out, "w").write("\n".join(lines) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
