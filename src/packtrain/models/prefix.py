"""Learned keys and values before each block's own (prefix tuning, https://arxiv.org/abs/2101.00190).

They reach the attention function as an argument of the block, not through a key-value cache, which activation
checkpointing switches off. Positions of real tokens begin behind the prefix, as they do for peft and its cache.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Prefix:
    """Where the learned keys and values come from.

    Args:
        encoder: peft's prefix encoder, whose table has the shape (num_tokens, blocks * 2 * kv_heads * head_dim).
    """

    encoder: nn.Module
    num_tokens: int
    num_blocks: int
    kv_heads: int

    def key_values(self) -> torch.Tensor:
        """(blocks, 2, kv_heads, num_tokens, head_dim)."""
        table: torch.Tensor = self.encoder.embedding.weight  # type: ignore[assignment, union-attr]
        return table.view(self.num_tokens, self.num_blocks, 2, self.kv_heads, -1).permute(1, 2, 3, 0, 4)

    def give_to(self, blocks: list[nn.Module]) -> None:
        """Let each block take its own part of the argument ``prefix`` before its forward runs."""
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(functools.partial(_take_own, index), with_kwargs=True)


def _take_own(index: int, _block: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "prefix": kwargs["prefix"][index]}
