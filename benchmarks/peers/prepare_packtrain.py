"""Packtrain: ``prepare_data`` into an empty cache, then the packed order of the first epoch."""

from __future__ import annotations

import time

from prepared import arguments, report


def main() -> None:
    from packtrain.config.schema import DataSection
    from packtrain.data import load_tokenizer, prepare_data
    from packtrain.data.order import Order

    args = arguments()
    load_tokenizer(args.model)  # for what transformers imports; the peers' imports are not timed either
    start = time.perf_counter()
    data = DataSection(train=[str(args.rows)], eval=0.0, workers=args.workers, cache=str(args.cache))
    store = prepare_data(data, args.model, args.length, seed=0).train
    order = Order(store, [1.0], batch_size=16, max_length=args.length, seed=0)
    steps = order.steps_in_epoch(0)
    seconds = time.perf_counter() - start
    batches = [order.batch(step) for step in range(steps)]
    sequences = sum(len(batch.sequences) for batch in batches)
    tokens, labelled = (sum(getattr(b, name) for b in batches) for name in ("token_count", "label_count"))
    report(seconds, sequences, tokens, labelled)


if __name__ == "__main__":
    main()
