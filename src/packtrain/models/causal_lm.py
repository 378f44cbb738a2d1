"""The module that is trained: a causal language model of transformers whose forward pass returns the loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from packtrain.models.attention import VARLEN, causal_sentinel, document_mask
from packtrain.models.loss import LogitTransform, LossOptions, NewRows, SummedLoss, token_losses
from packtrain.models.names import NEW_ROWS, original_names
from packtrain.models.plan import ModelPlan
from packtrain.models.prefix import Prefix


class CausalLMWithLoss(nn.Module):
    """Runs decoder and head, the head on labelled positions only.

    Args:
        model: what is saved in the end: the transformers model, or the peft model around it.
        plan: where the transformers model keeps its parts.
        attention: the name of the attention function the model's config was given.
        compiled: compile the arithmetic of the loss.
        names: the name of each module in the weight files (``original_names``); None: as in ``model``.
        prefix: learned keys and values before each block's own.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ModelPlan,
        attention: str,
        compiled: bool = False,
        names: dict[nn.Module, str] | None = None,
        prefix: Prefix | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        used = self.base.config._attn_implementation  # type: ignore[union-attr]
        if used != attention:  # another one would take our stand-in for a causal mask at its word
            raise ValueError(f"the model attends by {used!r}, not by {attention!r}")
        self.plan = plan
        self.attention = attention
        self.names = names or original_names(self.base)
        self.prefix = prefix
        if prefix is not None:
            prefix.give_to(self.blocks())
        transform = LogitTransform(plan.logit_scale, plan.logit_softcap)
        self.options = LossOptions(transform, compiled, self._new_rows())

    @property
    def base(self) -> nn.Module:
        """The transformers model, without peft around it."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model  # type: ignore[operator]

    def blocks(self) -> list[nn.Module]:
        return list(self.base.get_submodule(self.plan.blocks).children())

    def _new_rows(self) -> NewRows | None:
        head = self.base.get_submodule(self.plan.head)
        rows = getattr(head, NEW_ROWS, None)
        return None if rows is None else NewRows(head.first_new, len(rows))  # type: ignore[arg-type]

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        label_positions: torch.Tensor,
        targets: torch.Tensor,
        document_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        per_token: bool = False,
    ) -> torch.Tensor:
        """The summed loss, or each token's loss.

        Args:
            input_ids, position_ids: (batch, seq) int64.
            label_positions: (tokens,) int64, indices into the flattened (batch * seq) positions whose next token
                is learned. targets: (tokens,) int64, those next tokens.
            document_ids: (batch, seq), given where rows are packed. cu_seqlens, max_seqlen: the same documents as
                boundaries, for variable-length kernels.

        Returns:
            A float32 scalar in nats, or (tokens,) float32 where ``per_token``.
        """
        hidden = self._decode(input_ids, position_ids, document_ids, cu_seqlens, max_seqlen)
        hidden = hidden.flatten(0, 1).index_select(0, label_positions)
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):
            hidden = hidden.to(torch.get_autocast_dtype(kind))
        head = self.base.get_submodule(self.plan.head)
        weight, bias, rows = head.weight, getattr(head, "bias", None), getattr(head, NEW_ROWS, None)
        with torch.autocast(kind, enabled=False):
            if per_token:
                table = self.options.table(weight, rows)  # type: ignore[arg-type]
                return token_losses(hidden, table, bias, targets, self.options.transform)
            return SummedLoss.apply(hidden, weight, bias, rows, targets, self.options)

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The logits of plain rows, (batch, seq, vocabulary): for comparisons, not for training.

        Args:
            input_ids: (batch, seq) int64.
        """
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None].expand_as(input_ids)
        hidden = self._decode(input_ids, positions, None, None, None)
        head = self.base.get_submodule(self.plan.head)
        table = self.options.table(head.weight, getattr(head, NEW_ROWS, None))  # type: ignore[arg-type]
        made = F.linear(hidden, table.to(hidden.dtype), getattr(head, "bias", None))
        return self.options.transform(made)

    def _decode(self, input_ids: torch.Tensor, position_ids: torch.Tensor, document_ids: torch.Tensor | None,
                cu_seqlens: torch.Tensor | None, max_seqlen: int | None) -> torch.Tensor:  # fmt: skip
        decoder = self.base.get_submodule(self.plan.decoder)
        extra: dict[str, Any] = {}
        if self.prefix is not None:
            extra["prefix"] = self.prefix.key_values()
            position_ids = position_ids + self.prefix.num_tokens
        if document_ids is None:
            mask = causal_sentinel(input_ids.device)
        elif self.attention == VARLEN:
            mask = causal_sentinel(input_ids.device)
            extra |= {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        else:
            mask = document_mask(document_ids)
        out = decoder(input_ids=input_ids, position_ids=position_ids, attention_mask=mask, use_cache=False, **extra)
        return out[0]
