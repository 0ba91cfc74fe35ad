"""`chat_templates.json`: well-known templates, and what transformers' `apply_chat_template` makes of them.

The template texts are those of TRL and axolotl (both Apache 2.0), which ship the published ones; the short ones are written here. gpt-oss's has
one line more, which puts a macro in place of the function with today's date.
"""

from jinja2 import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from makers.model import OUT, write_json
from makers.packages import unpacked

# As Zephyr and Mistral Instruct v0.2 publish them.
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
MISTRAL_V02 = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)
# What templates use beside the plain language: `tojson` (sorted as given, text not escaped for HTML), blocks that eat their line.
TOJSON = "{% for message in messages %}\n    {{ message | tojson }}\n    {%- if not loop.last %}\n    {{ ',' }}\n    {% endif %}\n{% endfor %}\n"
STRFTIME = "{{ strftime_now('%Y-%m-%d') | length }} {{ messages[-1].content.strip().upper().split(' ')[0] }} {{ messages | length }}"

# gpt-oss's template writes the date: its cases are of this day.
FIXED_DATE = "{%- macro strftime_now(format) -%}2025-08-05{%- endmacro -%}\n"

SYSTEM = {"role": "system", "content": "You are terse."}
USER = {"role": "user", "content": "  Hello <there> & \"you\" \n"}
ASSISTANT = {"role": "assistant", "content": "Hi. Größe 4 µm."}
THINKING = {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHi."}
AGAIN = {"role": "user", "content": "Who are you?"}
DEVELOPER = {"role": "developer", "content": "Answer in one word.\nNever shout."}
REASONED = {"role": "assistant", "thinking": "A greeting; \"Hi\" will do.", "content": "Hi."}


def call(name, arguments, **more):
    return {"role": "assistant", **more, "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}]}


def function(name, description, properties=None, required=()):
    parameters = {"type": "object", "properties": properties or {}, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = function("get_weather", "The weather of a place.", {
    "place": {"type": "string", "description": "The city, e.g. \"Zürich\""},
    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
    "days": {"type": "integer", "description": "How many", "default": 3},
}, ["place"])
# One parameter of every kind that the template tells apart.
SEARCH = function("search", "Finds <things>.", {
    "words": {"type": "array", "items": {"type": "string"}, "nullable": True}, "near": {"type": "array", "items": {"type": "number"}},
    "flags": {"type": "array", "items": {"type": "boolean"}, "default": [True, False]}, "any": {"type": "array"},
    "rows": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    "point": {"type": "object", "properties": {"x": {"type": "number"}, "label": {"type": "string", "nullable": True}}, "required": ["x"]},
    "points": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}, "of": {"type": "string", "enum": ["a long", "name"]}}}},
    "empty": {"type": "object"}, "either": {"type": ["string", "number"]}, "one": {"type": ["string"]}, "exact": {"type": "boolean", "default": False},
    "by": {"oneOf": [{"type": "string", "description": "a name"}, {"type": "number", "default": 1.5}]},
    "which": {"oneOf": [{"type": "object"}, {"type": "string"}]}, "ratio": {"type": "number", "default": 1e-05},
    "text": {"type": "string", "default": "é <\"'>"}, "nothing": {},
}, ["words", "near"])
NOW = function("now", "The time.")
CALL = call("get_weather", {"place": "Zürich", "days": 1}, thinking="The user wants the weather.")
RESULT = {"role": "tool", "name": "get_weather", "content": {"sky": "clear & <dry>", "temperatures": [20, 21.5], "wind": None, "rain": False}}
# messages, add_generation_prompt, further variables
GPT_OSS = [
    ([DEVELOPER, USER], True, {}),
    ([DEVELOPER, USER, REASONED, AGAIN], True, {"reasoning_effort": "high"}),
    ([USER, REASONED], False, {"reasoning_effort": "low"}),
    ([USER, REASONED, AGAIN, ASSISTANT], False, {"model_identity": "You are a model."}),
    ([USER], True, {"builtin_tools": ["browser", "python"]}),
    ([SYSTEM, USER], True, {"builtin_tools": ["python"], "reasoning_effort": "high", "tools": [NOW]}),
    ([DEVELOPER, USER], True, {"tools": [WEATHER, SEARCH, NOW]}),
    ([SYSTEM, USER, CALL, RESULT], True, {"tools": [WEATHER]}),
    ([SYSTEM, USER, CALL, RESULT, call("now", {}, content="The time, too."), {"role": "tool", "content": "\"12:00\" – é\n"}], True,
     {"tools": [WEATHER, NOW]}),
    ([USER, CALL, RESULT, ASSISTANT, AGAIN], True, {"tools": [WEATHER], "reasoning_effort": "medium"}),
    ([DEVELOPER, USER, CALL, RESULT, REASONED], False, {"tools": [WEATHER]}),
    ([USER, call("get_weather", {"place": ["a", {"b": 1}]})], False, {"tools": [WEATHER]}),
]
GPT_OSS_REFUSES = [
    ([USER, RESULT], True, {}),
    ([USER, CALL, RESULT, ASSISTANT, RESULT], True, {"tools": [WEATHER]}),
    ([USER, {"role": "assistant", "content": "<|channel|>final<|message|>Hi."}], True, {}),
    ([USER, {"role": "assistant", "thinking": "<|channel|>analysis<|message|>A", "content": "Hi."}, AGAIN], True, {}),
    ([USER, call("now", {}, content="One.", thinking="Two.")], True, {}),
]


def main():
    trl = unpacked("trl", "1.16.0") / "trl" / "chat_templates"
    axolotl = unpacked("axolotl", "0.19.0") / "axolotl" / "utils" / "chat_templates" / "templates"
    llama3 = ("<|begin_of_text|>", "<|eot_id|>")
    mistral = ("<s>", "</s>")
    qwen = (None, "<|im_end|>")
    # name, text, (bos, eos), whether it takes a system message
    templates = [
        ("llama-3", (trl / "llama3.jinja").read_text(), llama3, True),
        ("llama-3.1", (trl / "llama3_1.jinja").read_text(), llama3, True),
        ("mistral-v0.1", (axolotl / "mistral_v1.jinja").read_text(), mistral, True),
        ("mistral-v0.2", MISTRAL_V02, mistral, False),
        ("qwen2.5", (trl / "qwen2_5.jinja").read_text(), qwen, True),
        ("qwen3", (trl / "qwen3.jinja").read_text(), qwen, True),
        ("phi-3", (trl / "phi3.jinja").read_text(), ("<s>", "<|endoftext|>"), True),
        ("chatml", (axolotl / "chatml.jinja").read_text(), ("<s>", "<|im_end|>"), True),
        ("zephyr", ZEPHYR, mistral, True),
        ("gpt-oss", FIXED_DATE + (trl / "gptoss.jinja").read_text(), ("<|startoftext|>", "<|return|>"), True),
        ("tojson", TOJSON, mistral, True),
        ("strftime", STRFTIME, mistral, True),
    ]
    cases = []
    for name, template, (bos, eos), system in templates:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), bos_token=bos, eos_token=eos)
        conversations = [
            ([USER], True, {}), ([USER, ASSISTANT, AGAIN], True, {}), ([USER, ASSISTANT], False, {}),
            ([SYSTEM, USER], True, {}), ([SYSTEM, USER, THINKING, AGAIN], True, {}),
        ]
        if name.startswith("mistral"):
            conversations.append(([ASSISTANT, USER], True, {}))
        if name == "gpt-oss":
            conversations += GPT_OSS + GPT_OSS_REFUSES
        for messages, prompt, variables in conversations:
            case = {"name": name, "template": template, "bos_token": bos, "eos_token": eos, "messages": messages}
            case |= ({"variables": variables} if variables else {}) | {"add_generation_prompt": prompt}
            refuses = (messages, prompt, variables) in GPT_OSS_REFUSES
            try:
                case["expected"] = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=prompt,
                                                                 **variables)
                assert not refuses, name
            except TemplateError as error:  # `raise_exception` of a template
                assert not system or messages[0] is ASSISTANT or refuses, name
                case["error"] = str(error)
            cases.append(case)
    shared = {name: template for name, template, _, _ in templates}
    for case in cases:
        del case["template"]
    write_json(OUT / "chat_templates.json", {"templates": shared, "cases": cases})
    print(f"chat_templates.json: {len(cases)} cases, {sum('error' in case for case in cases)} of them errors")


if __name__ == "__main__":
    main()
