"""The language-model loss on labelled positions only, in chunks, its gradient computed in the forward pass.

The logits of a whole micro-batch never exist: for each chunk of labelled positions they are made, turned into the
loss and its gradient, and dropped. Since the loss is a sum, the gradient is known but for one factor, which
arrives in the backward pass (the form used by Liger-Kernel's fused linear cross entropy, arXiv:2410.10989).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from packtrain.models.sizes import LOSS_CHUNK as CHUNK


@dataclass(frozen=True)
class LogitTransform:
    """What an architecture does to ``hidden @ head.T``: a scale, then a tanh cap."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def token_losses(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor,
                 transform: LogitTransform, chunk: int = CHUNK) -> torch.Tensor:  # fmt: skip
    """Cross entropy of each labelled token, for evaluation.

    Args:
        hidden: (tokens, hidden), the final hidden states at labelled positions.
        weight: (vocabulary, hidden). bias: (vocabulary,) or None.
        targets: (tokens,) int64.

    Returns:
        (tokens,) float32, in nats.
    """
    parts = [
        _chunk_losses(h, weight, bias, t, transform)
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)


def _chunk_losses(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor,
                  transform: LogitTransform) -> torch.Tensor:  # fmt: skip
    logits = transform(F.linear(hidden, weight.to(hidden.dtype), _like(bias, hidden)).float())
    return F.cross_entropy(logits, targets, reduction="none")


def _like(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor | None:
    return tensor.to(other.dtype) if tensor is not None else None


@dataclass(frozen=True)
class NewRows:
    """Where the rows of added tokens lie in the head's table: ``count`` of them from row ``first`` on."""

    first: int
    count: int

    @property
    def slice(self) -> slice:
        return slice(self.first, self.first + self.count)

    def join(self, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The table with the new rows in it, (max(vocabulary, first + count), hidden)."""
        return torch.cat([weight[: self.first], rows.to(weight.dtype), weight[self.first + self.count :]])

    def split(self, whole: torch.Tensor, size: int) -> torch.Tensor:
        """The part of a joined table's gradient that belongs to the old rows, (size, hidden)."""
        old = torch.zeros_like(whole[:size])
        old[: self.first] = whole[: self.first]
        old[self.first + self.count :] = whole[self.first + self.count : size]
        return old


class SummedLoss(torch.autograd.Function):
    """Sum of the cross entropy over labelled tokens.

    ``SummedLoss.apply(hidden, weight, bias, rows, targets, options)``, shapes as in ``token_losses``, ``rows`` those of
    added tokens or None; returns a float32 scalar. No labelled token gives zero, with zero gradients.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                rows: torch.Tensor | None, targets: torch.Tensor, options: LossOptions) -> torch.Tensor:  # fmt: skip
        one_chunk = _compiled() if options.compiled else _loss_and_gradient
        need_hidden, need_weight, need_bias, need_rows = ctx.needs_input_grad[:4]
        table, bias = options.table(weight, rows).to(hidden.dtype), _like(bias, hidden)
        wanted = slice(None) if need_weight or options.new is None else options.new.slice
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        grad_table = torch.zeros_like(table[wanted], dtype=torch.float32) if need_weight or need_rows else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and need_bias else None
        for start in range(0, targets.shape[0], options.chunk):
            part = slice(start, start + options.chunk)
            loss, grad_logits = one_chunk(hidden[part], table, bias, targets[part], options.transform)
            total += loss
            if grad_hidden is not None:
                grad_hidden[part] = grad_logits @ table
            if grad_table is not None:
                grad_table += (grad_logits[:, wanted].t() @ hidden[part]).float()
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0).float()
        grad_weight, grad_rows = options.parts(grad_table, weight, need_weight)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias, grad_rows)
        ctx.dtypes = [None if t is None else t.dtype for t in (hidden, weight, bias, rows)]
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled = [
            None if saved is None else (saved * grad.to(saved.dtype)).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None


@dataclass(frozen=True)
class LossOptions:
    """What the loss is computed with. ``chunk``: labelled positions whose logits exist at once."""

    transform: LogitTransform = LogitTransform()
    compiled: bool = False
    new: NewRows | None = None
    chunk: int = CHUNK

    def table(self, weight: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        return weight if self.new is None or rows is None else self.new.join(weight, rows)

    def parts(
        self, gradient: torch.Tensor | None, weight: torch.Tensor, whole: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """A table's gradient as the old rows' (None unless ``whole``) and the new rows'."""
        if gradient is None or self.new is None:
            return gradient, None
        if not whole:
            return None, gradient
        return self.new.split(gradient, weight.shape[0]), gradient[self.new.slice]


@functools.cache
def _compiled() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """One kernel for what is done to the logits between two matrix products."""
    return torch.compile(_loss_and_gradient)


def _loss_and_gradient(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor,
                       transform: LogitTransform) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The summed loss of a chunk and its gradient with respect to the raw logits, in ``hidden``'s dtype."""
    raw = F.linear(hidden, weight, bias).float()
    logits = transform(raw)
    log_normalizer = logits.logsumexp(-1, keepdim=True)
    loss = (log_normalizer.squeeze(-1) - logits.gather(1, targets[:, None]).squeeze(-1)).sum()
    gradient = torch.exp(logits - log_normalizer)
    gradient.scatter_add_(1, targets[:, None], torch.full_like(targets[:, None], -1, dtype=gradient.dtype))
    if transform.softcap is not None:  # d tanh(x) = 1 - tanh(x)^2
        gradient *= 1 - (logits / transform.softcap) ** 2
    if transform.scale != 1.0:
        gradient *= transform.scale
    return loss, gradient.to(hidden.dtype)
