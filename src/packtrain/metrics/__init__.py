"""What a run says while it runs: events.jsonl, its sinks, its reader, and the loss curve."""
