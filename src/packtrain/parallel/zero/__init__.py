"""DeepSpeed's ZeRO: optimizer states (1), gradients (2) and parameters (3) sharded, 0 is data parallel."""
