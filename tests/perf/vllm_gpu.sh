#!/usr/bin/env bash
# Answers of checkpoints in the real vLLM on a GPU, and the offline evaluation on the same GPU, for tests/perf/predict_server.py.
#
#     bash tests/perf/vllm_gpu.sh PYTHON WORK N OUT CHECKPOINT ...        (folders; one may be the bf16 model)
#
# PYTHON imports vLLM (0.26 needs vllm_flash_attn's extension to be imported, also for other attention) and this package. All
# processes run at the same time: each checkpoint under every kernel of vllm_answers.py that it has, and with OFFLINE=1 the offline
# evaluation of each. OUT gets served.NAME.SERVER.N.jsonl, offline.NAME.N.json and log.txt. LIMIT: seconds per process.
set -u
python=$1 work=$2 n=$3 out=$4
shift 4
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$work" "$out"
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false VLLM_NO_USAGE_STATS=1
limit=${LIMIT:-125} cuts=${CUTS:-64,7}
start=$SECONDS
for folder in "$@"; do
    name=$(basename "$folder")
    kernels="auto"
    if [ "$(basename "$folder")" != "bf16" ] && grep -q input_scale "$folder"/model.safetensors*; then kernels="auto emulation exact"; fi
    for kernel in $kernels; do
        server=vllm-gpu-${kernel/auto/marlin}
        timeout -k 3 "$limit" "$python" "$here/vllm_answers.py" "$folder" "$work/prompts.$n.json" \
            "$out/served.$name.$server.$n.jsonl" --cuts "$cuts" --kernel "$kernel" >"$work/$name.$kernel.log" 2>&1 &
    done
done
if [ "${OFFLINE:-0}" = 1 ]; then
    for folder in "$@"; do
        name=$(basename "$folder")
        [ "$name" = bf16 ] && continue
        (timeout -k 3 "$limit" "$python" "$here/predict_server.py" offline --work "$work" --n "$n" --device cuda "$folder" \
            >"$work/$name.offline.log" 2>&1 && cp "$work/offline/$name.$n.json" "$out/offline.$name.$n.json") &
    done
fi
wait
for log in "$work"/*.log; do
    echo "== $(basename "$log")"
    tail -n "${TAIL:-3}" "$log" | cut -c1-300
done >"$out/log.txt"
cat "$out/log.txt"
echo "seconds: $((SECONDS - start))"
ls -l "$out"
