"""Our decoder, head, loss and attention against transformers' own, for many architectures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tiny import SIZES
from transformers import AutoConfig, AutoModelForCausalLM

from packtrain.models.attention import MASKED, register
from packtrain.models.causal_lm import CausalLMWithLoss
from packtrain.models.meta import meta_model, rebuild_buffers
from packtrain.models.plan import find_plan

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64, "rope_theta": 1e4,
        },
    },
    "qwen2": {}, "qwen3": {}, "phi3": {},
    "mistral, window of 8": {"sliding_window": 8},
    "gemma": {}, "gemma2": {}, "gemma3_text": {},
    "granite": {"logits_scaling": 3.0}, "cohere": {"logit_scale": 0.5},
}  # fmt: skip
SEQ, FIRST = 40, 15
register()


@pytest.fixture(
    params=[(s, t) for s in SHAPES for t in (False, True)], ids=lambda p: f"{p[0]}, {'tied' if p[1] else 'untied'}"
)
def pair(request: pytest.FixtureRequest) -> tuple[Any, CausalLMWithLoss]:
    """A reference model with eager attention, and ours built on meta with the same weights."""
    shape, tied = request.param
    changes = {**SIZES, **SHAPES[shape], "vocab_size": 300, "tie_word_embeddings": tied}
    config = AutoConfig.for_model(shape.split(",")[0], **changes)
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").train()
    model = meta_model(config, torch.float32, MASKED)
    assert all(p.is_meta for p in model.parameters()), "a real parameter before the weights"
    plan = find_plan(model, config)
    model.to_empty(device="cpu")
    if plan.tied:
        model.tie_weights()  # type: ignore[operator]
    rebuild_buffers(model)
    model.load_state_dict(reference.state_dict(), strict=True)
    return reference, CausalLMWithLoss(model, plan, MASKED).train()


def labels(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """All positions of rows of equal length that have a next token."""
    batch, seq = ids.shape
    positions = torch.tensor([i for i in range(batch * seq) if i % seq != seq - 1])
    return {"label_positions": positions, "targets": ids.flatten()[positions + 1]}


def places(batch: int, seq: int) -> torch.Tensor:
    return torch.arange(seq)[None].expand(batch, seq)


def test_loss_and_gradients(pair: tuple[Any, CausalLMWithLoss]) -> None:
    reference, ours = pair
    ids = torch.randint(3, 300, (2, SEQ), generator=torch.Generator().manual_seed(1))
    wanted = reference(input_ids=ids, labels=ids).loss
    wanted.backward()
    inputs = {"input_ids": ids, "position_ids": places(2, SEQ), **labels(ids)}
    loss = ours(**inputs) / len(inputs["targets"])
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert ours(**inputs, per_token=True).mean().item() == pytest.approx(wanted.item(), rel=1e-6)
    for (name, p), (_, q) in zip(ours.base.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_packed_rows_do_not_see_each_other(pair: tuple[Any, CausalLMWithLoss]) -> None:
    _, ours = pair
    ids = torch.randint(3, 300, (1, SEQ), generator=torch.Generator().manual_seed(2))
    first, second = ids[:, :FIRST].contiguous(), ids[:, FIRST:].contiguous()
    alone = [
        ours(input_ids=part, position_ids=places(1, part.shape[1]), **labels(part), per_token=True)
        for part in (first, second)
    ]
    document = torch.cat([torch.zeros(1, FIRST), torch.ones(1, SEQ - FIRST)], 1).long()
    position = torch.cat([places(1, FIRST), places(1, SEQ - FIRST)], 1)
    packed = ours(input_ids=ids, position_ids=position, document_ids=document, **labels(ids), per_token=True)
    keep = torch.tensor([i != FIRST - 1 for i in range(SEQ - 1)])  # the step from one row to the next is no label
    torch.testing.assert_close(packed[keep], torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_no_label_gives_zero_loss_and_gradients() -> None:
    config = AutoConfig.for_model("llama", vocab_size=300, **SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=MASKED)
    ours = CausalLMWithLoss(model, find_plan(model, config), MASKED)
    none = torch.empty(0, dtype=torch.long)
    ids = torch.zeros(1, 8, dtype=torch.long)
    loss = ours(input_ids=ids, position_ids=places(1, 8), label_positions=none, targets=none)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_padding_and_a_masked_row_change_nothing() -> None:
    config = AutoConfig.for_model("llama", vocab_size=300, **SIZES)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=MASKED)
    ours = CausalLMWithLoss(model, find_plan(model, config), MASKED)
    ids = torch.randint(3, 300, (1, 20))
    wanted = ours(input_ids=ids, position_ids=places(1, 20), **labels(ids))
    padded = torch.cat([ids, torch.zeros(1, 12, dtype=torch.long)], 1)
    other = torch.randint(3, 300, (1, 32))
    found = ours(input_ids=torch.cat([padded, other]), position_ids=places(2, 32), **labels(ids))
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
