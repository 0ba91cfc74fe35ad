"""A headless Chromium, driven over a pipe by the protocol of its developer tools."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time

PATIENCE = 20.0
FLAGS = [
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-prefers-reduced-motion",
]


class Chromium:
    """A browser with one tab and a profile of its own. It ends with the `with` block."""

    def __init__(self):
        binary = shutil.which("chromium") or shutil.which("chromium-browser")
        if binary is None:
            raise SystemExit("Chromium is missing; on Debian: apt-get install chromium")
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        flags = [*FLAGS, f"--user-data-dir={self.profile.name}"]
        if os.geteuid() == 0:
            # Chromium has no sandbox for root.
            flags.append("--no-sandbox")
        # The browser reads commands from descriptor 3 and writes answers to descriptor 4.
        shell = 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1'
        self.process = subprocess.Popen(
            ["sh", "-c", shell, binary, *flags, "about:blank"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.number = 0
        self.session = None
        # What the page reported: errors, and texts of dialogs, each answered with yes.
        self.errors = []
        self.dialogs = []

    def __enter__(self):
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(target for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ["Page", "Runtime", "Log"]:
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        try:
            self.process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.profile.cleanup()

    def call(self, method, **params):
        """Sends a command and returns its result."""
        number = self.send(method, params)
        while True:
            message = self.read()
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]

    def send(self, method, params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.process.stdin.write(json.dumps(message).encode() + b"\0")
        self.process.stdin.flush()
        return self.number

    def read(self):
        """Reads a message, and notes what the page reports."""
        data = bytearray()
        while (byte := self.process.stdout.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("Chromium has ended")
            data += byte
        message = json.loads(data)
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                text = details.get("exception", {}).get("description", details["text"])
                self.errors.append(text)
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                entry = params["entry"]
                self.errors.append(f"{entry['text']} {entry.get('url', '')}")
            case "Page.javascriptDialogOpening":
                self.dialogs.append(params["message"])
                self.send("Page.handleJavaScriptDialog", {"accept": True})
        return message

    def open(self, address):
        """Loads a page."""
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.protocol === 'http:'")

    def reload(self):
        self.evaluate("window.isOld = true")
        self.call("Page.reload")
        self.wait("!window.isOld && document.readyState === 'complete'")

    def evaluate(self, script):
        """Returns the value of an expression in the page."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise RuntimeError(f"{script}: {details.get('exception', details)}")
        return result["result"].get("value")

    def text(self, selector):
        """Returns the text of an element."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")

    def count(self, selector):
        """Returns the number of elements."""
        return self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length")

    def wait(self, condition):
        """Waits until an expression in the page is true."""
        end = time.monotonic() + PATIENCE
        while not self.evaluate(condition):
            if time.monotonic() > end:
                text = self.evaluate("document.body.innerText")
                raise AssertionError(f"not within {PATIENCE} s: {condition}\n{text}")
            time.sleep(0.02)

    def click(self, selector):
        """Presses the mouse in the middle of an element."""
        self.wait(f"document.querySelector({json.dumps(selector)})?.checkVisibility()")
        x, y = self.evaluate(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            " node.scrollIntoView({block: 'nearest'});"
            " const {x, y, width, height} = node.getBoundingClientRect();"
            " return [x + width / 2, y + height / 2]; })()"
        )
        for kind in ["mousePressed", "mouseReleased"]:
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )

    def insert(self, text):
        """Enters a text in the element with the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key, modifiers=0):
        """Presses a key: `Backspace`, `Enter`, `Escape` or `Tab`; `modifiers` 8 is Shift."""
        code, text = {
            "Enter": (13, "\r"),
            "Escape": (27, ""),
            "Tab": (9, ""),
            "Backspace": (8, ""),
        }[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        down = "keyDown" if text else "rawKeyDown"
        self.call("Input.dispatchKeyEvent", type=down, text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screen(self, width, height, scheme):
        """Sets the size in CSS pixels, and the colour scheme: `light` or `dark`."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path):
        """Writes a picture of the page as PNG."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))

    def accessibility_tree(self):
        """Returns the nodes that readers of screens see, as pairs of a role and a name."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"]
        ]
