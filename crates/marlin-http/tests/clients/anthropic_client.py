"""Every route of Anthropic's API through the package `anthropic`.

    cargo build -p marlin-http --example pseudo_server
    python anthropic_client.py target/debug/examples/pseudo_server
"""

import anthropic
from common import run, say

MODEL = "test/model"
TOOL = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
CALL = 'Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def messages(address):
    return anthropic.Anthropic(base_url=address, api_key="none", max_retries=0).messages


def user(content):
    return [{"role": "user", "content": content}]


def message(address):
    answer = messages(address).create(
        model=MODEL,
        max_tokens=100,
        system="Be brief.",
        messages=user([{"type": "text", "text": say("Grüße")}]),
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5},
    )
    assert answer.content[0].text == "Grüße" and answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens == 8
    answer = messages(address).create(
        model=MODEL, max_tokens=100, messages=user(say("a END b")), stop_sequences=["END"]
    )
    assert answer.content[0].text == "a " and answer.stop_sequence == "END"
    answer = messages(address).create(model=MODEL, max_tokens=5, messages=user("Go on."))
    assert answer.stop_reason == "max_tokens" and len(answer.content[0].text) == 5


def stream(address):
    text = say("<think>Hm.</think>Yes.")
    with messages(address).stream(model=MODEL, max_tokens=100, messages=user(text)) as events:
        names = [event.type for event in events]
        final = events.get_final_message()
    assert names[0] == "message_start" and names[-1] == "message_stop"
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.content[0].thinking == "Hm." and final.content[1].text == "Yes."
    assert final.stop_reason == "end_turn"


def tools(address):
    api = messages(address)
    options = dict(model=MODEL, max_tokens=200, tools=[TOOL])
    answer = api.create(messages=user(say(CALL)), **options)
    assert answer.stop_reason == "tool_use"
    text, call = answer.content
    assert text.text == "Let me see." and call.name == "add" and call.input == {"a": 1}
    history = [
        *user("2?"),
        {"role": "assistant", "content": [block.model_dump(exclude_none=True, exclude={"caller"}) for block in answer.content]},
        *user([
            {"type": "tool_result", "tool_use_id": call.id, "content": "2"},
            {"type": "text", "text": say("2 it is")},
        ]),
    ]
    assert api.create(messages=history, **options).content[0].text == "2 it is"
    with api.stream(messages=user(say(CALL)), **options) as events:
        final = events.get_final_message()
    assert final.content[1].input == {"a": 1}
    for choice in [{"type": "any"}, {"type": "tool", "name": "add"}]:
        answer = api.create(messages=user("Go."), tool_choice=choice, **options)
        assert isinstance(answer.content[0].input["a"], int)


def tokens(address):
    count = messages(address).count_tokens(model=MODEL, messages=user("h"))
    assert count.input_tokens == 6 + 1 + 1 + 11


def errors(address):
    for kind, options in [
        (anthropic.NotFoundError, dict(model="claude", messages=user("a"))),
        (anthropic.BadRequestError, dict(model=MODEL, messages=user("x" * 5000))),
        (anthropic.BadRequestError, dict(model=MODEL, messages=user("a"), extra_body={"temperature": 3})),
        (anthropic.InternalServerError, dict(model=MODEL, messages=user("\x03"))),
    ]:
        try:
            messages(address).create(max_tokens=10, **options)
        except kind as error:
            assert error.body["type"] == "error", error.body
            continue
        raise AssertionError(f"{kind} was not raised")


if __name__ == "__main__":
    run([message, stream, tools, tokens, errors])
