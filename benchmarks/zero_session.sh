#!/usr/bin/env bash
# Full fine-tuning by DeepSpeed beside FSDP2, with and without offload, through `packtrain train`: speed and memory.
# Usage: zero_session.sh OUTPUT_FOLDER SHAPE (llama-3-8b, llama-3.2-3b, ...) [settings, by number]
set -u
out=$1
shape=$2
only=${3:-1 2 3 4 5 6 7 8}
export PYTHONPATH=src:.:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
model=/tmp/$shape
[ -d "$model" ] || python3 benchmarks/shapes.py "$shape" "$model" 2>&1 | grep -i error
settings=(
    "parallel.strategy=fsdp"
    "parallel.strategy=deepspeed parallel.zero_stage=2"
    "parallel.strategy=deepspeed parallel.zero_stage=3"
    "parallel.strategy=deepspeed parallel.zero_stage=3 parallel.offload=params"
    "parallel.strategy=fsdp parallel.offload=params"
    "parallel.strategy=deepspeed parallel.zero_stage=2 parallel.offload=optimizer"
    "parallel.strategy=fsdp parallel.offload=optimizer"
    "parallel.strategy=deepspeed parallel.zero_stage=3 parallel.offload=optimizer"
)
for number in $only; do
    setting=${settings[$((number - 1))]}
    # shellcheck disable=SC2086
    timeout 200 python3 benchmarks/train_speed.py "$model" --steps 8 --count 80 --save "$shape full, $setting" \
        method.type=full parallel.recompute=full train.batch_size=16 train.micro_batch_size=4 $setting 2>&1 |
        tail -8 | cut -c1-1500 | tee -a "$out/zero.txt"
done
cp benchmarks/results.csv "$out/" 2>/dev/null
