#!/usr/bin/env bash
# One replica: picks its GPUs and launches the job. slurm/run.sh starts this REPLICAS times on every node.
set -euo pipefail

# The node's GPUs for this job, as CUDA names them, one per line; none on a node without GPUs. CUDA_VISIBLE_DEVICES
# may hold numbers, or UUIDs of GPUs and of MIG slices. If Slurm is not configured to set it, SLURM_STEP_GPUS and
# SLURM_JOB_GPUS hold the node's numbers; where cgroups hide the other GPUs, the visible ones count from 0.
gpus_of_job() {
    local visible="${CUDA_VISIBLE_DEVICES:-}" numbers="${SLURM_STEP_GPUS:-${SLURM_JOB_GPUS:-}}" num_seen=0
    if [[ $visible == NoDevFiles ]]; then # Slurm's word for none
        return
    elif [[ -n $visible ]]; then
        tr , '\n' <<<"$visible"
        return
    fi
    if command -v nvidia-smi >/dev/null; then
        num_seen=$(nvidia-smi -L | grep -c '^GPU ' || true)
    fi
    if [[ -z $numbers ]]; then
        seq 0 $((num_seen - 1))
    elif (($(tr , '\n' <<<"$numbers" | wc -l) == num_seen)); then
        seq 0 $((num_seen - 1))
    else
        tr , '\n' <<<"$numbers"
    fi
}

# CUDA's own order is by speed; Slurm's and nvidia-smi's is that of the bus.
export CUDA_DEVICE_ORDER="${CUDA_DEVICE_ORDER:-PCI_BUS_ID}"
mapfile -t gpus < <(gpus_of_job)
if ((${#gpus[@]})); then
    mine=("${gpus[@]:SLURM_LOCALID*GPUS_PER_REPLICA:GPUS_PER_REPLICA}")
    if ((${#mine[@]} < GPUS_PER_REPLICA)); then
        all="$(IFS=, && echo "${gpus[*]}")"
        echo "error: replica $SLURM_LOCALID of this node needs $GPUS_PER_REPLICA GPUs, but of the job's ($all)" \
            "only ${#mine[@]} remain: raise --gpus-per-node, or lower REPLICAS or GPUS_PER_REPLICA" >&2
        exit 2
    fi
    CUDA_VISIBLE_DEVICES="$(IFS=, && echo "${mine[*]}")"
    export CUDA_VISIBLE_DEVICES
fi

config="$1"
shift
# The configurations ask for port 0, which lets the launcher find a free one.
# It is accelerate's launch, with the exit code of the ranks.
exec "$SPECDIST_PYTHON" -m specdist.job.ranks.launch --config_file "$ACCELERATE_CONFIG" \
    --num_processes "$GPUS_PER_REPLICA" jobs/generate.py --config "$config" "$@"
