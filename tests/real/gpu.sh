#!/bin/sh
# Quantize real models on one GPU by naive, gptq and best, audit and evaluate each: `sh tests/real/gpu.sh FOLDER [NAME ...]`.
# FOLDER/NAME are bf16 folders (default names: coder-0.5b coder-1.5b); results go to FOLDER/out. A result that exists is not
# made again.
set -eu
folder=$1
shift
[ $# -gt 0 ] || set -- coder-0.5b coder-1.5b
python=${PYTHON:-python3}
out=$folder/out
mkdir -p "$out"
rows=$out/rows.jsonl
[ -f "$rows" ] || "$python" -m annie_quant data --persona annie --teacher offline --n 256 --output "$rows"
for name in "$@"; do
    for strategy in naive gptq best; do
        target=$out/$name-$strategy
        [ ! -f "$target.json" ] || continue
        start=$(date +%s)
        "$python" -m annie_quant quantize --strategy "$strategy" --model "$folder/$name" --calib-data "$rows" --calib-samples 128 \
            --output "$target" --force
        made=$(date +%s)
        "$python" -m annie_quant audit "$target" --json >"$target-audit.json" || echo "$name $strategy: the audit has findings"
        # Exit code 1 is a verdict.
        "$python" -m annie_quant eval "$target" --reference "$folder/$name" --n 50 --numerics w4a4,w4a16 --json \
            >"$target.part" || [ $? -eq 1 ]
        mv "$target.part" "$target.json"
        echo "$name $strategy: quantized in $((made - start)) s, evaluated in $(($(date +%s) - made)) s" | tee -a "$out/seconds.txt"
    done
done
