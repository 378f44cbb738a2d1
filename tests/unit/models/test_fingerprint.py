"""Two models of one shape are told apart without reading them whole."""

from __future__ import annotations

from pathlib import Path

from tests.tiny import make_model

from packtrain.models.files import WeightFiles


def test_other_weights_of_the_same_shape_have_another_fingerprint(tmp_path: Path) -> None:
    file = make_model(tmp_path / "model") / "model.safetensors"
    before = WeightFiles.open(file.parent).fingerprint
    assert WeightFiles.open(file.parent).fingerprint == before
    content = bytearray(file.read_bytes())
    for i in range(len(content) // 2, len(content)):
        content[i] ^= 1
    file.write_bytes(bytes(content))
    assert WeightFiles.open(file.parent).fingerprint != before
