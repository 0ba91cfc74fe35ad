"""Runs a page of the book: its commands with the program on the path, its Python in one session.

    python tutorial.py book/src/tutorial-serve.md target/debug/burn-marlin

The command that starts the server runs beside the rest, on a free port. Costs about 5 s.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import urllib.request

from common import free_port, wait_for

BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def is_healthy(server, port):
    assert server.poll() is None, f"the server ended with {server.returncode}"
    return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)


def main():
    page, program = (pathlib.Path(path).resolve() for path in sys.argv[1:])
    port = free_port()
    blocks = BLOCK.findall(page.read_text().replace("8000", str(port)))
    server, session, count = None, {"__name__": "tutorial"}, 0
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder) / "empty"
        work.mkdir()
        (work.parent / "burn-marlin").symlink_to(page.parents[2])
        os.chdir(work)
        os.environ["PATH"] = f"{program.parent}:{os.environ['PATH']}"
        try:
            for kind, text in blocks:
                if kind == "python":
                    exec(compile(text, page.name, "exec"), session)
                    count += 1
                elif text.startswith("burn-marlin serve "):
                    server = subprocess.Popen(text.split())
                    wait_for("the server is healthy", lambda: is_healthy(server, port))
                else:
                    subprocess.run(["bash", "-euo", "pipefail", "-c", text], check=True)
        finally:
            if server is not None:
                server.terminate()
                assert server.wait(timeout=60) == 0, server.returncode
    # What the page says of the answers.
    file = session["file"]
    assert file["language"] in ("Rust", "Python") and 0 <= file["lines"] <= 999
    assert session["call"].function.name == "count_lines"
    assert session["message"].usage.output_tokens > 0
    print(f"{page.name}: {count} blocks of Python")


main()
