"""Peak memory of a fit of a deep transformer with a regression head, against a bare pass.

On an accelerator the model has a billion weights in bfloat16, else it is a small one. Run as a
module (``python -m benchmarks.deep_model width layers fit threads``) it makes one pass, or one fit,
over two batches and prints its peak.
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
BATCH = 16
TOKENS = 512
VOCABULARY = 1000


class Block(nn.Module):
    """Attention and a two-layer network, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feedforward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) -> the same."""
        heads = max(1, x.shape[-1] // 64)
        mixed = self.queries_keys_values(self.attention_norm(x))
        # (N, T, 3 width) -> (N, heads, T, 3, width / heads), then three along the fourth axis
        query, key, value = mixed.unflatten(-1, (3, heads, -1)).movedim(-2, 1).unbind(3)
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(attended.movedim(1, 2).flatten(2))
        hidden = nn.functional.gelu(self.up(self.feedforward_norm(x)))
        y: Tensor = x + self.down(hidden)
        return y


class Transformer(nn.Module):
    """Tokens -> one number."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, T) -> (N, 1)."""
        y: Tensor = self.head(self.blocks(self.embedding(tokens)).mean(1))
        return y


def run(*, quick: bool = False) -> list[Row]:
    """The two peaks, each in a process of its own."""
    if quick:
        width, layers = 64, 2
    elif CUDA:
        width, layers = 2048, 20
    else:
        width, layers = 256, 16
    bare = measured_apart("benchmarks.deep_model", width, layers, 0, unfragmented=True)
    fit = measured_apart("benchmarks.deep_model", width, layers, 1, unfragmented=True)
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
    """Two batches of random tokens and targets."""
    for _ in range(2):
        tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), device=device)
        yield tokens, torch.randn(BATCH, 1, device=device, dtype=dtype)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
