"""`generation.json`: what transformers' `generate` makes of generation configs that suppress tokens, and the tokens that its sampling keeps.

The model is `arch-llama3`. Decoding is greedy, or a sampling that keeps one token; no choice is so close that rounding decides it.
"""

import json

import torch
import transformers
from transformers import GenerationConfig, LlamaForCausalLM
from transformers.generation.logits_process import LogitsProcessorList

from makers.model import OUT

MODEL = "arch-llama3"
NEW_TOKENS = 16
PROMPTS = [[1, 7, 19, 4, 30], [3], [11, 12, 11, 12, 6, 8]]
# Any two choices are further apart than both sides' rounding together.
MARGIN = 1e-3


def generated(model, prompt, config):
    """The new tokens without a stop token at their end, and whether there was one."""
    config = {"eos_token_id": [], "pad_token_id": 0} | config
    options = GenerationConfig(**config, max_new_tokens=NEW_TOKENS, bos_token_id=1, output_scores=True, return_dict_in_generate=True)
    torch.manual_seed(0)
    result = model.generate(torch.tensor([prompt]), generation_config=options)
    for scores in result.scores:
        best = scores[0].topk(2).values
        assert best[0] - best[1] > MARGIN, (prompt, config, best)
    tokens = result.sequences[0, len(prompt):].tolist()
    stops = tokens[-1] in config["eos_token_id"]
    return tokens[:-1] if stops else tokens, stops


def kept(model, prompt, config):
    """The tokens that a sampling keeps for the first choice after a prompt."""
    ids = torch.tensor([prompt])
    options = GenerationConfig(do_sample=True, **config)
    options._eos_token_tensor = None
    processors = model._get_logits_processor(options, len(prompt), logits_processor=LogitsProcessorList(), device="cpu")
    with torch.no_grad():
        scores = processors(ids, model(ids).logits[:, -1].float())
    return (scores[0] > -float("inf")).nonzero().flatten().tolist()


def main():
    model = LlamaForCausalLM.from_pretrained(OUT / MODEL, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config = GenerationConfig()
    cases, samplings = [], []
    for prompt in PROMPTS:
        free, _ = generated(model, prompt, {})
        pair, end = free[3:5], free[2]
        configs = [
            {},
            {"suppress_tokens": [free[0], free[4], -1]},
            {"bad_words_ids": [[free[1]], [free[5]]]},
            # Words of several tokens: in what is generated, over the end of the prompt, longer than the text.
            {"bad_words_ids": [pair]},
            {"bad_words_ids": [[prompt[-1], free[0]], free[5:8], list(range(31))]},
            # A stop token alone is no bad word; as the last of a longer one it is.
            {"eos_token_id": [end], "bad_words_ids": [[end]]},
            {"eos_token_id": [end], "bad_words_ids": [free[1:3]]},
            {"eos_token_id": [end]},
            {"eos_token_id": [end, free[6]], "min_new_tokens": 9},
            {"eos_token_id": [end], "min_new_tokens": 3},
            {"eos_token_id": [end], "min_length": len(prompt) + 7},
            {"eos_token_id": [end], "min_length": len(prompt) + 7, "min_new_tokens": 2},
            {"eos_token_id": [end], "min_length": len(prompt) + 7, "min_new_tokens": 0},
            {"repetition_penalty": 1.3, "suppress_tokens": [free[0]], "bad_words_ids": [[free[2]], pair], "eos_token_id": [free[1]], "min_new_tokens": 5},
            {"do_sample": True, "top_k": 0, "min_p": 1.0},
            {"do_sample": True, "temperature": 3.0, "top_p": 0.95, "min_p": 1.0, "bad_words_ids": [pair]},
        ]
        for config in configs:
            tokens, stops = generated(model, prompt, config)
            cases.append({"prompt": prompt, "config": config, "tokens": tokens, "stops": stops})
        samplings.extend(
            {"prompt": prompt, "config": config, "kept": kept(model, prompt, config)}
            for config in [
                {"top_k": 0, "min_p": 0.3}, {"top_k": 0, "min_p": 0.1, "temperature": 0.5}, {"top_k": 0, "min_p": 0.1, "temperature": 2.0},
                {"top_k": 5, "min_p": 0.2}, {"top_k": 0, "top_p": 0.6, "min_p": 0.2}, {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "temperature": 1.5},
                {"top_k": 0, "min_p": 0.3, "suppress_tokens": [free[0]]}, {"top_k": 0, "min_p": 0.0},
            ]
        )
    print(f"generation.json: {len(cases)} cases, {len(samplings)} samplings")
    # A line a case.
    cases, samplings = (",\n".join(map(json.dumps, values)) for values in (cases, samplings))
    head = json.dumps({"transformers": transformers.__version__, "model": MODEL, "new_tokens": NEW_TOKENS})
    (OUT / "generation.json").write_text(f'{head[:-1]},\n"cases": [\n{cases}\n],\n"samplings": [\n{samplings}\n]}}\n')


if __name__ == "__main__":
    main()
