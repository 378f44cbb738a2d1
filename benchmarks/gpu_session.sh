#!/usr/bin/env bash
# Everything that is measured on one GPU: checks first, then speed and memory. Usage: gpu_session.sh OUTPUT_FOLDER
set -u
out=$1
export PYTHONPATH=src:.:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
python3 -m pytest tests/gpu -x -q -p no:cacheprovider 2>&1 | tail -30 | tee "$out/checks.txt"
model=/tmp/m8b
(time python3 benchmarks/shapes.py llama-3-8b $model) 2>&1 | grep -E "real|Error"
speed() { timeout 200 python3 benchmarks/train_speed.py $model "$@" 2>&1 | tail -25 | tee -a "$out/speed.txt"; }
speed
speed train.micro_batch_size=2 train.batch_size=2
speed train.micro_batch_size=2 train.batch_size=2 parallel.recompute=full
speed --rows "int(random.integers(60, 340))" --count 4000
