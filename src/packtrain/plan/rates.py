"""How fast a machine's parts are: published figures by a GPU's name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from packtrain.config.facts import Rates

_MATMUL, _ATTENTION, _MEMORY, _LINK = 0.70, 0.48, 0.83, 0.75
"""Shares of the published figures that a step reaches, as measured on an H200 (docs/performance.md)."""
_SEEN = 0.99 * 2**30
"""Bytes that a driver shows for each gigabyte of a name: an H200 of 141 GB shows 139.8 GiB, an A100 of 80 GB 79.3."""
NETWORK = 25e9
"""Bytes/s between nodes where nothing is known of them: 200 Gbit/s."""
_HOST, _HOST_MEMORY = 40e9, 124e9


@dataclass(frozen=True)
class _Card:
    """Published: dense 16-bit FLOP/s with fp32 sums, bytes/s of memory and of the links to other cards (one way), and
    the memory in the unit of its name; whether it computes in bf16."""

    name: str
    flops: float
    memory: float
    link: float
    gigabytes: int
    bf16: bool = True


# The makers' data sheets. The first whose name is part of the driver's name counts.
_CARDS = (
    _Card("B200", 2250e12, 8.0e12, 900e9, 180),
    _Card("GH200", 989e12, 4.8e12, 450e9, 141),
    _Card("H200", 989e12, 4.8e12, 450e9, 141),
    _Card("H100 PCIe", 756e12, 2.0e12, 64e9, 80),
    _Card("H100 NVL", 835e12, 3.9e12, 300e9, 94),
    _Card("H100", 989e12, 3.35e12, 450e9, 80),
    _Card("H800", 989e12, 3.35e12, 200e9, 80),
    _Card("H20", 148e12, 4.0e12, 450e9, 96),
    _Card("A100-SXM4-80GB", 312e12, 2.04e12, 300e9, 80),
    _Card("A100 80GB PCIe", 312e12, 1.94e12, 32e9, 80),
    _Card("A100", 312e12, 1.56e12, 300e9, 40),
    _Card("A800", 312e12, 2.04e12, 200e9, 80),
    _Card("L40S", 362e12, 0.864e12, 32e9, 48),
    _Card("L40", 181e12, 0.864e12, 32e9, 48),
    _Card("L4", 121e12, 0.3e12, 32e9, 24),
    _Card("A6000", 155e12, 0.768e12, 56e9, 48),
    _Card("RTX 5090", 209e12, 1.79e12, 64e9, 32),
    _Card("RTX 4090", 165e12, 1.01e12, 32e9, 24),
    _Card("RTX 3090", 71e12, 0.936e12, 56e9, 24),
    _Card("A10", 125e12, 0.6e12, 32e9, 24),
    _Card("V100", 125e12, 0.9e12, 150e9, 32, bf16=False),
    _Card("T4", 65e12, 0.32e12, 16e9, 16, bf16=False),
)


def published(gpu: str) -> Rates | None:
    """The rates of a GPU by the driver's name for it; None: not in the table."""
    card = _card(gpu)
    if card is None:
        return None
    return Rates(
        matmul=card.flops * _MATMUL,
        attention=card.flops * _ATTENTION,
        memory=card.memory * _MEMORY,
        link=card.link * _LINK,
        network=NETWORK,
        host=_HOST,
        host_memory=_HOST_MEMORY,
        source=f"published figures of the {card.name}, at the shares of them that an H200 reached",
    )


def peak_flops(gpu: str) -> float | None:
    """Published dense 16-bit FLOP/s of a GPU by its name, what MFU is quoted of; None: not in the table."""
    card = _card(gpu)
    return card.flops if card else None


def published_memory(gpu: str) -> int | None:
    """Bytes of a GPU by its name, about as its driver counts them; None: not in the table."""
    card = _card(gpu)
    return round(card.gigabytes * _SEEN) if card else None


def has_bf16(gpu: str) -> bool:
    """Whether a GPU of this name computes in bf16; one that is not in the table is taken for a new one."""
    card = _card(gpu)
    return card is None or card.bf16


def known_gpus() -> list[str]:
    """The names in the table."""
    return [card.name for card in _CARDS]


def _card(gpu: str) -> _Card | None:
    """The first whose name is in ``gpu``; a digit after it makes another name: an L4 is no L40."""
    return next((card for card in _CARDS if re.search(rf"(?<!\w){card.name}(?!\d)", gpu, re.IGNORECASE)), None)
