"""TRL: ``load_dataset`` and the preparation that SFTTrainer's constructor runs, bfd packing."""

from __future__ import annotations

import os
import time
from typing import Any

from prepared import arguments, flat, report


def main() -> None:
    args = arguments()
    os.environ["HF_HOME"] = os.environ["HF_DATASETS_CACHE"] = str(args.cache)
    import datasets
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    class Timed(SFTTrainer):
        seconds = 0.0

        def _prepare_dataset(self, *positional: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = super()._prepare_dataset(*positional, **named)
            self.seconds += time.perf_counter() - start
            return result

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size))
    config = SFTConfig(
        str(args.cache / "output"),
        max_length=args.length,
        packing=True,
        packing_strategy="bfd",
        completion_only_loss=True,
        dataset_num_proc=args.workers or None,
        report_to="none",
        bf16=False,
        use_cpu=True,
    )
    start = time.perf_counter()
    rows = datasets.load_dataset("json", data_files=str(args.rows), split="train")
    loading = time.perf_counter() - start
    trainer = Timed(model=model, args=config, train_dataset=rows, processing_class=tokenizer)
    table = trainer.train_dataset.data
    tokens = sum(len(values) for values in flat(table.column("input_ids")))
    labelled = sum(int((values != -100).sum()) for values in flat(table.column("labels")))
    report(loading + trainer.seconds, table.num_rows, tokens, labelled)


if __name__ == "__main__":
    main()
