#!/usr/bin/env bash
# Speed and memory on one GPU, through `packtrain train`. Usage: gpu_session.sh OUTPUT_FOLDER
set -u
out=$1
export PYTHONPATH=src:.:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
model=/tmp/m8b
[ -d $model ] || python3 benchmarks/shapes.py llama-3-8b $model 2>&1 | grep -i error
speed() { timeout 240 python3 benchmarks/train_speed.py $model "$@" --save "8B LoRA r16, one GPU" 2>&1 | tail -25 | tee -a "$out/speed.txt"; }
speed
speed --rows "int(random.integers(60, 340))" --count 4000
speed train.micro_batch_size=2 train.batch_size=2 parallel.recompute=full
cp benchmarks/results.csv "$out/" 2>/dev/null
