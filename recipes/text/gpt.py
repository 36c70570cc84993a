"""``GPT``: a small decoder-only transformer, as GPT-2 (Radford et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unitrain import BatchGroup, ConfigError

_INIT_STD = 0.02


class GPT(nn.Module):
    """A causal language model: predicts each token from those before it.

    Args:
        vocabulary: number of different tokens.
        context: most tokens that a prediction can depend on.
        layers: number of blocks.
        width: size of a token's vector between the blocks.
        heads: attention heads of a block; a divisor of the width.
        dropout: probability of dropping a number after the embedding, the attention and the MLP.

    Raises:
        ConfigError: the width is not a multiple of the number of heads.
    """

    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"the width is {width}, but must be a multiple of the number of heads, {heads}.")
        self.context: int = context
        self.tokens: nn.Embedding = nn.Embedding(vocabulary, width)
        self.positions: nn.Embedding = nn.Embedding(context, width)
        self.dropout: nn.Dropout = nn.Dropout(dropout)
        self.blocks: nn.ModuleList = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm: nn.LayerNorm = nn.LayerNorm(width)
        self.head: nn.Linear = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight  # tied: a token has one vector, read and written
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # What is added to the residual stream is smaller, so that its variance does not grow with the depth.
                scale = math.sqrt(2 * layers) if name.endswith(".out.weight") else 1.0
                nn.init.normal_(parameter, std=_INIT_STD / scale)

    def forward(self, tokens: Tensor, group: BatchGroup | None = None) -> Tensor:
        """Return the logits of each next token (rows, length, vocabulary) for tokens (rows, length).

        With a group of ranks, which all pass the same tokens, each computes and returns the logits of its part of them.
        """
        places, divided = torch.arange(tokens.shape[1], device=tokens.device), None
        if group is not None and group.size > 1:
            tokens, places, divided = group.part(tokens, 1), group.part(places, 0), _Divided(group, tokens.shape[1])
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x, divided)
        return cast(Tensor, self.head(self.norm(x)))


class Block(nn.Module):
    """Causal self-attention and an MLP, each on normalised inputs and added to them."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm: nn.LayerNorm = nn.LayerNorm(width)
        self.attention: _Attention = _Attention(width, heads, dropout)
        self.mlp_norm: nn.LayerNorm = nn.LayerNorm(width)
        self.mlp: _MLP = _MLP(width, dropout)

    def forward(self, x: Tensor, divided: _Divided | None) -> Tensor:
        """Return tokens (rows, length, width) that have seen those before them, also on other ranks of a group."""
        x = x + self.attention(self.attention_norm(x), divided)
        return cast(Tensor, x + self.mlp(self.mlp_norm(x)))


class _Divided(NamedTuple):
    """How a group of ranks divides tokens (rows, length, …): the text, but for attention, which needs all of it, heads.

    So the ranks have equal work, although at the end of a text there is more to see than at its beginning.
    """

    group: BatchGroup
    length: int
    """Of the whole text."""

    # Both return copies, or the whole would be kept for the backward.

    def by_heads(self, split: Tensor) -> Tensor:
        """Return some heads of the whole text, given all heads (rows, length, 3, heads, width) of a part of it."""
        return self.group.part(self.group.gather(split, 1, self.length), 3).clone()

    def by_text(self, mixed: Tensor, heads: int) -> Tensor:
        """Return all heads of this rank's part of the text, given some (rows, length, heads, width) of the whole."""
        return self.group.part(self.group.gather(mixed, 2, heads), 1).clone()


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads: int = heads
        self.dropout: float = dropout
        self.queries_keys_values: nn.Linear = nn.Linear(width, 3 * width)
        self.out: nn.Linear = nn.Linear(width, width)

    def forward(self, x: Tensor, divided: _Divided | None) -> Tensor:
        rows, length, width = x.shape
        split = self.queries_keys_values(x).view(rows, length, 3, self.heads, width // self.heads)
        if divided is not None:
            split = divided.by_heads(split)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True).transpose(1, 2)
        if divided is not None:
            mixed = divided.by_text(mixed, self.heads)
        mixed = self.out(mixed.reshape(rows, length, width))
        return F.dropout(mixed, self.dropout, self.training)


class _MLP(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.hidden: nn.Linear = nn.Linear(width, 4 * width)
        self.out: nn.Linear = nn.Linear(4 * width, width)
        self.dropout: nn.Dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.dropout(self.out(F.gelu(self.hidden(x)))))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return a model's parameters for an optimizer: matrices decay, biases and norms don't."""
    decaying = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


@torch.no_grad()
def generate(model: GPT, tokens: Sequence[int], length: int, temperature: float = 0.8, seed: int = 0) -> list[int]:
    """Return ``length`` tokens drawn one by one after the given ones, the same for the same seed.

    Args:
        model: a model, which is put in eval mode.
        tokens: what comes before; at least one token.
        length: number of tokens to draw.
        temperature: divides the logits: below 1, likely tokens become more likely.
        seed: seeds the draws.
    """
    model.eval()
    device = model.tokens.weight.device
    generator = torch.Generator().manual_seed(seed)
    drawn = list(tokens)
    for _ in range(length):
        logits = model(torch.tensor([drawn[-model.context :]], device=device))[0, -1].double().cpu()
        drawn.append(int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)))
    return drawn[len(tokens) :]
