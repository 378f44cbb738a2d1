#!/usr/bin/env bash
# Peak memory beside the plan's on one GPU, through `packtrain train`. Usage: memory_session.sh OUTPUT_FOLDER [8b | 3b]
set -u
out=$1
shape=${2:-8b}
export PYTHONPATH=src:.:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
model=/tmp/m$shape
name=$([ $shape = 8b ] && echo llama-3-8b || echo llama-3.2-3b)
[ -d $model ] || python3 benchmarks/shapes.py $name $model 2>&1 | grep -i error
speed() { timeout 120 python3 benchmarks/train_speed.py $model --steps 8 "$@" 2>&1 | tail -25 | cut -c1-2000 | tee -a "$out/speed.txt"; }
if [ $shape = 3b ]; then
    full="method.type=full train.learning_rate=1e-5"
    speed --save "3B full, micro-batch 2" $full train.micro_batch_size=2
    speed --save "3B full, micro-batch 1, fsdp" $full train.micro_batch_size=1 parallel.strategy=fsdp
    speed --save "3B full, micro-batch 4, full recompute" $full train.micro_batch_size=4 parallel.recompute=full
    speed --save "3B full, 8-bit states" $full train.micro_batch_size=1 train.optimizer=adamw_8bit
    speed --save "3B full, pure bf16" $full train.micro_batch_size=1 train.optimizer=adamw_bf16 train.master_weights=bf16
    speed --save "3B LoRA, also embedding" train.micro_batch_size=2 'method.also_train=[embedding]'
    speed --save "3B DoRA, micro-batch 1" train.micro_batch_size=1 method.dora=true
    speed --save "3B full, optimizer offload" $full train.micro_batch_size=1 parallel.strategy=fsdp parallel.offload=optimizer
    cp benchmarks/results.csv "$out/"
    exit
fi
speed --save "8B LoRA"
speed --save "8B LoRA, micro-batch 1" train.micro_batch_size=1
speed --save "8B LoRA, micro-batch 2, half recomputed" train.micro_batch_size=2 parallel.recompute=0.5
speed --save "8B LoRA, full recompute" train.micro_batch_size=4 parallel.recompute=full
speed --save "8B LoRA r 128, micro-batch 2" method.rank=128 train.micro_batch_size=2
speed --save "8B freeze, last 4 blocks" method.type=freeze method.freeze_first=28 train.micro_batch_size=1
speed --save "8B QLoRA, micro-batch 1" method.type=qlora train.micro_batch_size=1
cp benchmarks/results.csv "$out/" 2>/dev/null
