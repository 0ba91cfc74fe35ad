"""Two servers behind SGLang's router (PyPI `sglang-router`), all on loopback, for about a minute.

    python router.py target/debug/burn-marlin examples/train-tiny-llama/model LOGS

1. The router finds the workers and the name of their model.
2. Prompts that begin alike go to the same worker, which has their pages in its KV cache.
3. A worker is killed under load. The requests that it had fail or are tried again by the router; all
   others get the text that they get alone, and so do all later ones.
4. The worker starts again, and the router sends it requests again.

The logs of the router and of the workers are kept in the folder LOGS.
"""

import concurrent.futures
import contextlib
import http.client
import json
import pathlib
import random
import re
import subprocess
import sys
import threading
import time
import urllib.request

from common import PATIENCE, free_port, wait_for

CLIENTS = 12
# The options of the router that the book names.
ROUTER = [
    *("--policy", "cache_aware"),
    *("--health-check-interval-secs", "1"),
    *("--health-failure-threshold", "2"),
    *("--health-success-threshold", "1"),
    *("--cb-timeout-duration-secs", "10"),
    *("--log-level", "info"),
]


class Process:
    """A program whose output is kept in a file."""

    def __init__(self, name, port, command):
        self.name, self.port, self.command = name, port, command
        self.start()

    def start(self):
        with open(LOGS / f"{self.name}.log", "ab") as log:
            self.child = subprocess.Popen(self.command, stdout=log, stderr=log)
        wait_for(f"{self.name} answers", lambda: self.get("/health") is not None)

    def get(self, path):
        address = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
            return answer.read().decode()

    def metric(self, name):
        """The sum of the values of a metric."""
        lines = re.findall(rf"^vllm:{name}\{{.*\}} (.+)$", self.get("/metrics"), re.M)
        return sum(map(float, lines))

    def stop(self):
        self.child.terminate()
        try:
            self.child.wait(30)
        except subprocess.TimeoutExpired:
            self.child.kill()


def ask(port, prompt, stream):
    """The text of a greedy completion; an `OSError` or `HTTPException` if it is not complete."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "stream": stream}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        data = answer.read().decode()
    if answer.status != 200:
        raise http.client.HTTPException(f"{answer.status} {data}")
    if not stream:
        return json.loads(data)["choices"][0]["text"]
    *events, last = re.findall(r"^data: ?(.*)$", data, re.M) or [""]
    if last != "[DONE]":
        raise http.client.HTTPException(f"a stream without an end: {data[-300:]}")
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def ask_at_once(router, prompts):
    """The text of each prompt. A prompt that is new to the router goes to the worker that has the
    least to do."""
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        texts = pool.map(lambda prompt: ask(router.port, prompt, False), prompts)
        return dict(zip(prompts, texts))


def find_workers(router, workers):
    def healthy():
        found = json.loads(router.get("/workers"))["workers"]
        return sum(worker["is_healthy"] for worker in found) == len(workers)

    wait_for("the workers are healthy", healthy)
    models = [model["id"] for model in json.loads(router.get("/v1/models"))["data"]]
    assert models == ["tiny"], models


def share_prefixes(router, workers, groups):
    """Returns the text of each prompt."""
    texts = ask_at_once(router, [group[0] for group in groups])
    used = []
    for group in groups:
        before = [worker.metric("prompt_tokens_total") for worker in workers]
        for prompt in group[1:]:
            texts[prompt] = ask(router.port, prompt, False)
        after = [worker.metric("prompt_tokens_total") for worker in workers]
        used.append([index for index in range(2) if after[index] > before[index]])
    assert all(len(found) == 1 for found in used), f"a group went to both workers: {used}"
    assert {found[0] for found in used} == {0, 1}, f"a worker got no group: {used}"
    hits = [worker.metric("prefix_cache_hits_total") for worker in workers]
    queries = [worker.metric("prefix_cache_queries_total") for worker in workers]
    print(f"groups by worker {used}, {sum(hits):.0f} of {sum(queries):.0f} prompt tokens shared")
    assert sum(hits) > sum(queries) / 2
    return texts


def kill_under_load(router, workers, texts):
    """Kills the first worker while clients send requests, and checks every answer."""
    prompts = list(texts)
    counts = {"complete": 0, "failed": 0, "wrong": 0}
    failures = []
    lock = threading.Lock()
    end = threading.Event()

    def client(seed):
        choose = random.Random(seed)
        while not end.is_set():
            prompt = choose.choice(prompts)
            start = time.monotonic()
            try:
                kind = "complete" if ask(router.port, prompt, choose.random() < 0.5) == texts[prompt] else "wrong"
            except (OSError, http.client.HTTPException) as error:
                kind = "failed"
                with lock:
                    failures.append((start, time.monotonic(), f"{error!r}"[:120]))
            with lock:
                counts[kind] += 1

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    wait_for("the first worker is busy", lambda: workers[0].metric("num_requests_running") >= 2)
    time.sleep(2)
    killed = time.monotonic()
    workers[0].child.kill()
    workers[0].child.wait()
    time.sleep(8)
    before = counts["complete"]
    time.sleep(4)
    end.set()
    for thread in threads:
        thread.join()
    late = [failure for failure in failures if failure[0] > killed + 8]
    print(f"killed under load: {counts}; failures {[error for *_, error in failures]}")
    assert counts["wrong"] == 0
    assert counts["complete"] > before > 0, "no request was complete after the kill"
    assert not late, f"requests failed after the router knew: {late}"
    assert all(end > killed for _, end, _ in failures), "a request failed before the kill"
    other = workers[1].get("/metrics")
    ended = re.findall(r'request_success_total\{.*"(abort|error|timeout)"\} (\d+)', other)
    assert all(count == "0" for _, count in ended), f"the other worker was touched: {ended}"
    return counts


def main():
    groups = []
    text = (pathlib.Path(MODEL).parent / "heldout.txt").read_text().splitlines()
    for group in range(4):
        begin = "\n".join(text[30 * group : 30 * group + 14])
        groups.append([f"{begin}\nlet {name} = " for name in ["a", "bb", "count", "index", "x", "y"]])
    with contextlib.ExitStack() as stack:
        workers = []
        for name in ["worker-1", "worker-2"]:
            port = free_port()
            options = ["--device", "flex", "--served-model-name", "tiny", "--pages", "400"]
            workers.append(Process(name, port, [BINARY, "serve", MODEL, "--port", str(port), *options]))
            stack.callback(workers[-1].stop)
        port = free_port()
        urls = [f"http://127.0.0.1:{worker.port}" for worker in workers]
        listen = ["--host", "127.0.0.1", "--port", str(port)]
        figures = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        command = [sys.executable, "-m", "sglang_router.launch_router", *listen, *figures]
        router = Process("router", port, [*command, *ROUTER, "--worker-urls", *urls])
        stack.callback(router.stop)
        find_workers(router, workers)
        texts = share_prefixes(router, workers, groups)
        kill_under_load(router, workers, texts)
        workers[0].start()
        find_workers(router, workers)
        started = time.monotonic()

        def is_asked():
            ask_at_once(router, [f"{random.random()} {group[0]}" for group in groups])
            return workers[0].metric("prompt_tokens_total") > 0

        # The router's circuit breaker is still open for a while.
        wait_for("the worker that started again gets requests", is_asked)
        print(f"requests {time.monotonic() - started:.0f} s after the worker was healthy again")
        for worker in workers:
            wait_for("all pages are free", lambda: worker.metric("kv_cache_usage_perc") == 0)
    print(f"logs in {LOGS}")


if __name__ == "__main__":
    BINARY, MODEL = sys.argv[1:3]
    LOGS = pathlib.Path(sys.argv[3])
    LOGS.mkdir(parents=True, exist_ok=True)
    for old in LOGS.glob("*.log"):
        old.unlink()
    main()
