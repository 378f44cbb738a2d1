"""The loss of a plain transformers model, row by row: no packing, no padding, the model's own attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from packtrain.data.store import TokenStore


def mean_loss(model: Any, rows: TokenStore) -> float:
    """Mean cross entropy in nats over all labelled tokens."""
    import torch
    import torch.nn.functional as F

    total, count = 0.0, 0
    with torch.inference_mode():
        for index in range(len(rows)):
            ids = torch.from_numpy(rows.tokens(index).astype(np.int64))[None].to(model.device)
            learned = torch.from_numpy(np.flatnonzero(rows.labelled(index)[1:])).to(model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, learned].float()
            total += float(F.cross_entropy(logits, ids[0, learned + 1], reduction="sum"))
            count += len(learned)
    return total / max(count, 1)
