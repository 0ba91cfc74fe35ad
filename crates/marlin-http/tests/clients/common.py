"""What the scripts have in common: the server of the pseudo-model, times of tests, and waiting."""

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import time

PATIENCE = 120


@contextlib.contextmanager
def server():
    """Yields the address of a server: of the environment, or one that is started."""
    if address := os.environ.get("MARLIN_SERVER"):
        yield address
        return
    binary = sys.argv[1]
    with subprocess.Popen([binary], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child.stdout.readline().strip()
        finally:
            child.stdin.close()
            child.wait(timeout=60)


def say(text):
    """A message to which the pseudo-model answers `text`."""
    return f"\x01{text}\x02"


def run(tests):
    """Runs functions that take the address of a server, and prints their times."""
    start = time.monotonic()
    with server() as address:
        for test in tests:
            begin = time.monotonic()
            test(address)
            print(f"{test.__name__}: {time.monotonic() - begin:.2f} s")
    print(f"{len(tests)} tests in {time.monotonic() - start:.2f} s")


def free_port():
    """A port of loopback on which nothing listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_for(what, check):
    """Waits until a check is true. A connection that fails is not."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if check():
                return
        time.sleep(0.1)
    raise AssertionError(f"not after {PATIENCE} s: {what}")
