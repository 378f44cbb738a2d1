"""LLaMA-Factory: its ``get_dataset`` (load, convert, tokenise, mask, pack) for stage sft."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from prepared import arguments, flat, report

# The model's own template has this one; LLaMA-Factory's "smollm2" ends it with a full stop, one token more.
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def write_registry(folder: Path, rows: Path) -> None:
    """The dataset_info.json by which LLaMA-Factory finds the rows."""
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": str(rows.resolve())}}))


def main() -> None:
    args = arguments()
    os.environ["HF_HOME"] = os.environ["HF_DATASETS_CACHE"] = str(args.cache)
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from llamafactory.hparams import get_train_args
    from llamafactory.model import load_tokenizer

    registry = args.cache / "registry"
    write_registry(registry, args.rows)
    recipe = {
        "model_name_or_path": str(args.model), "stage": "sft", "do_train": True, "finetuning_type": "lora",
        "dataset_dir": str(registry), "dataset": "rows", "template": "smollm2", "cutoff_len": args.length,
        "packing": True, "preprocessing_num_workers": args.workers or None, "overwrite_cache": True,
        "output_dir": str(args.cache / "output"), "report_to": "none", "default_system": SYSTEM,
    }  # fmt: skip
    model_args, data_args, training_args, *_ = get_train_args(recipe)
    modules = load_tokenizer(model_args)
    tokenizer = modules["tokenizer"]
    template = get_template_and_fix_tokenizer(tokenizer, data_args)
    start = time.perf_counter()
    found = get_dataset(template, model_args, data_args, training_args, stage="sft", **modules)
    dataset = found["train_dataset"]
    seconds = time.perf_counter() - start
    labelled = sum(int((values != -100).sum()) for values in flat(dataset.data.column("labels")))
    report(seconds, len(dataset), real_tokens(dataset, tokenizer.pad_token_id), labelled)


def real_tokens(dataset: Any, pad: int) -> int:
    """Tokens before the padding at each sequence's end (SmolLM2 pads with its end-of-turn token, but a row
    ends with a newline)."""
    import numpy as np

    total = 0
    for chunk in dataset.data.column("input_ids").chunks:
        for sequence in chunk:
            total += int(np.flatnonzero(sequence.values.to_numpy() != pad)[-1]) + 1
    return total


if __name__ == "__main__":
    main()
