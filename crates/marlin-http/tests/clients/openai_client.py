"""Every route of OpenAI's API through the package `openai`.

    cargo build -p marlin-http --example pseudo_server
    python openai_client.py target/debug/examples/pseudo_server
"""

import asyncio
import json

import openai
from common import run, say

MODEL = "test/model"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
CALL = 'Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def client(address, **options):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, **options)


def user(text):
    return [{"role": "user", "content": text}]


def chat(address):
    api = client(address).chat.completions
    answer = api.create(model=MODEL, messages=user(say("Grüße")))
    choice = answer.choices[0]
    assert choice.message.content == "Grüße" and choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == 8
    parts = [{"type": "text", "text": say("parts")}]
    answer = api.create(model=MODEL, messages=[{"role": "developer", "content": "d"}, *user(parts)])
    assert answer.choices[0].message.content == "parts"


def chat_stream(address):
    stream = client(address).chat.completions.create(
        model=MODEL,
        messages=user(say("one two")),
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "one two"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 8 and not chunks[-1].choices
    # What may become a stop string comes at the end, with the reason of it.
    with client(address).chat.completions.stream(
        model=MODEL, messages=user(say("one EN")), stop="END"
    ) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        final = stream.get_final_completion().choices[0]
    last = chunks[-1].choices[0]
    assert last.delta.content == "EN" and last.finish_reason == "stop"
    assert final.message.content == "one EN" and final.finish_reason == "stop"


def chat_options(address):
    api = client(address).chat.completions
    options = dict(
        n=2,
        seed=7,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        max_completion_tokens=20,
        stop=["zzzzzz"],
        user="someone",
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True},
    )
    first = api.create(model=MODEL, messages=user("Hello"), **options)
    again = api.create(model=MODEL, messages=user("Hello"), **options)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert texts[0] != texts[1] and len(texts[0]) == 20
    answer = api.create(model=MODEL, messages=user(say("before END")), stop="END")
    assert answer.choices[0].message.content == "before "
    answer = api.create(model=MODEL, messages=user(say("é")), logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert content[0].bytes == [0xC3] and len(content[0].top_logprobs) == 2


def chat_tools(address):
    api = client(address).chat.completions
    answer = api.create(model=MODEL, messages=user(say(CALL)), tools=[TOOL])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    call = choice.message.tool_calls[0]
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 1}
    messages = [
        *user("2?"),
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "2"},
        *user(say("2 it is")),
    ]
    answer = api.create(model=MODEL, messages=messages, tools=[TOOL])
    assert answer.choices[0].message.content == "2 it is"
    forced = {"type": "function", "function": {"name": "add"}}
    for choice in ["required", forced]:
        answer = api.create(
            model=MODEL, messages=user("Go."), tools=[TOOL], tool_choice=choice, max_tokens=200
        )
        call = answer.choices[0].message.tool_calls[0]
        assert isinstance(json.loads(call.function.arguments)["a"], int)
    with client(address).chat.completions.stream(
        model=MODEL, messages=user(say(CALL)), tools=[TOOL]
    ) as stream:
        final = stream.get_final_completion()
    call = final.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"a": 1}


def chat_structure(address):
    schema = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }
    answer = client(address).chat.completions.create(
        model=MODEL,
        messages=user("Go."),
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    )
    assert isinstance(json.loads(answer.choices[0].message.content)["on"], bool)


def completions(address):
    api = client(address).completions
    answer = api.create(model=MODEL, prompt=say("Hi"))
    assert answer.choices[0].text == "Hi" and answer.choices[0].finish_reason == "stop"
    answer = api.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=5, echo=True)
    assert [choice.text[0] for choice in answer.choices] == ["a", "a", "b", "b"]
    answer = api.create(model=MODEL, prompt=[256, 97], max_tokens=5, logprobs=2)
    assert len(answer.choices[0].logprobs.tokens) == 5
    stream = api.create(model=MODEL, prompt=say("Hi"), stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hi"
    stream = api.create(model=MODEL, prompt=say("Hi"), max_tokens=2, echo=True, stream=True)
    choices = [chunk.choices[0] for chunk in stream]
    assert [choice.text for choice in choices] == [say("Hi") + "H", "i"]
    assert [choice.finish_reason for choice in choices] == [None, "length"]


def responses(address):
    api = client(address).responses
    answer = api.create(model=MODEL, input=say("Hi"), instructions="Be brief.", store=False)
    assert answer.output_text == "Hi" and answer.status == "completed"
    assert answer.usage.output_tokens == 3
    answer = api.create(model=MODEL, input="Go on.", max_output_tokens=5)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    function = TOOL["function"]
    tool = {"type": "function", **function, "strict": True}
    answer = api.create(model=MODEL, input=user(say(CALL)), tools=[tool])
    assert [item.type for item in answer.output] == ["message", "function_call"]
    call = answer.output[1]
    assert call.name == "add" and json.loads(call.arguments) == {"a": 1}
    history = [
        *user("2?"),
        *(item.model_dump(exclude_none=True) for item in answer.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "2"},
        *user(say("2 it is")),
    ]
    assert api.create(model=MODEL, input=history, tools=[tool]).output_text == "2 it is"
    with client(address).responses.stream(model=MODEL, input=say("<think>Hm</think>Yes")) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_response()
    assert names[0] == "response.created" and names[-1] == "response.completed"
    assert final.output_text == "Yes"
    assert [item.type for item in final.output] == ["reasoning", "message"]


def models(address):
    api = client(address).models
    assert [model.id for model in api.list()] == [MODEL, "alias"]
    assert api.retrieve("alias").id == "alias"


def errors(address):
    api = client(address)

    def refused(kind, call):
        try:
            call()
        except kind as error:
            return error
        raise AssertionError(f"{kind} was not raised")

    create = api.chat.completions.create
    error = refused(openai.NotFoundError, lambda: create(model="gpt", messages=user("a")))
    assert error.code == "model_not_found"
    error = refused(
        openai.BadRequestError, lambda: create(model=MODEL, messages=user("x" * 5000))
    )
    assert error.code == "context_length_exceeded"
    error = refused(
        openai.BadRequestError, lambda: create(model=MODEL, messages=user("a"), n=10**9)
    )
    assert error.param == "n"
    error = refused(
        openai.InternalServerError, lambda: create(model=MODEL, messages=user("\x03"))
    )
    assert "a broken row" in error.message
    refused(
        openai.APIError,
        lambda: list(create(model=MODEL, messages=user("\x03"), stream=True)),
    )
    refused(
        openai.InternalServerError, lambda: api.embeddings.create(model=MODEL, input="a")
    )


def many(address):
    """100 requests at once, of which each third is cancelled."""

    async def all_of_them():
        api = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)

        async def one(index):
            stream = await api.chat.completions.create(
                model=MODEL, messages=user(say(f"number {index}")), stream=True
            )
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if index % 3 == 0 and text:
                    await stream.close()
                    return
            assert text == f"number {index}", text

        await asyncio.gather(*(one(index) for index in range(100)))

    asyncio.run(all_of_them())


if __name__ == "__main__":
    run([
        chat,
        chat_stream,
        chat_options,
        chat_tools,
        chat_structure,
        completions,
        responses,
        models,
        errors,
        many,
    ])
