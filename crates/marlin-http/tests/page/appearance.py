"""How the page looks, at which sizes, and to keyboards and readers of screens."""

import json

from helpers import MARKDOWN, SLOW, send

# Returns what has too little contrast: texts against the first ground behind them that is opaque.
CONTRAST = """(() => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const channel = (value) =>
    value <= 0.04045 * 255 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const isOpaque = (node) => (parse(getComputedStyle(node).backgroundColor)[3] ?? 1) === 1;
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const text = walker.currentNode.data.trim();
    if (!text || !node.checkVisibility() || node.closest('noscript')) continue;
    let ground = node;
    while (!isOpaque(ground)) ground = ground.parentElement;
    const colors = [getComputedStyle(node).color, getComputedStyle(ground).backgroundColor];
    const lights = colors.map((color) => light(parse(color))).sort((a, b) => b - a);
    const ratio = (lights[0] + 0.05) / (lights[1] + 0.05);
    if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${text.slice(0, 40)}`);
  }
  return found;
})()"""


def the_keyboard_reaches_everything(page, address, _):
    page.reload()
    names = []
    for _ in range(40):
        page.press("Tab")
        name = page.evaluate(
            "document.activeElement === document.body ? ''"
            " : document.activeElement.id || document.activeElement.className"
        )
        if not name or name in names[:1]:
            break
        names.append(name)
    expected = {"skip", "new-conversation", "choose", "delete", "open-settings", "log", "prompt"}
    assert expected | {"send"} <= set(names), names
    page.evaluate("document.querySelector('.skip').focus()")
    page.press("Enter")
    page.wait("document.activeElement.id === 'prompt'")
    page.insert("one")
    page.press("Enter", modifiers=8)
    page.insert("two")
    assert page.evaluate("document.querySelector('#prompt').value") == "one\ntwo"
    page.evaluate("document.querySelector('#prompt').select()")
    page.press("Backspace")


def readers_of_screens_get_names(page, address, _):
    tree = page.accessibility_tree()
    for node in [
        ("heading", "burn-marlin"),
        ("navigation", "Conversations"),
        ("main", None),
        ("complementary", "Server"),
        ("log", "Messages"),
        ("textbox", "Message"),
        ("button", "Send"),
    ]:
        found = [name for role, name in tree if role == node[0]]
        assert found and (node[1] is None or node[1] in found), (node, found)
    named = ["button", "textbox", "link", "combobox", "image", "img", "spinbutton", "dialog"]
    for role, name in tree:
        assert name or role not in named, f"a {role} without a name"
    page.click("#open-settings")
    tree = page.accessibility_tree()
    for name in ["System message", "Temperature", "Max tokens", "API key"]:
        assert any(own == name and role in ["textbox", "spinbutton"] for role, own in tree), name
    page.press("Escape")


def it_looks_right(page, address, screenshots):
    # A conversation with texts that people write.
    question = "How do I run the example, and what does it print?"
    messages = [
        {"role": "user", "content": question},
        {
            "role": "assistant",
            "content": MARKDOWN,
            "reasoning": "The user wants a command.",
            "note": "123 tokens · first text after 40 ms · 61.5 tokens/s",
        },
        {"role": "user", "content": "And without a server?"},
        {"role": "assistant", "content": "", "error": "The server cannot be reached."},
    ]
    conversation = {"id": "z", "updated": 0, "title": question, "messages": messages}
    stored = json.dumps(json.dumps(conversation))
    page.evaluate(f"localStorage.setItem('burn-marlin/conversation/z', {stored})")
    page.reload()
    # A slow answer goes on beside, for the live view.
    page.click("#conversation-list li:last-child .choose")
    page.click("#new-conversation")
    send(page, SLOW)
    page.click("#conversation-list li:last-child .choose")
    page.evaluate("document.querySelector('#log details').open = true")
    page.wait("document.querySelectorAll('#speed-chart .line').length > 0")
    for scheme in ["light", "dark"]:
        for width, height in [(1280, 800), (390, 844), (1000, 700), (320, 568)]:
            page.screen(width, height, scheme)
            views = ["chat"] if width > 899 else ["chat", "conversations", "live"]
            for view in views:
                if len(views) > 1:
                    page.click(f"#views [data-view={view}]")
                page.evaluate("document.querySelector('#log').scrollTop = 0")
                name = f"{view}-{width}-{scheme}"
                page.evaluate("new Promise(requestAnimationFrame)")
                page.screenshot(screenshots / f"{name}.png")
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
                contrast = page.evaluate(CONTRAST)
                assert contrast == [], (name, contrast)
            if len(views) > 1:
                page.click("#views [data-view=chat]")
            page.click("#open-settings")
            page.screenshot(screenshots / f"settings-{width}-{scheme}.png")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            page.press("Escape")
    page.screen(1280, 800, "light")
