"""Checkpoints that are not quantised: each dtype, and one in shards."""

import torch
import transformers

from makers.model import Tiny, write

PACKER = f"transformers {transformers.__version__}"


def main():
    small = dict(hidden=32, intermediate=32, heads=2, head_dim=16)
    model = Tiny(**small)
    tensors = model.float_tensors()
    for dtype, name, shards in [
        (torch.float32, "plain-f32", 1), (torch.float16, "plain-f16-shards", 3), (torch.bfloat16, "plain-bf16", 1),
    ]:
        model.config.dtype = dtype
        kept = {key: value.to(dtype) for key, value in tensors.items()}
        write(name, model.config, kept, packer=PACKER, shards=shards)
    tied = Tiny(**small)
    tied.config.tie_word_embeddings = True
    tied.config.dtype = torch.float16
    half = {key: value.half() for key, value in tensors.items() if key != "lm_head.weight"}
    # Some writers keep both names of a tied head.
    both = half | {"lm_head.weight": half["model.embed_tokens.weight"].clone()}
    write("plain-f16-tied-twice", tied.config, both, packer=PACKER, reference=half, note="tied, and lm_head.weight is in the file as well")


if __name__ == "__main__":
    main()
