"""Uses the page at `/` in a headless Chromium.

Usage: check_page.py ADDRESS ADDRESS_WITH_KEY KEY DIR

The addresses are of servers of the pseudo-model, the second with an API key. Screenshots are
written to DIR, to be looked at.
"""

import sys
import time
from pathlib import Path

from appearance import (
    it_looks_right,
    readers_of_screens_get_names,
    the_keyboard_reaches_everything,
)
from chromium import Chromium
from helpers import ANSWER, CONTENT, IDLE, MARKDOWN, SLOW, ask, running, say, send, wait_until_idle

HOSTILE = """<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script>
[a](javascript:window.hacked=1) <b>not bold</b>

```"><img src=x onerror=window.hacked=1>
</code><script>window.hacked = 1</script>
```"""


def answers_are_streamed_and_rendered(page, address, _):
    ask(page, say(f"<think>I think aloud.</think>{MARKDOWN}"))
    shown = page.evaluate(f"document.querySelector('{ANSWER} .markdown').innerHTML")
    for part in [
        "<strong>bold</strong>",
        "<em>emphasis</em>",
        "<code>let x = 1;</code>",
        "<li>one</li>",
        "<h5>Code</h5>",
        "<p>The end.</p>",
    ]:
        assert part in shown, f"{part} in {shown}"
    lists = page.count(f"{ANSWER} ol > li")
    assert lists == 2, shown
    assert page.text(f"{ANSWER} li pre") == "cargo run --release"
    code = page.text(f"{ANSWER} .markdown > .code pre")
    assert code.startswith("fn main() {\n    println!("), code
    reasoning = page.text(f"{ANSWER} .reasoning .text")
    assert reasoning == "I think aloud."
    assert "I think aloud" not in page.evaluate(CONTENT)
    note = page.text(f"{ANSWER} .note")
    assert "tokens · first text after" in note, note
    said = page.evaluate("document.querySelector('#announcements').innerText")
    assert "Some bold text" in said and said.endswith("The answer has ended."), said
    title = page.text("#chat-title")
    assert title.startswith("Say it."), title


def code_is_copied(page, address, _):
    page.call(
        "Browser.grantPermissions",
        origin=address,
        permissions=["clipboardReadWrite", "clipboardSanitizedWrite"],
    )
    page.click(f"{ANSWER} li .code-bar button")
    page.wait(f"document.querySelector('{ANSWER} li .code-bar button').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == "cargo run --release"


def html_of_a_model_stays_text(page, address, _):
    ask(page, say(HOSTILE))
    shown = page.evaluate(CONTENT)
    assert HOSTILE.splitlines()[0] in shown and "<b>not bold</b>" in shown, shown
    assert "</code><script>" in shown, shown
    assert page.count("#log img, #log script, #log a, #log b") == 0
    # The browser itself refuses HTML from texts.
    refused = page.evaluate(
        "(() => { try { document.body.innerHTML = '<b>'; } catch { return true; } })()"
    )
    assert refused
    page.errors = [text for text in page.errors if "TrustedHTML" not in text]
    assert page.evaluate("window.hacked") is None


def markdown_is_linear(page, address, _):
    # Texts on which parsers of Markdown have been slow, or have run out of stack.
    texts = [
        "'*'.repeat(n)",
        "'`'.repeat(n)",
        "'**a '.repeat(n / 4)",
        "'*a '.repeat(n / 3)",
        "'a** '.repeat(n / 4)",
        "'` `` ``` '.repeat(n / 9)",
        "'- '.repeat(n / 2)",
        "'- - - x\\n'.repeat(n / 8)",
        "'1. '.repeat(n / 3)",
        "'#'.repeat(n)",
        "'```\\n'.repeat(n / 4)",
        "' '.repeat(n) + 'x'",
        "'a\\n\\n'.repeat(n / 3)",
        "'\\u2028'.repeat(n)",
        "Array.from({length: 400}, (_, i) => ' '.repeat(2 * i) + '- x').join('\\n')",
    ]
    for text in texts:
        seconds = page.evaluate(
            "import('/page/markdown.js').then(({ MarkdownView }) => { const n = 60000;"
            " const view = new MarkdownView(document.createElement('div'));"
            f" const start = performance.now(); view.update({text});"
            " return (performance.now() - start) / 1000; })"
        )
        # The slowest takes 0.5 s.
        assert seconds < 2, f"{text}: {seconds} s"


def an_answer_grows_and_is_stopped(page, address, _):
    page.click("#new-conversation")
    for how in ["button", "escape"]:
        send(page, SLOW)
        page.wait(f"{CONTENT}.length > 20")
        length = page.evaluate(f"{CONTENT}.length")
        page.wait(f"{CONTENT}.length > {length}")
        assert running(address) == 1
        if how == "button":
            page.click("#stop")
        else:
            page.press("Escape")
        page.wait(IDLE)
        wait_until_idle(address)
        length = page.evaluate(f"{CONTENT}.length")
        note = page.text(f"{ANSWER} .note")
        assert note.startswith("Stopped · first text after"), note
        time.sleep(0.2)
        assert page.evaluate(f"{CONTENT}.length") == length
        assert page.evaluate("document.activeElement.id") == "prompt"


def the_live_view_shows_figures(page, address, screenshots):
    page.wait("document.querySelector('#live-state').textContent === 'Connected'")
    send(page, SLOW)
    number = "Number.parseFloat(document.querySelector('#{}').textContent)"
    page.wait(f"{number.format('running-value')} === 1 && {number.format('speed-value')} > 10")
    assert page.evaluate(number.format("waiting-value")) == 0
    page.wait(f"{number.format('cache-value')} > 0")
    assert page.evaluate(number.format("prefix-value")) >= 0
    assert page.count("#speed-chart .line") > 0
    label = page.evaluate("document.querySelector('#requests-chart').getAttribute('aria-label')")
    assert "1 running, at most 1; 0 waiting" in label, label
    page.press("Escape")
    page.wait(IDLE)


def conversations_are_kept(page, address, _):
    first = page.text("#log")
    page.click("#new-conversation")
    assert page.count(".message") == 0
    ask(page, say("The second answer."))
    assert page.evaluate(CONTENT) == "The second answer."
    assert page.count("#conversation-list li") == 3
    page.reload()
    page.wait("document.querySelectorAll('#conversation-list li').length === 3")
    assert page.evaluate(CONTENT) == "The second answer."
    page.click("#conversation-list li:nth-child(2) .choose")
    assert page.text("#log") == first
    # An answer goes on while another conversation is shown.
    send(page, SLOW)
    page.wait(f"{CONTENT}.length > 5")
    page.click("#conversation-list li:nth-child(2) .choose")
    assert page.evaluate(CONTENT) == "The second answer."
    assert page.evaluate(IDLE)
    ask(page, say("Beside it."))
    page.click("#conversation-list li:nth-child(2) .choose")
    assert not page.evaluate(IDLE)
    # A reload interrupts it, and keeps what was written.
    page.reload()
    page.wait("document.querySelectorAll('#conversation-list li').length === 3")
    assert page.evaluate(f"{CONTENT}.length") > 5
    assert page.text(f"{ANSWER} .note") == "Interrupted"
    wait_until_idle(address)


def settings_are_of_a_conversation(page, address, _):
    page.click("#new-conversation")
    page.click("#open-settings")
    assert page.evaluate("document.activeElement.id") == "system"
    page.insert("Be brief.")
    for field, value in [("temperature", "0.5"), ("max-tokens", "5")]:
        page.evaluate(f"document.querySelector('#{field}').focus()")
        page.insert(value)
    assert page.text("#model") == "test/modelalias"
    page.click("#settings-form .primary")
    page.wait("!document.querySelector('#settings').open")
    sent = """(() => { const own = window.fetch; window.fetch = (path, options) => {
        if (options?.body) window.sent = JSON.parse(options.body);
        return own(path, options); }; })()"""
    page.evaluate(sent)
    ask(page, "Hello")
    assert page.evaluate("window.sent") == {
        "model": "test/model",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
        ],
        "temperature": 0.5,
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    note = page.text(f"{ANSWER} .note")
    assert note.startswith("Ended at the limit of tokens · 5 tokens"), note
    # Cancel and Escape change nothing.
    for leave in [lambda: page.click("#cancel-settings"), lambda: page.press("Escape")]:
        page.click("#open-settings")
        page.insert("changed")
        leave()
        page.wait("!document.querySelector('#settings').open")
        assert page.evaluate("document.activeElement.id") == "open-settings"
    ask(page, "Hello again")
    sent = page.evaluate("window.sent.messages.map((message) => message.role)")
    assert sent == ["system", "user", "assistant", "user"], sent
    assert page.evaluate("window.sent.messages[0].content") == "Be brief."


def failures_are_shown(page, address, _):
    page.click("#new-conversation")
    ask(page, "\x03")
    error = page.text(f"{ANSWER} .error")
    assert "a broken row" in error, error
    assert page.evaluate("document.querySelector('#prompt').value") == "\x03"
    page.evaluate("document.querySelector('#prompt').value = ''")
    # A conversation goes on after a failure, without the question that failed.
    # The settings are those of the conversation before, with at most 5 tokens.
    ask(page, say("Better."))
    assert page.evaluate(CONTENT) == "Bette"
    page.evaluate("document.querySelector('#prompt').value = 'x'.repeat(5000)")
    page.evaluate("document.querySelector('#prompt').focus()")
    page.press("Enter")
    page.wait(IDLE)
    assert "maximum context length" in page.text(f"{ANSWER} .error")
    page.evaluate("document.querySelector('#prompt').value = ''")
    page.errors = [text for text in page.errors if "status of 400" not in text]
    page.call("Network.enable")
    conditions = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.call("Network.emulateNetworkConditions", offline=True, **conditions)
    ask(page, "Hello")
    assert page.text(f"{ANSWER} .error") == "The server cannot be reached."
    page.wait("document.querySelector('#live-state').textContent === 'Not connected'")
    page.call("Network.emulateNetworkConditions", offline=False, **conditions)
    page.wait("document.querySelector('#live-state').textContent === 'Connected'")
    page.errors = [text for text in page.errors if "ERR_INTERNET_DISCONNECTED" not in text]
    # Entries of the storage that are no conversations are left alone.
    page.evaluate("localStorage.setItem('burn-marlin/conversation/x', '{')")
    entry = '{"id": "y", "messages": 1}'
    page.evaluate(f"localStorage.setItem('burn-marlin/conversation/y', '{entry}')")
    page.reload()
    page.wait("document.querySelectorAll('#conversation-list li').length === 5")
    page.click("#conversation-list li:first-child .delete")
    page.wait("document.querySelectorAll('#conversation-list li').length === 4")
    assert len(page.dialogs) == 1 and "Delete" in page.dialogs[0], page.dialogs
    page.reload()
    page.wait("document.querySelectorAll('#conversation-list li').length === 4")


def another_tab_is_followed(page, address, _):
    change = (
        "(({{id}}, text) => {{ const key = `burn-marlin/conversation/${{id}}`;"
        " localStorage.setItem(key, JSON.stringify({{id, title: text, messages:"
        " [{{role: 'user', content: text}}], updated: -1}}));"
        " dispatchEvent(new StorageEvent('storage', {{key}})); }})({id}, '{text}')"
    )
    count = page.count("#conversation-list li")
    title = page.text("#chat-title")
    page.evaluate(change.format(id="{id: 'other'}", text="Of another tab"))
    assert page.count("#conversation-list li") == count + 1
    assert page.text("#chat-title") == title
    page.click("#conversation-list li:last-child .choose")
    page.evaluate(change.format(id="{id: 'other'}", text="Changed there"))
    assert page.text("#chat-title") == "Changed there"
    assert page.text("#log .message .text") == "Changed there"


def nothing_comes_from_elsewhere(page, address, _):
    page.reload()
    page.wait("document.querySelector('#model-name').textContent !== ''")
    names = page.evaluate("performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert len(names) > 10 and all(name.startswith(f"{address}/") for name in names), names


def a_key_is_asked_for(page, address, key):
    page.open(address)
    page.wait("document.querySelector('#notice').textContent.includes('API key')")
    send(page, say("With a key."))
    page.wait("document.querySelector('#settings').open && document.activeElement.id === 'api-key'")
    page.insert(key)
    page.press("Enter")
    page.wait("document.querySelector('#model-name').textContent === 'test/model'")
    page.wait("document.querySelector('#notice').hidden")
    # The question was put back, and has the focus again.
    assert page.evaluate("document.activeElement.id") == "prompt"
    assert page.evaluate("document.activeElement.value") == say("With a key.")
    page.press("Enter")
    page.wait(f"{CONTENT} === 'With a key.'")
    assert key not in page.evaluate("JSON.stringify({...localStorage})")
    page.reload()
    page.wait("document.querySelector('#model-name').textContent === 'test/model'")
    page.errors = [text for text in page.errors if "status of 401" not in text]


TESTS = [
    answers_are_streamed_and_rendered,
    code_is_copied,
    html_of_a_model_stays_text,
    markdown_is_linear,
    an_answer_grows_and_is_stopped,
    the_live_view_shows_figures,
    conversations_are_kept,
    settings_are_of_a_conversation,
    failures_are_shown,
    the_keyboard_reaches_everything,
    readers_of_screens_get_names,
    it_looks_right,
    another_tab_is_followed,
    nothing_comes_from_elsewhere,
]


def main():
    address, keyed, key, screenshots = sys.argv[1:]
    start = time.monotonic()

    def run(test, address, argument):
        begin = time.monotonic()
        test(page, address, argument)
        assert page.errors == [], (test.__name__, page.errors)
        print(f"{test.__name__}: {time.monotonic() - begin:.2f} s", flush=True)

    with Chromium() as page:
        page.screen(1280, 800, "light")
        page.open(address)
        for test in TESTS:
            run(test, address, Path(screenshots))
        run(a_key_is_asked_for, keyed, key)
    print(f"{len(TESTS) + 1} tests in {time.monotonic() - start:.2f} s")


if __name__ == "__main__":
    main()
