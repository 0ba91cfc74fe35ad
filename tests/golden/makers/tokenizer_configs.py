"""`tokenizer_configs.json`: tokens that only the configs beside a `tokenizer.json` have, and how transformers counts them."""

import json
import random
import tempfile
from pathlib import Path

import transformers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[3]
OUT = ROOT / "tests" / "golden" / "tokenizer_configs.json"
# One token a byte, then <s> 256 and </s> 257.
BASE = json.loads((ROOT / "crates/marlin-text/tests/byte_level.json").read_text())
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = "<s>a<|im_start|>user \n <|im_end|> b</s> <|endoftext|>  New new  anew<pad><image> <tool> x [X]<fim>."


def token(content, **flags):
    plain = {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return plain | flags


def chosen():
    """The forms that published folders have."""
    decoder = {str(258 + i): token(text) for i, text in enumerate(CHATML)}
    config = {"added_tokens_decoder": decoder, "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    tokens = {text: 258 + i for i, text in enumerate(CHATML)}
    own = {"256": token("<s>"), "257": token("</s>")}
    yield "all in added_tokens_decoder", config, None, None, []
    yield "added_tokens.json alone", {"eos_token": "<|im_end|>"}, None, tokens, []
    yield "added_tokens.json is not read beside an added_tokens_decoder", {"added_tokens_decoder": own}, None, tokens, []
    yield "added_tokens.json without tokenizer_config.json", None, None, tokens, []
    yield "named only", {"pad_token": "<pad>", "eos_token": token("<|im_end|>", __type="AddedToken")}, None, None, []
    yield "named in special_tokens_map.json", {"eos_token": "</s>"}, {"eos_token": token("<|im_end|>", rstrip=True), "pad_token": "<pad>"}, None, []
    yield "special_tokens_map.json beside an added_tokens_decoder", {"added_tokens_decoder": own, "eos_token": "</s>"}, {"eos_token": "<|im_end|>"}, None, []
    yield "a list of extra tokens", {"extra_special_tokens": ["<tool>", "<image>"]}, None, None, []
    yield "a list of extra tokens by its older name", {"additional_special_tokens": CHATML}, None, None, []
    yield "the older name in special_tokens_map.json", {}, {"additional_special_tokens": CHATML}, None, []
    yield "extra tokens of both files", {"extra_special_tokens": ["<tool>"]}, {"extra_special_tokens": ["<image>", {"content": "[X]", "lstrip": True}]}, None, []
    yield "extra tokens with names", {"extra_special_tokens": {"image_token": "<image>"}, "fim_token": "<fim>"}, None, None, []
    yield "flags", {"added_tokens_decoder": own | {
        "258": token("New", special=False, normalized=True, single_word=True), "259": token("[X]", lstrip=True), "260": token("<|im_end|>", rstrip=True),
    }}, None, None, []
    yield "numbers with a gap", {"added_tokens_decoder": own | {"300": token("<|im_end|>"), "270": token("<|im_start|>")}}, None, None, []
    yield "other flags than in tokenizer.json", {"added_tokens_decoder": own | {"258": token("<|im_end|>", rstrip=True)}}, None, None, [{"id": 258} | token("<|im_end|>", special=False)]
    yield "made special by its name", {"added_tokens_decoder": own | {"258": token("<|im_end|>", special=False)}, "eos_token": "<|im_end|>"}, None, None, []
    yield "not made special by its name", {"added_tokens_decoder": own, "eos_token": "<|im_end|>"}, None, None, [{"id": 258} | token("<|im_end|>", special=False)]
    yield "a token of the model's vocabulary", {"added_tokens_decoder": own | {"120": token("x")}}, None, None, []


def drawn(rng):
    """A random folder."""
    words = [*CHATML, "New", "<pad>", "<image>", "<tool>", "[X]", "<fim>", "x", "</s>"]
    flags = lambda: {name: rng.random() < 0.3 for name in ["lstrip", "rstrip", "single_word", "special", "normalized"]}
    named = lambda: {name: rng.choice([rng.choice(words), token(rng.choice(words), **flags()) | {"__type": "AddedToken"}])
                     for name in rng.sample(["bos_token", "eos_token", "pad_token", "unk_token", "image_token"], rng.randrange(4))}
    config = named()
    if rng.random() < 0.6:
        config["added_tokens_decoder"] = {str(256 + i): token(text, **flags()) for i, text in enumerate(["<s>", "</s>", *rng.sample(words[:-1], rng.randrange(6))])}
    if rng.random() < 0.3:
        config["extra_special_tokens"] = rng.sample(words, 2)
    plain = lambda field: {key: value for key, value in field.items() if key != "__type"} if isinstance(field, dict) else field
    special = {name: plain(field) for name, field in named().items() if name != "image_token"} if rng.random() < 0.4 else None
    added = {text: 258 + i for i, text in enumerate(rng.sample(words[:-2], 3))} if rng.random() < 0.4 else None
    own = [{"id": 258 + i} | token(text, **flags()) for i, text in enumerate(rng.sample(words[:-2], rng.randrange(3)))]
    return config, special, added, own


def case(name, config, special, added, own):
    tokenizer_json = BASE | {"added_tokens": BASE["added_tokens"] + own}
    files = {"tokenizer_config.json": config, "special_tokens_map.json": special, "added_tokens.json": added}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for path, content in {"tokenizer.json": tokenizer_json, **files}.items():
            if content is not None:
                (folder / path).write_text(json.dumps(content))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        ids = tokenizer.encode(TEXT, add_special_tokens=False)
        return {
            "name": name, "added_tokens": own, "files": {path: content for path, content in files.items() if content is not None},
            "vocab_size": max(tokenizer.get_vocab().values()) + 1,
            "special": sorted(id for id, token in tokenizer.added_tokens_decoder.items() if token.special),
            "ids": ids, "decoded": tokenizer.decode(ids, skip_special_tokens=True),
            "special_tokens": tokenizer.special_tokens_map,
        }


def main():
    rng = random.Random(48)
    cases = [case(*parts) for parts in chosen()]
    cases += [case(f"drawn {index}", *drawn(rng)) for index in range(60)]
    lines = ",\n".join("    " + json.dumps(case, ensure_ascii=False) for case in cases)
    OUT.write_text(f'{{\n  "transformers": "{transformers.__version__}",\n  "text": {json.dumps(TEXT)},\n  "cases": [\n{lines}\n  ]\n}}\n')
    print(f"{OUT.name}: {len(cases)} cases")


if __name__ == "__main__":
    main()
