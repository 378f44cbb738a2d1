#!/usr/bin/env bash
# A plan after calibration beside runs that it was not fitted to, on one GPU, through `packtrain train`.
# Usage: plan_session.sh OUTPUT_FOLDER SHAPE [NAMES]; SHAPE of benchmarks/shapes.py, NAMES a pattern of the runs to make.
# No run is begun after $DEADLINE seconds.
set -u
out=$1
shape=$2
names=${3:-.}
export PYTHONPATH=src:.:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PACKTRAIN_CACHE=/tmp/cache
model=/tmp/$shape
keep() { cp benchmarks/results.csv "$out/results.csv" 2>/dev/null; }
[ -d $model ] || python3 benchmarks/shapes.py $shape $model 2>&1 | grep -i error
python3 benchmarks/calibration.py $model --save "$shape calibration" 2>&1 | tee "$out/$shape.calibration.txt"
speed() {
    [[ $2 =~ $names && $SECONDS -le ${DEADLINE:-100000} ]] || return 0
    timeout 150 python3 benchmarks/train_speed.py $model --steps 8 "$@" 2>&1 | tail -25 | cut -c1-2000 | tee -a "$out/$shape.txt"
    keep
}
short="--rows 2048 --length 2048 --count 320"
long="--rows 8192 --length 8192 --count 80"
packed="--rows int(random.integers(60,340)) --count 4000"
full="method.type=full train.learning_rate=1e-5"
case $shape in
llama-3.2-1b)
    speed --save "1B LoRA, auto"
    speed --save "1B LoRA, micro-batch 4, full recompute" train.micro_batch_size=4 parallel.recompute=full
    speed --save "1B LoRA, rows of 2,048" $short train.batch_size=16 train.micro_batch_size=8
    speed --save "1B LoRA, packed" $packed
    speed --save "1B full, micro-batch 4" $full train.micro_batch_size=4
    speed --save "1B full, accumulated" $full train.micro_batch_size=1 train.batch_size=8
    speed --save "1B full, fsdp, quarter recomputed" $full parallel.strategy=fsdp train.micro_batch_size=2 parallel.recompute=0.25
    speed --save "1B prefix" method.type=prefix train.micro_batch_size=2
    speed --save "1B llama_adapter" method.type=llama_adapter train.micro_batch_size=2
    ;;
qwen2.5-3b)
    speed --save "Qwen 3B LoRA, auto"
    speed --save "Qwen 3B LoRA, rows of 8,192" $long train.micro_batch_size=1
    speed --save "Qwen 3B LoRA r 64, half recomputed" method.rank=64 train.micro_batch_size=2 parallel.recompute=0.5
    speed --save "Qwen 3B QLoRA int8" method.type=qlora method.quantize=int8 train.micro_batch_size=2
    speed --save "Qwen 3B full, micro-batch 2" $full train.micro_batch_size=2
    speed --save "Qwen 3B full, 8-bit states, full recompute" $full train.optimizer=adamw_8bit train.micro_batch_size=4 parallel.recompute=full
    speed --save "Qwen 3B freeze, last 6 blocks" method.type=freeze method.freeze_first=30 train.micro_batch_size=4
    ;;
mistral-7b)
    speed --save "Mistral 7B LoRA, auto"
    speed --save "Mistral 7B LoRA, rows of 2,048" $short train.batch_size=16 train.micro_batch_size=4
    speed --save "Mistral 7B LoRA, packed" $packed
    speed --save "Mistral 7B LoRA, rows of 8,192, half recomputed" $long train.micro_batch_size=2 parallel.recompute=0.5
    speed --save "Mistral 7B QLoRA, double quantisation" method.type=qlora method.double_quant=true train.micro_batch_size=2
    speed --save "Mistral 7B DoRA" method.dora=true train.micro_batch_size=1
    speed --save "Mistral 7B full, 8-bit states, bf16 weights" $full train.optimizer=adamw_8bit train.master_weights=bf16 train.micro_batch_size=1
    speed --save "Mistral 7B full, fsdp, full recompute" $full parallel.strategy=fsdp train.micro_batch_size=2 parallel.recompute=full
    ;;
llama-3-8b) # auto beside what a hand would try
    speed --save "8B LoRA, auto, 16 rows" train.batch_size=16
    for micro in 2 4; do speed --save "8B LoRA by hand, micro-batch $micro, 16 rows" train.batch_size=16 train.micro_batch_size=$micro parallel.recompute=none; done
    speed --save "8B LoRA by hand, micro-batch 8, full recompute, 16 rows" train.batch_size=16 train.micro_batch_size=8 parallel.recompute=full
    speed --save "8B LoRA by hand, micro-batch 8, half recomputed, 16 rows" train.batch_size=16 train.micro_batch_size=8 parallel.recompute=0.5
    ;;
esac
