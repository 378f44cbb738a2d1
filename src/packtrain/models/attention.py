"""Attention for rows and packed rows. A mask is by position: documents are told apart by where they lie.

Registered under names of our own with transformers' attention interface, so a model is switched by its config and
no library is changed. Right-padded rows need no mask at all: under causal attention a real token never sees the
padding behind it. Packed rows carry the mask (SDPA) or the documents' boundaries (variable-length kernels).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

MASKED, VARLEN = "packtrain_masked", "packtrain_varlen"


def document_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """The mask under which a token sees its own document up to itself.

    Args:
        document_ids: (batch, seq) int, equal within a document; padding has an id of its own.

    Returns:
        (batch, 1, seq, seq) bool, True where the query (axis 2) may see the key (axis 3).
    """
    seq = document_ids.shape[1]
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return same & torch.ones(seq, seq, dtype=torch.bool, device=document_ids.device).tril()


def causal_sentinel(device: torch.device) -> torch.Tensor:
    """A (1, 1, 1, 1) mask that stands for plain causal attention.

    transformers hands a four-dimensional mask to the attention function untouched, and builds one of its own
    (with a host synchronisation) where none is given.
    """
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def _windowed(mask: torch.Tensor | None, seq: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Narrow a mask (None: causal) to a sliding window of ``window`` tokens, the query's own included."""
    if window is None or window >= seq:
        return mask
    ones = torch.ones(seq, seq, dtype=torch.bool, device=device)
    near = ones.triu(1 - window)
    return mask & near if mask is not None else (ones.tril() & near)[None, None]


def sdpa_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    prefix: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention of torch, masked by position.

    Args:
        query: (batch, heads, seq, head_dim).
        key, value: (batch, kv_heads, seq, head_dim).
        attention_mask: (batch, 1, seq, seq) bool, or the causal sentinel, or None (causal).
        prefix: (2, kv_heads, prefix, head_dim), keys and values that every query sees.

    Returns:
        (batch, seq, heads, head_dim), and None for the weights.
    """
    seq = query.shape[2]
    mask = None if attention_mask is None or attention_mask.shape[-1] != seq else attention_mask
    mask = _windowed(mask, seq, sliding_window, query.device)
    if prefix is not None:
        key, value, mask = _behind(prefix, key, value, mask)
    if softcap is not None:
        out = _softcapped(query, key, value, mask, scaling, softcap, dropout)
    else:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _behind(
    prefix: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and mask with the prefix before them, which no mask hides."""
    batch, seq, length = key.shape[0], key.shape[2], prefix.shape[2]
    own = prefix.to(key.dtype).unsqueeze(1).expand(-1, batch, -1, -1, -1)
    if mask is None:
        mask = torch.ones(1, 1, seq, seq, dtype=torch.bool, device=key.device).tril()
    seen = mask.new_ones(*mask.shape[:-1], length)
    return torch.cat([own[0], key], 2), torch.cat([own[1], value], 2), torch.cat([seen, mask], -1)


def _softcapped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    scaling: float | None, softcap: float, dropout: float,
) -> torch.Tensor:  # fmt: skip
    """Attention with tanh-capped scores (Gemma 2, https://arxiv.org/abs/2408.00118, section 2)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    scores = torch.tanh(query @ key.transpose(-1, -2) * (scale / softcap)) * softcap
    seq = query.shape[2]
    allowed = mask if mask is not None else torch.ones(seq, seq, dtype=torch.bool, device=query.device).tril()
    weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).float().softmax(-1).to(query.dtype)
    return F.dropout(weights, dropout) @ value


def varlen_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over documents laid end to end, by torch's variable-length kernel (CUDA).

    Args:
        query, key, value: as for ``sdpa_attention``.
        cu_seqlens: (documents + 1,) int32, where documents start in the flattened (batch * seq) tokens.
        max_seqlen: tokens of the longest document.
    """
    if cu_seqlens is None or max_seqlen is None:  # rows that are not packed
        return sdpa_attention(module, query, key, value, attention_mask, scaling, **kwargs)
    from torch.nn.attention.varlen import varlen_attn

    batch, heads, seq, head_dim = query.shape
    groups = heads // key.shape[1]
    if groups > 1:  # the grouped form of the kernel came after torch 2.11
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    # Rotary tables and norms may have widened them under autocast; SDPA narrows them by itself.
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    q, k, v = (t.transpose(1, 2).reshape(batch * seq, heads, head_dim).to(dtype) for t in (query, key, value))
    out: Any = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scaling, window_size=(-1, 0)
    )  # fmt: skip
    return out.view(batch, seq, heads, head_dim), None


def register() -> None:
    """Make the two functions known to transformers under their names (idempotent)."""
    from transformers import AttentionInterface

    AttentionInterface.register(MASKED, sdpa_attention)
    AttentionInterface.register(VARLEN, varlen_attention)


def prefer_fast_kernels() -> None:
    """On Hopper GPUs cuDNN's attention outruns FlashAttention-2, which torch would take first (docs/performance.md)."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
        torch.backends.cuda.enable_flash_sdp(False)


def choose(packing: bool, device: torch.device, config: Any, prefix: bool) -> str:
    """The attention for a run: variable-length kernels for packed rows on a GPU, SDPA for everything else.

    Args:
        prefix: there are learned keys that all documents of a packed row see.
    """
    capped = getattr(config, "sliding_window", None) or getattr(config, "attn_logit_softcapping", None)
    return VARLEN if packing and device.type == "cuda" and not capped and not prefix else MASKED
