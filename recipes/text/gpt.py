"""``GPT``: a small decoder-only transformer, as GPT-2 (Radford et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unitrain import ConfigError

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
        self.blocks: nn.Sequential = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm: nn.LayerNorm = nn.LayerNorm(width)
        self.head: nn.Linear = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight  # tied: a token has one vector, read and written
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # What is added to the residual stream is smaller, so that its variance does not grow with the depth.
                scale = math.sqrt(2 * layers) if name.endswith(".out.weight") else 1.0
                nn.init.normal_(parameter, std=_INIT_STD / scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next token (rows, length, vocabulary) for tokens (rows, length)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        return cast(Tensor, self.head(self.norm(self.blocks(x))))


class Block(nn.Module):
    """Causal self-attention and an MLP, each on normalised inputs and added to them."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm: nn.LayerNorm = nn.LayerNorm(width)
        self.attention: _Attention = _Attention(width, heads, dropout)
        self.mlp_norm: nn.LayerNorm = nn.LayerNorm(width)
        self.mlp: _MLP = _MLP(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens (rows, length, width) that have seen those before them."""
        x = x + self.attention(self.attention_norm(x))
        return cast(Tensor, x + self.mlp(self.mlp_norm(x)))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads: int = heads
        self.dropout: float = dropout
        self.queries_keys_values: nn.Linear = nn.Linear(width, 3 * width)
        self.out: nn.Linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        split = self.queries_keys_values(x).view(rows, length, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        mixed = self.out(mixed.transpose(1, 2).reshape(rows, length, width))
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
