"""A decoder-only transformer: pre-norm, learned positions, causal attention.

This is GPT-2 (Radford et al., 2019) without biases in the linear layers. Modules are registered in
the order of their use, so backward finishes gradients in the reverse order of ``parameters()``.

Shape suffixes: B batch, T tokens, V vocabulary, D width, N heads, H width of a head.
"""
# ruff: noqa: N803, N806 - shape suffixes

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from stretto.config import Config
from stretto.errors import ConfigError


class GPTConfig(Config):
    """The ``[model]`` table of a run whose ``kind`` is ``"gpt"``."""

    kind: Literal["gpt"] = "gpt"
    vocab: int = Field(default=256, ge=2)
    """Number of different tokens; 256 for bytes."""
    context: int = Field(default=64, ge=1)
    """Maximum number of tokens in a sample."""
    blocks: int = Field(default=4, ge=1)
    """Number of transformer layers, each with attention and an MLP."""
    width: int = Field(default=128, ge=1)
    """Length of the vector of a token."""
    heads: int = Field(default=4, ge=1)
    """Attention heads; must divide ``width``."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropout."""
    tied: bool = False
    """Use the weights of the embedding for the output as well."""

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got {self.width}, {self.heads}")
        return self


class GPT(nn.Module):
    """Token and position embeddings, transformer blocks, a final layer norm, and the head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self._context = config.context
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.blocks)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        _initialise_(self, config)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return logits [B, T, V]; those at position t depend on tokens 0 to t only."""
        num_tokens = tokens_BT.shape[1]
        if num_tokens > self._context:
            raise ConfigError(
                f"a sample has {num_tokens} tokens, model.context is {self._context}; "
                f"set model.context = {num_tokens} or shorten data.context"
            )
        x_BTD = self.tokens(tokens_BT) + self.positions.weight[:num_tokens]
        x_BTD = self.blocks(self.dropout(x_BTD))
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


class Block(nn.Module):
    """One transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width, bias=False),
            nn.Dropout(config.dropout),
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the tokens after attention and MLP."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        added_BTD: Tensor = self.mlp(self.mlp_norm(x_BTD))
        return x_BTD + added_BTD


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self._heads = config.heads
        self._dropout = config.dropout
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return for each token the attention output over it and the tokens before it."""
        query_BNTH, key_BNTH, value_BNTH = (
            part_BTD.unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for part_BTD in self.query_key_value(x_BTD).chunk(3, dim=-1)
        )
        mixed_BNTH = scaled_dot_product_attention(
            query_BNTH,
            key_BNTH,
            value_BNTH,
            dropout_p=self._dropout if self.training else 0.0,
            is_causal=True,
        )
        out_BTD: Tensor = self.out(mixed_BNTH.transpose(1, 2).flatten(2))
        dropped_BTD: Tensor = self.dropout(out_BTD)
        return dropped_BTD


@torch.no_grad()
def _initialise_(model: GPT, config: GPTConfig) -> None:
    """Initialise every matrix with standard deviation 0.02, divided by sqrt(2 blocks) for some.

    These are the two matrices of each block whose outputs are added to the residual stream. Their
    variances add up along the stream.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            is_residual_output = name.endswith(("attention.out.weight", "mlp.2.weight"))
            std = 0.02 / (2 * config.blocks) ** 0.5 if is_residual_output else 0.02
            parameter.normal_(std=std)
