#!/usr/bin/env bash
# One replica, as slurm/run.sh starts it on every node, REPLICAS times: the GPUs that are its own, and a launch.
set -euo pipefail

if [[ -n "${CUDA_VISIBLE_DEVICES:-}" ]]; then
    IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
    mine=("${gpus[@]:SLURM_LOCALID*GPUS_PER_REPLICA:GPUS_PER_REPLICA}")
    if ((${#mine[@]} < GPUS_PER_REPLICA)); then
        echo "error: replica $SLURM_LOCALID of this node needs $GPUS_PER_REPLICA GPUs, but of $CUDA_VISIBLE_DEVICES" \
            "${#mine[@]} are left: raise --gpus-per-node, or lower REPLICAS or GPUS_PER_REPLICA" >&2
        exit 2
    fi
    CUDA_VISIBLE_DEVICES="$(IFS=, && echo "${mine[*]}")"
    export CUDA_VISIBLE_DEVICES
fi

config="$1"
shift
# The configurations ask for port 0, which lets the launcher find a free one.
# It is accelerate's launch, with the exit code of the ranks.
exec "$SPECDIST_PYTHON" -m specdist.job.launch --config_file "$ACCELERATE_CONFIG" \
    --num_processes "$GPUS_PER_REPLICA" jobs/generate.py --config "$config" "$@"
