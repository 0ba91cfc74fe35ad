#!/usr/bin/env python3
"""Compares the figures of marlin-load with those of aiperf and genai-bench.

All three send a closed loop of requests to one server, which is a server of this script that waits
before tokens as it is told, or the one at `--url`. Figures that are more than `--tolerance` apart
are an error. It needs a tokenizer, and the programs of `aiperf` 0.13.0 or `genai-bench` 0.0.5 in the
path, each of which installs in an environment of its own. On a machine with other work the clients
in Python are late, and the figures say nothing.

    cargo build --workspace --bin burn-marlin
    python crates/marlin-load/tests/compare.py --ours target/debug/burn-marlin \\
        --tokenizer examples/train-tiny-llama/model

`--url http://127.0.0.1:8000 --model tiny` compares them on a server that was started with
`burn-marlin serve examples/train-tiny-llama/model --device flex --served-model-name tiny`.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FIRST = 0.080
GAP = 0.015
FIGURES = ["TTFT (ms)", "TPOT (ms)", "E2EL (ms)", "requests/s"]


async def answer(reader, writer):
    """Answers requests of a connection."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            lines = [line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line]
            body = await reader.readexactly(int(dict(lines).get("content-length", 0)))
            path = head.split(" ")[1]
            if not path.endswith("completions"):
                models = {"object": "list", "data": [{"id": "delay", "object": "model"}]}
                found = path.endswith("models")
                content = json.dumps(models if found else {"error": "unknown"}).encode()
                status = "200 OK" if found else "404 Not Found"
                writer.write(
                    f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(content)}\r\n\r\n".encode() + content
                )
                continue
            await stream(writer, json.loads(body), "chat" in path)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def stream(writer, request, chat):
    """Streams an answer."""
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    kind = "chat.completion.chunk" if chat else "text_completion"
    base = {"id": "x", "object": kind, "created": 0, "model": request["model"]}

    def send(event):
        data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    count = request.get("max_completion_tokens") or request.get("max_tokens")
    for index in range(count):
        await asyncio.sleep(GAP if index else FIRST)
        text = {"delta": {"content": " the"}} if chat else {"text": " the"}
        finish = "length" if index + 1 == count else None
        send({**base, "choices": [{"index": 0, "finish_reason": finish, **text}]})
    prompt = request.get("prompt")
    if chat:
        prompt = str(request["messages"]).split()
    elif isinstance(prompt, str):
        prompt = prompt.split()
    usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
    usage["total_tokens"] = sum(usage.values())
    send({**base, "choices": [], "usage": usage})
    send("[DONE]")
    writer.write(b"0\r\n\r\n")


def serve(listener):
    """Serves until the process ends."""

    async def main():
        async with await asyncio.start_server(answer, sock=listener) as server:
            await server.serve_forever()

    asyncio.run(main())


def run(command, **options):
    """Runs a command, and shows the end of its output if it fails."""
    print("$", *command, flush=True)
    result = subprocess.run(command, text=True, capture_output=True, timeout=900, **options)
    if result.returncode:
        print(result.stdout[-3000:], result.stderr[-3000:], sep="\n")
        raise SystemExit(f"{command[0]} failed")
    return result.stdout


def ours(args, endpoint):
    """Returns the figures of marlin-load."""
    command = [args.ours, "bench-serve", args.url, "--endpoint", endpoint, "--ignore-eos"]
    command += ["--requests", str(args.requests), "--concurrency", str(args.concurrency)]
    command += ["--input-len", str(args.input_len), "--output-len", str(args.output_len)]
    # Other prompts than before, which the server has in its prefix cache.
    command += ["--model", args.model, "--seed", str(time.time_ns())]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        run(command + ["--json", file.name])
        report = json.load(file)
    names = ["mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "request_throughput"]
    return [report[name] for name in names]


def aiperf(args, endpoint, folder):
    """Returns the figures of aiperf."""
    command = ["aiperf", "profile", "--model", args.model, "--url", args.url, "--streaming"]
    command += ["--endpoint-type", endpoint, "--tokenizer", args.tokenizer, "--ui", "none"]
    command += ["--concurrency", str(args.concurrency), "--request-count", str(args.requests)]
    command += ["--synthetic-input-tokens-mean", str(args.input_len)]
    command += ["--output-tokens-mean", str(args.output_len), "--artifact-dir", folder]
    command += ["--extra-inputs", "ignore_eos:true", "--use-server-token-count"]
    # Offline it looks for the tokenizer in the hub's cache alone, not in a folder.
    offline = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"]
    run(command, env={name: value for name, value in os.environ.items() if name not in offline})
    report = json.loads(next(Path(folder).rglob("profile_export_aiperf.json")).read_text())
    names = ["time_to_first_token", "inter_token_latency", "request_latency"]
    return [report[name]["avg"] for name in names + ["request_throughput"]]


def genai_bench(args, endpoint, folder):
    """Returns the figures of genai-bench, which has chats alone.

    Its requests a second are none: it looks once a second whether all requests have ended, and
    counts the time until it sees that.
    """
    scenario = f"D({args.input_len},{args.output_len})"
    command = ["genai-bench", "benchmark", "--api-backend", "vllm", "--api-base", args.url]
    command += ["--api-key", "none", "--api-model-name", args.model, "--task", "text-to-text"]
    command += ["--model-tokenizer", args.tokenizer, "--traffic-scenario", scenario]
    command += ["--num-concurrency", str(args.concurrency), "--max-time-per-run", "10"]
    command += ["--max-requests-per-run", str(args.requests), "--server-engine", "vLLM"]
    command += ["--server-gpu-type", "H100", "--server-version", "1", "--server-gpu-count", "1"]
    command += ["--experiment-base-dir", folder, "--experiment-folder-name", "run"]
    run(command)
    for path in Path(folder).rglob("*.json"):
        report = json.loads(path.read_text()).get("aggregated_metrics")
        if report:
            stats = report["stats"]
            times = [1e3 * stats[name]["mean"] for name in ["ttft", "tpot", "e2e_latency"]]
            return times + [None]
    raise SystemExit("genai-bench has written no figures")


def main():
    """Runs the clients and compares their figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours", required=True, help="the program `burn-marlin`")
    parser.add_argument("--tokenizer", required=True, help="a folder with a tokenizer")
    parser.add_argument("--url", help="a server; without it, the script's own")
    parser.add_argument("--model", default="delay")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--tolerance", type=float, default=0.05)
    args = parser.parse_args()
    if not args.url:
        listener = socket.create_server(("127.0.0.1", 0))
        args.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        multiprocessing.Process(target=serve, args=(listener,), daemon=True).start()
    others = [("aiperf", aiperf, "completions"), ("aiperf", aiperf, "chat")]
    others += [("genai-bench", genai_bench, "chat")]
    others = [other for other in others if shutil.which(other[0])]
    if not others:
        raise SystemExit("neither aiperf nor genai-bench is installed")
    apart = []
    for name, client, endpoint in others:
        # Ours before and after, so that a change of the machine's load is seen.
        before = ours(args, endpoint)
        with tempfile.TemporaryDirectory() as folder:
            theirs = client(args, endpoint, folder)
        after = ours(args, endpoint)
        print(f"{name}, {endpoint}:")
        for figure, own, own_after, other in zip(FIGURES, before, after, theirs):
            if other is None:
                continue
            difference = other / ((own + own_after) / 2) - 1
            row = f"  {figure:<10} ours {own:9.2f} {own_after:9.2f}, theirs {other:9.2f}"
            print(f"{row}, {100 * difference:+.1f} %", flush=True)
            if abs(difference) > args.tolerance:
                apart.append(f"{name}, {endpoint}, {figure}")
    if apart:
        raise SystemExit("more than the tolerance apart: " + "; ".join(apart))


if __name__ == "__main__":
    main()
