"""A small GPT: token embedding, causal blocks with rotary positions, the embedding again as output layer.

Shapes in the comments: B rows, T tokens a row, D width, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """The size of a model. ``width`` must be an even multiple of ``heads``: rotary positions turn pairs."""

    vocab_size: int
    width: int = 128
    layers: int = 4
    heads: int = 4
    dropout: float = 0.1


def rotary_angles(position_ids: Tensor, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle of each position, (B, 1, T, head_width / 2).

    Angles, unlike a table of learned positions, know no longest document.
    """
    half = head_width // 2
    frequency = 10_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = position_ids[:, None, :, None].float() * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of ``x``, (B, H, T, head_width), by the angle of its position."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def same_document(position_ids: Tensor) -> Tensor:
    """Which tokens a token may look at, (B, 1, T, T): earlier ones (and itself) of its own document.

    A packed row holds several documents; each begins where the positions begin again at 0.
    """
    document = (position_ids == 0).cumsum(dim=1)
    same = document[:, :, None] == document[:, None, :]
    return torch.tril(same)[:, None]


class Block(nn.Module):
    """Attention, then a two-layer network; each reads a normalised copy and adds to what passes through."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D / H)
        seen = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, attn_mask=mask)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(rows, tokens, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """``model(input_ids, position_ids)`` -> logits, (B, T, vocab_size)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.dropout(self.embedding(input_ids))
        cos, sin = rotary_angles(position_ids, self.config.width // self.config.heads)
        mask = same_document(position_ids)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        # Weight tying by use, not by a second name for one parameter: a checkpoint holds it once.
        return F.linear(self.norm(x), self.embedding.weight)
