#!/usr/bin/env bash
# Speed and memory on one GPU, through `packtrain train`. Usage: gpu_session.sh OUTPUT_FOLDER [folder of bitsandbytes]
set -u
out=$1
bits=${2:-}
export PYTHONPATH=src:.:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
model=/tmp/m8b
[ -d $model ] || python3 benchmarks/shapes.py llama-3-8b $model 2>&1 | grep -i error
PYTHONPATH=$bits:$PYTHONPATH python3 benchmarks/dequantize.py 2>&1 | tail -20 | tee -a "$out/dequantize.txt"
speed() { timeout 150 python3 benchmarks/train_speed.py $model "$@" 2>&1 | tail -25 | cut -c1-2000 | tee -a "$out/speed.txt"; }
speed --save "8B LoRA"
speed --save "8B QLoRA" method.type=qlora
speed --save "8B QLoRA, full recompute" method.type=qlora parallel.recompute=full train.batch_size=2 train.micro_batch_size=2
cp benchmarks/results.csv "$out/" 2>/dev/null
