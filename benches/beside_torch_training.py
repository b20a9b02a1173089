#!/usr/bin/env python3
"""Times training steps of GPT-2 (124M) with PyTorch and with Ridge, alternately, on the same CPU.

    python3 benches/beside_torch_training.py [--ridge target/release/examples/training_step] [--sequences 1]
        [--context 512] [--threads 2] [--steps 5] [--rounds 3] [--dtypes f32,bf16] [--compile]

A step is forward, backward and AdamW (betas 0.9 and 0.95, weight decay 0.1) on random weights and tokens, dropout 0,
vocabulary 50304. In bf16, PyTorch runs under `autocast` on f32 weights, and Ridge on bf16 copies of f32 weights, which
the optimiser writes. PyTorch's optimiser is `torch.optim.AdamW(fused=True)` and its attention
`scaled_dot_product_attention`; `--compile` adds `torch.compile`. Each side has `--threads` threads. Every process reports
its best step; the table has the best of all rounds.

Ridge's binary: `cargo build --release -p ridge-models --example training_step`.
"""

import argparse
import os
import re
import subprocess
import sys
import time

VOCABULARY = 50304
LAYERS, WIDTH, HEADS = 12, 768, 12


def model(context):
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            rows, tokens, _ = x.shape
            q, k, v = self.qkv(self.norm_1(x)).split(WIDTH, dim=2)
            q, k, v = (t.view(rows, tokens, HEADS, WIDTH // HEADS).transpose(1, 2) for t in (q, k, v))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(rows, tokens, WIDTH))
            return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))

    class Gpt2(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(1024, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.LayerNorm(WIDTH)
            self.apply(self.start)

        def start(self, module):
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

        def forward(self, ids, targets):
            x = self.tokens(ids) + self.positions(torch.arange(context))
            for block in self.blocks:
                x = block(x)
            logits = functional.linear(self.norm(x), self.tokens.weight)
            return functional.cross_entropy(logits.view(-1, VOCABULARY).float(), targets.view(-1))

    return Gpt2()


def time_torch(a):
    """Prints the milliseconds of each step."""
    import torch

    torch.set_num_threads(a.threads)
    torch.manual_seed(1)
    net = model(a.context)
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ids = torch.randint(0, VOCABULARY, (a.sequences, a.context))
    targets = torch.randint(0, VOCABULARY, (a.sequences, a.context))
    run = torch.compile(net) if a.compile else net
    for _ in range(a.steps):
        begin = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=a.dtype == "bf16"):
            loss = run(ids, targets)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        print(f"loss {loss.item():.4f}, {(time.perf_counter() - begin) * 1e3:.1f} ms", flush=True)


def best(command, environment):
    out = subprocess.run(command, env=environment, capture_output=True, text=True)
    if out.returncode != 0:
        sys.exit(f"{' '.join(command)}: {out.stderr[-2000:]}")
    return min(float(ms) for ms in re.findall(r"loss [-\d.]+, ([\d.]+) ms", out.stdout))


def compare(a):
    environment = {**os.environ, "OMP_NUM_THREADS": str(a.threads)}
    shape = ["--sequences", str(a.sequences), "--context", str(a.context), "--steps", str(a.steps)]
    print(f"{a.sequences} x {a.context} tokens, {a.threads} threads, best of {a.rounds} x {a.steps} steps")
    for dtype in a.dtypes.split(","):
        torch_ms, ridge_ms = [], []
        torch_command = [sys.executable, __file__, "--torch", "--dtype", dtype, "--threads", str(a.threads), *shape]
        ridge_command = [a.ridge, "gpt2", "--dtype", dtype, "--threads", str(a.threads), *shape]
        for _ in range(a.rounds):
            torch_ms.append(best(torch_command + (["--compile"] if a.compile else []), environment))
            ridge_ms.append(best(ridge_command, environment))
        of, beside = min(torch_ms), min(ridge_ms)
        rounds = " ".join(f"{t / r:.2f}" for t, r in zip(torch_ms, ridge_ms))
        print(f"{dtype}: torch {of:.0f} ms, ridge {beside:.0f} ms, {of / beside:.2f} times (rounds: {rounds})", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ridge", default="target/release/examples/training_step")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", default="f32,bf16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--torch", action="store_true", help="only time PyTorch, in this process")
    parser.add_argument("--dtype", default="f32", help="with --torch")
    a = parser.parse_args()
    time_torch(a) if a.torch else compare(a)


if __name__ == "__main__":
    main()
