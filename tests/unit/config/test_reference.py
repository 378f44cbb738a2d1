from __future__ import annotations

from packtrain.config.reference import as_markdown, reference
from packtrain.config.schema import Recipe


def test_every_setting_has_a_row_and_a_description() -> None:
    rows = {(setting.section, setting.key): setting for part in reference() for setting in part.settings}
    for section, field in Recipe.model_fields.items():
        for key in field.annotation.model_fields:  # type: ignore[union-attr]
            assert rows[section, key].description and rows[section, key].allowed


def test_bounds_choices_and_defaults() -> None:
    rows = {f"{s.section}.{s.key}": s for part in reference() for s in part.settings}
    assert rows["train.warmup"].allowed == "number at least 0"
    assert rows["method.dropout"].allowed == "number at least 0 and below 1"
    assert rows["parallel.shard_size"].allowed == "`auto`, whole number at least 1"
    assert rows["train.max_steps"].allowed == "whole number at least 1, `null`"
    assert rows["model.path"].default == "" and rows["method.type"].default == "lora"


def test_markdown_table_has_four_cells_a_row() -> None:
    rows = [line for line in as_markdown().splitlines() if line.startswith("| `")]
    assert len(rows) > 60
    assert all(line.replace("\\|", "").count("|") == 5 for line in rows)
