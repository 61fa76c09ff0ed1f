#!/usr/bin/env bash
# Plain and speculative throughput of our engine and of vLLM's CPU build, in both orders: ours, vLLM, vLLM, ours.
#
#     benchmarks/beside_vllm.sh EXPORTED PYTHON OUT
#
# EXPORTED is a drafter that `outrider export --to vllm` wrote and vLLM drafts with on a CPU (DFlash; not DSpark, see
# docs/engines.md), PYTHON is what tests/engines/vllm_environment.sh prints. The target is SmolLM2-135M-Instruct in
# float32 on both sides. Nothing else may run on the machine; on two cores a run of ours takes 6 minutes, one of vLLM's 12.
set -euo pipefail
exported=$1 python=$2 out=$3
export OMP_NUM_THREADS=2 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
load=(--drafter "$exported" --tasks "gsm8k.jsonl,humaneval.jsonl,mt-bench.jsonl" --prompts 24 --max-new-tokens 64
	--concurrency 1,4,8,16,32 --repeats 1 --threads 2)
ours() { outrider bench --backend local "${load[@]}" --variants none,fixed-3,fixed-7 --out "$1"; }
theirs() { outrider bench --backend vllm --launch --engine-python "$python" "${load[@]}" --out "$1"; }
ours "$out/local-1"
theirs "$out/vllm-1"
theirs "$out/vllm-2"
ours "$out/local-2"
outrider bench-table "$out"/local-1 "$out"/vllm-1 "$out"/vllm-2 "$out"/local-2
