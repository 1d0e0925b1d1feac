#!/bin/bash
# Repeat the papers' tables on a pair of models (papers.md): heads, traces, lossy runs, then the tables.
#
#     bash jobs/benchmarks/papers.sh [PAIR [PROMPTS [WORK]]]
#
# PAIR has the folders target and draft_distilled, PROMPTS the Arrow files alpaca_train, alpaca_test, gsm8k_test,
# humaneval, spec_bench and dolly_passage. What is in WORK already is not made again.
set -euo pipefail
pair=${1:-runs/small-pair} prompts=${2:-runs/prompts} work=${3:-runs/papers}
models=(--target "$pair/target" --draft "$pair/draft_distilled" --dtype float32 --temperature 1)
mkdir -p "$work"

# SpecDec++'s heads: r = 0.15, the hidden state alone, as many epochs as converge.
[ -e "$work/acceptance" ] || python jobs/collect.py --kind acceptance "${models[@]}" --max_num_seqs 32 \
    --prompts "$prompts/alpaca_train.arrow" --limit 1200 --max_new_tokens 128 --top_k 50 --output "$work/acceptance"
for depth in ${DEPTHS:-0 1 2 3 4}; do
    for weight in ${WEIGHTS:-1 3 6 12}; do
        head=$work/heads/D$depth-w$weight
        [ -e "$head/head.json" ] || python jobs/train_head.py --kind acceptance --features none --depth "$depth" \
            --rejected_weight "$weight" --data "$work/acceptance" --output "$head"
    done
done

# SPRINTER's verifiers, by the state that they read, and their lossy runs.
for state in drawing own; do
    data=$work/verifier-$state
    [ -e "$data" ] || python jobs/collect.py --kind verifier --hidden_state "$state" "${models[@]}" \
        --max_num_seqs 32 --prompts "$prompts/alpaca_train.arrow" --limit 300 --max_new_tokens 128 --output "$data"
    for features in none draft; do
        head=$work/heads/verifier-$state-$features run=$work/runs/sprinter-$state-$features
        [ -e "$head/head.json" ] || python jobs/train_head.py --kind verifier --features "$features" \
            --data "$data" --output "$head"
        [ -e "$run" ] || python jobs/generate.py "${models[@]}" --prompts "$prompts/dolly_passage.arrow" \
            --limit 48 --max_new_tokens 128 --max_num_seqs 8 --policy sprinter --head "$head" --trace \
            --output "$run"
    done
done

python jobs/benchmarks/papers.py --pair "$pair" --prompts "$prompts" --work "$work"
