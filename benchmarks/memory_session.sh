#!/usr/bin/env bash
# Peak memory beside the plan's on one GPU, Llama-3-8B's shape, through `packtrain train`. Usage: memory_session.sh OUTPUT_FOLDER
set -u
out=$1
export PYTHONPATH=src:.:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
model=/tmp/m8b
[ -d $model ] || python3 benchmarks/shapes.py llama-3-8b $model 2>&1 | grep -i error
speed() { timeout 120 python3 benchmarks/train_speed.py $model --steps 8 "$@" 2>&1 | tail -25 | cut -c1-2000 | tee -a "$out/speed.txt"; }
speed --save "8B LoRA"
speed --save "8B LoRA, micro-batch 1" train.micro_batch_size=1
speed --save "8B LoRA, micro-batch 2, half recomputed" train.micro_batch_size=2 parallel.recompute=0.5
speed --save "8B LoRA, full recompute" train.micro_batch_size=4 parallel.recompute=full
speed --save "8B LoRA r 128, micro-batch 2" method.rank=128 train.micro_batch_size=2
speed --save "8B freeze, last 4 blocks" method.type=freeze method.freeze_first=28 train.micro_batch_size=1
speed --save "8B QLoRA, micro-batch 1" method.type=qlora train.micro_batch_size=1
cp benchmarks/results.csv "$out/" 2>/dev/null
