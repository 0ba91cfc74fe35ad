"""`chat_templates.json`: well-known templates, and what transformers' `apply_chat_template` makes of them.

The template texts are those of TRL and axolotl (both Apache 2.0), which ship the published ones; the short ones are written here.
"""

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

SYSTEM = {"role": "system", "content": "You are terse."}
USER = {"role": "user", "content": "  Hello <there> & \"you\" \n"}
ASSISTANT = {"role": "assistant", "content": "Hi. Größe 4 µm."}
THINKING = {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHi."}
AGAIN = {"role": "user", "content": "Who are you?"}


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
        ("tojson", TOJSON, mistral, True),
        ("strftime", STRFTIME, mistral, True),
    ]
    cases = []
    for name, template, (bos, eos), system in templates:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), bos_token=bos, eos_token=eos)
        conversations = [
            ([USER], True), ([USER, ASSISTANT, AGAIN], True), ([USER, ASSISTANT], False),
            ([SYSTEM, USER], True), ([SYSTEM, USER, THINKING, AGAIN], True),
        ]
        if name.startswith("mistral"):
            conversations.append(([ASSISTANT, USER], True))
        for messages, prompt in conversations:
            case = {"name": name, "template": template, "bos_token": bos, "eos_token": eos, "messages": messages, "add_generation_prompt": prompt}
            try:
                case["expected"] = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=prompt)
            except Exception as error:  # `raise_exception` of a template
                assert not system or messages[0] is ASSISTANT, name
                case["error"] = str(error)
            cases.append(case)
    shared = {name: template for name, template, _, _ in templates}
    for case in cases:
        del case["template"]
    write_json(OUT / "chat_templates.json", {"templates": shared, "cases": cases})
    print(f"chat_templates.json: {len(cases)} cases, {sum('error' in case for case in cases)} of them errors")


if __name__ == "__main__":
    main()
