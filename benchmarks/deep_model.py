"""Peak memory of a fit of a deep transformer with a regression head, against a bare pass.

On an accelerator a model of a billion weights in bfloat16, else a small one. Run as a module of its
own (``python -m benchmarks.deep_model width layers fit threads``) it makes one pass, or one fit, over
two batches and prints its peak.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import rigidities as rg
from benchmarks.frame.apart import measured_apart, peak_bytes
from benchmarks.frame.results import Row, at_most

CUDA = torch.cuda.is_available()
BATCH, TOKENS = 16, 512


class Block(nn.Module):
    """Attention and a two-layer net, each added to what enters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) -> the same."""
        heads = max(1, x.shape[-1] // 64)
        parts = self.mixed(self.norms[0](x)).unflatten(-1, (3, heads, -1)).movedim(-2, 1).unbind(3)
        x = x + self.out(
            nn.functional.scaled_dot_product_attention(*parts).movedim(1, 2).flatten(2)
        )
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return y


class Transformer(nn.Module):
    """Tokens -> one number."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, T) -> (N, 1)."""
        y: Tensor = self.head(self.blocks(self.embedding(tokens)).mean(1))
        return y


def run(*, quick: bool = False) -> list[Row]:
    """The two peaks, each in a process of its own."""
    width, layers = (64, 2) if quick else (2048, 20) if CUDA else (256, 16)
    module, sizes = "benchmarks.deep_model", (width, layers)
    bare, fit = (measured_apart(module, *sizes, n, unfragmented=True) for n in (0, 1))
    size = f"{bare['weights'] / 1e6:,.0f} million weights"
    return [
        at_most(
            f"peak memory of a fit, transformer of {size}, {BATCH} x {TOKENS} tokens",
            fit["peak"] / bare["peak"],
            1.1,
            "of a bare pass",
            bytes=fit["peak"],
            bytes_bare=bare["peak"],
        )
    ]


def main(width: int, layers: int, fit: int, threads: int) -> None:
    """One pass or one fit."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    device, dtype = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
    with torch.device(device):
        model = Transformer(width, layers).to(dtype).eval()
    if fit:
        rg.LastLayerRigidity(model).fit(batches(device, dtype))
    else:
        with torch.no_grad():
            for tokens, _ in batches(device, dtype):
                model(tokens)
    peak = torch.cuda.max_memory_allocated() if CUDA else peak_bytes()
    weights = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"peak": peak, "weights": weights}))


def batches(device: str, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Two, of random tokens and targets."""
    for _ in range(2):
        tokens = torch.randint(1000, (BATCH, TOKENS), device=device)
        yield tokens, torch.randn(BATCH, 1, device=device, dtype=dtype)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
