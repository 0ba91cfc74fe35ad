"""What the tests of the page share: the parts of the page, messages, and the server's state."""

import time
import urllib.request

# The names of the parts of the page.
ANSWER = "#log .message.assistant:last-child"
CONTENT = f"document.querySelector('{ANSWER} .markdown')?.textContent"
# True when no answer of the shown conversation grows, and all of it is drawn.
IDLE = (
    "(document.querySelector('#stop').hidden"
    " && document.querySelectorAll('.message[aria-busy=true]').length === 0)"
)
# A prompt whose answer is slow, and without end in a conversation without `say`.
SLOW = "\x06 Write a long story."

MARKDOWN = """Some **bold** text, *emphasis* and `let x = 1;` inline.

1. First, with a list below:
   - one
   - two
2. Then run

   ```sh
   cargo run --release
   ```

## Code

```rust
fn main() {
    println!("{}", "a long line ".repeat(20)); // wider than a telephone, so that it scrolls
}
```

The end."""

def say(text):
    """A message to which the pseudo-model answers `text`."""
    return f"Say it.\x01{text}\x02"


def send(page, text):
    """Sends a message with the keyboard."""
    page.evaluate("document.querySelector('#prompt').focus()")
    page.insert(text)
    assert page.evaluate("document.querySelector('#prompt').value") == text
    page.press("Enter")


def ask(page, text):
    """Sends a message and waits for the whole answer."""
    count = page.count(".message")
    send(page, text)
    page.wait(f"document.querySelectorAll('.message').length === {count + 2} && {IDLE}")


def running(address):
    """Returns how many requests the server runs."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as response:
        text = response.read().decode()
    line = next(line for line in text.splitlines() if line.startswith("vllm:num_requests_running{"))
    return float(line.split()[-1])


def wait_until_idle(address):
    end = time.monotonic() + 10
    while running(address):
        assert time.monotonic() < end, "the server still runs a request"
        time.sleep(0.02)
