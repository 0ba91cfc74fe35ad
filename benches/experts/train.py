"""Trains a small mixture of experts, on which ways to quantise experts are compared. README.md has the commands and the figures.

Needs PyTorch and transformers, and the corpus of `examples/train-tiny-llama` in that example's tokenizer. The model is a Qwen3-MoE: 8 experts, 2 active,
5 layers of 256 features. It is written in f16, in Hugging Face's layout, with `training.json`.
"""

import argparse
import json
import math
import shutil
import time
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

CONTEXT = 512
WARM_UP = 100


def model(device):
    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=256, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=768,
        moe_intermediate_size=384, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, router_aux_loss_coef=0.01, output_router_logits=True,
        max_position_embeddings=CONTEXT, rope_theta=10000.0, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).to(device)


def tokens(path):
    return torch.from_numpy(__import__("numpy").fromfile(path, dtype="<u2").astype("int64"))


def loss_of(model, batch, device):
    """The cross entropy of the next tokens, and with it the loss that balances the experts."""
    with torch.autocast(device.type, torch.bfloat16):
        return model(input_ids=batch, labels=batch)


@torch.no_grad()
def perplexity(model, held_out, device):
    """Over windows of 512 tokens, each token but a window's first."""
    model.eval()
    windows = held_out[: len(held_out) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    total = 0.0
    for window in windows.split(16):
        window = window.to(device)
        logits = model(input_ids=window).logits[:, :-1].float()
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten(), reduction="sum").item()
    model.train()
    return math.exp(total / (windows.shape[0] * (CONTEXT - 1)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder of `train-tiny-llama corpus`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--max-seconds", type=float, default=150.0)
    args = parser.parse_args()
    device = torch.device(args.device)
    network = model(device)
    data, held_out = tokens(args.data / "train.bin"), tokens(args.data / "heldout.bin")
    matrices = [weight for weight in network.parameters() if weight.dim() > 1]
    others = [weight for weight in network.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    generator = torch.Generator().manual_seed(0)
    start, step, loss = time.time(), 0, None
    while (part := (time.time() - start) / args.max_seconds) < 1.0:
        # The schedule follows the time: warm-up, then a cosine to a tenth.
        rate = args.lr * min(1.0, (step + 1) / WARM_UP) * (0.1 + 0.45 * (1 + math.cos(math.pi * part)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        firsts = torch.randint(0, len(data) - CONTEXT, (args.batch, 1), generator=generator)
        batch = data[firsts + torch.arange(CONTEXT)].to(device, non_blocking=True)
        output = loss_of(network, batch, device)
        optimizer.zero_grad(set_to_none=True)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            loss = output.loss.item()
            print(f"step {step}, {time.time() - start:.0f} s: loss {loss:.4f}", flush=True)
    report = {
        "device": torch.cuda.get_device_name(0) if device.type == "cuda" else device.type, "steps": step, "tokens": step * args.batch * CONTEXT,
        "seconds": round(time.time() - start, 1), "loss": loss, "parameters": sum(weight.numel() for weight in network.parameters()),
        "heldout_perplexity": perplexity(network, held_out, device)}
    print(json.dumps(report))
    network.config.output_router_logits = False
    network.half().save_pretrained(args.out, max_shard_size="12MB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (args.data / name).exists():
            shutil.copy(args.data / name, args.out)
    (args.out / "training.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
