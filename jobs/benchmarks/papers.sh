#!/usr/bin/env bash
# Repeat the papers' tables on a pair of models: heads, lossy runs and their scores, then traces and the tables.
#
#   bash jobs/benchmarks/papers.sh [PAIR [PROMPTS [WORK]]]
#
# PAIR has the folders target and draft_distilled, PROMPTS the Arrow files alpaca_train, alpaca_test, gsm8k_test,
# humaneval, spec_bench, mt_bench and dolly_passage. What is in WORK already is not made again.
set -euo pipefail
pair=${1:-runs/small-pair} prompts=${2:-runs/prompts} work=${3:-runs/papers}
models=(--target "$pair/target" --draft "$pair/draft_distilled" --dtype float32)
mkdir -p "$work"

# SpecDec++'s heads: r = 0.15, the hidden state alone, as many epochs as converge.
[ -e "$work/acceptance/manifest.json" ] || python jobs/collect.py --kind acceptance "${models[@]}" --temperature 1 \
    --top_k 50 --max_num_seqs 32 --prompts "$prompts/alpaca_train.arrow" --limit 1200 --max_new_tokens 128 \
    --output "$work/acceptance"
for depth in 0 1 2 3 4; do
    for weight in 1 3 6 12; do
        head=$work/heads/D$depth-w$weight
        [ -e "$head/head.json" ] || python jobs/train_head.py --kind acceptance --features none --depth "$depth" \
            --rejected_weight "$weight" --data "$work/acceptance" --output "$head"
    done
done

# SPRINTER's verifiers, by the hidden state that they read.
for state in drawing own; do
    data=$work/verifier-$state
    [ -e "$data/manifest.json" ] || python jobs/collect.py --kind verifier --hidden_state "$state" "${models[@]}" \
        --temperature 1 --max_num_seqs 32 --prompts "$prompts/alpaca_train.arrow" --limit 300 --max_new_tokens 128 \
        --output "$data"
    for features in none draft; do
        head=$work/heads/verifier-$state-$features
        [ -e "$head/head.json" ] || python jobs/train_head.py --kind verifier --features "$features" \
            --data "$data" --output "$head"
    done
done

# Their lossy runs beside an exact one, and all completions' scores.
run() { # NAME OPTION...
    local folder=$work/runs/$1
    python jobs/generate.py "${models[@]}" --temperature 1 --prompts "$prompts/dolly_passage.arrow" --limit 192 \
        --max_new_tokens 64 --max_num_seqs 8 --output "$folder" "${@:2}"
    [ -e "$folder/rouge/results.json" ] || python jobs/evaluate.py "$folder" --task rouge \
        --reference_column reference --output "$folder/rouge"
}
run exact --policy fixed --num_draft_tokens 5 --overlap synchronous
for state in drawing own; do
    for features in none draft; do
        run "sprinter-$state-$features" --policy sprinter --head "$work/heads/verifier-$state-$features"
    done
done

python -m tests.lab.papers --target "$pair/target" --draft "$pair/draft_distilled" --prompts "$prompts" --work "$work" \
    --output jobs/benchmarks/papers.json
