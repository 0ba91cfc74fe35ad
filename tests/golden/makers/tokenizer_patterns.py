"""`tokenizer_patterns.json`: how the tokenizers of Hugging Face, whose patterns are Oniguruma's, split texts at patterns."""

import json
import random
from pathlib import Path

import tokenizers
from tokenizers import Regex, pre_tokenizers

OUT = Path(__file__).resolve().parents[1] / "tokenizer_patterns.json"
# Of published tokenizers: GPT-2, Llama 3, Qwen 2, GPT-4, GPT-4o, DeepSeek, and what GPT-4's has in later versions of tiktoken.
PATTERNS = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", r"\s?\p{L}+", r"\s?\p{P}+", r"[^\S\n]+$", r"(?=(\d{3})+(?!\d))",
    # What Oniguruma reads otherwise than most.
    r"\d{1,3}+", r"\d{2}+", r"\d{2,}+", r"a{2}?", r"a{1,2}?", r"a{2}{2}", r"(?:ab){2}?", r"(a|b){1,2}+\d", r"a{,2}", r"a{,}", r"a{2", r"[ab]{2}+", r"\x61{2}+",
    r"a$", r"^a", r"^", r"$", r"^\s+|\s+$", r"\s++$", r"(?i)A{2}+", r"(?x) a {2} # a comment", r"\p{L}{2}?\d", r"(?<=a)b{2}+", r"a+{2}", r"[]a]{2}+", r"\d+$|\d{2}?",
]


def drawn(rng):
    """A random text of what the patterns look for."""
    pieces = ["a", "b", "ab", "A", "1", "23", "456", " ", "  ", "\n", "\r\n", "'s", "'LL", ".", "{", "}", ",", "é", "好", "]", "٣", "-"]
    return "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 24)))


def main():
    rng = random.Random(48)
    cases = []
    for pattern in PATTERNS:
        splitter = pre_tokenizers.Split(Regex(pattern), "isolated")
        texts = [drawn(rng) for _ in range(12)] + ["aaaaab\naab 1234567\n", "abababab12 "]
        cases.append({"pattern": pattern, "texts": {text: [piece for piece, _ in splitter.pre_tokenize_str(text)] for text in texts}})
    lines = ",\n".join("    " + json.dumps(case, ensure_ascii=False) for case in cases)
    OUT.write_text(f'{{\n  "tokenizers": "{tokenizers.__version__}",\n  "cases": [\n{lines}\n  ]\n}}\n')
    print(f"{OUT.name}: {len(cases)} patterns")


if __name__ == "__main__":
    main()
