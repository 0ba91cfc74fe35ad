"""Takes two layers of a decode step, and the qkv after them, from traces of `trace.c`, as the record that `plots/timeline.py` draws.

python benches/trace/layers.py ordinary=/tmp/ordinary.txt programmatic=/tmp/programmatic.txt > benches/records/overlap-trace-h100.csv

They are the layers in the middle of a trace's replayed graphs; times count from the end of the kernel before the first. Python's own library is enough.
"""

import sys

LAYER = ("qkv", "attention", "o", "gate_up", "down")
LAYERS = 2


def kernels(path):
    """The kernels of replayed graphs, each (start, end, name), in nanoseconds and in the order in which they end."""
    rows = (line.split(maxsplit=4) for line in open(path))
    found = [(int(start), int(end), name) for start, end, _, graph, name in rows if int(graph) != 0]
    return sorted(found, key=lambda kernel: kernel[1])


def layers(path):
    """The kernels of the layers, each (name, start, end) in microseconds."""
    found = kernels(path)
    attentions = [at for at, (_, _, name) in enumerate(found) if "attention" in name]
    # With other kernels among them, those of the head and of sampling, they are not within one step.
    whole = [
        at
        for before, at, last in zip(attentions, attentions[1:], attentions[1 + LAYERS :])
        if at - before == len(LAYER) and last - at == LAYERS * len(LAYER)
    ]
    if not whole:
        sys.exit(f"{path}: no {LAYERS} layers of {len(LAYER)} kernels in a graph; was it a decode step of one sequence?")
    first = whole[len(whole) // 2] - LAYER.index("attention")
    begin = found[first - 1][1]
    for index, (start, end, _) in enumerate(found[first : first + LAYERS * len(LAYER) + 1]):
        yield LAYER[index % len(LAYER)], (start - begin) / 1000, (end - begin) / 1000


def main(traces):
    print("edges,kernel,start_us,end_us")
    for trace in traces:
        edges, path = trace.split("=", 1)
        for name, start, end in layers(path):
            print(f"{edges},{name},{start:.3f},{end:.3f}")


if __name__ == "__main__":
    if len(sys.argv) < 2 or not all("=" in argument for argument in sys.argv[1:]):
        sys.exit(__doc__)
    main(sys.argv[1:])
