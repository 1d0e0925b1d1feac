#!/usr/bin/env bash
# Replicas of one run on a Slurm cluster:
#
#   sbatch slurm/run.sh CONFIG [--option value ...]                two replicas on a node of 8 GPUs
#   sbatch --array=0-15 slurm/run.sh CONFIG                        sixteen jobs of two replicas each
#   sbatch --nodes=4 slurm/run.sh CONFIG                           two replicas on each of four nodes
#   REPLICAS=1 GPUS_PER_REPLICA=5 sbatch --gpus-per-node=5 slurm/run.sh CONFIG    one, whose draft has a GPU
#
# CONFIG and the options are those of jobs/generate.py; options given to sbatch win over the lines below.
# Submit it from the repository's folder, which all nodes must see. Install there first (bash jobs/install.sh), or
# set SPECDIST_PYTHON. The log of every rank (logs/ in the output folder) says in one line where the memory of its
# GPU goes (jobs/guides/checkpoints.md, "Memory of a GPU"). All replicas write into one output folder; more can be
# submitted at any time.

# Slurm reads its options down to the first command.
#SBATCH --job-name=specdist
#SBATCH --nodes=1
# accelerate starts the ranks, and srun below a launcher for each replica.
#SBATCH --ntasks-per-node=1
# REPLICAS times GPUS_PER_REPLICA. As jobs/configs/llama-70b.yaml has it, a replica takes four.
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
# All memory of the node: a rank with CUDA takes about 4 GB of the host's, and a cluster's default for each CPU may
# be less. Where jobs share a node, give a number (--mem=64G).
#SBATCH --mem=0
#SBATCH --time=24:00:00
# Two minutes before the time limit the replicas are asked to stop and the job is requeued. The same happens
# when it is preempted or loses its node. It resumes where it stopped: finished rows are kept.
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
# A task of an array has an id of its own (%j), which it keeps when it is requeued. --output=slurm-%x-%A_%a.log says
# which task it is; for a job without an array %a would be 4294967294.
#SBATCH --output=slurm-%x-%j.log

# Settings, from the environment of sbatch:
REPLICAS="${REPLICAS:-2}"                  # on each node
GPUS_PER_REPLICA="${GPUS_PER_REPLICA:-4}"  # ranks, each on a GPU of its own: tp_size, and one for a draft of its own
ACCELERATE_CONFIG="${ACCELERATE_CONFIG:-jobs/accelerate/gpu8.yaml}"
MAX_RESTARTS="${MAX_RESTARTS:-3}"          # a job that fails is requeued at most this many times

set -euo pipefail

if (($# < 1)); then
    echo "usage: sbatch slurm/run.sh CONFIG [--option value ...]" >&2
    exit 2
fi
: "${SLURM_JOB_ID:?start this script with sbatch}"
# The task of an array that starts last has the array's own id, by which Slurm's commands mean all of its tasks. In
# other jobs the variables of an array may be those of the task that has submitted them.
job="$SLURM_JOB_ID"
if [[ $job == "${SLURM_ARRAY_JOB_ID:-}" ]]; then
    job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi

# Slurm runs a copy of this file from its spool folder, so the repository is where the job was submitted.
cd "$SLURM_SUBMIT_DIR"
export SPECDIST_PYTHON="${SPECDIST_PYTHON:-$PWD/.venv/bin/python}" GPUS_PER_REPLICA ACCELERATE_CONFIG
if ! command -v "$SPECDIST_PYTHON" >/dev/null; then
    echo "error: $SPECDIST_PYTHON was not found: run jobs/install.sh in $PWD first, or set SPECDIST_PYTHON" >&2
    exit 1
fi

# A replica that fails does not end the others, which take over its shards.
srun --ntasks="$((SLURM_JOB_NUM_NODES * REPLICAS))" --ntasks-per-node="$REPLICAS" --overcommit --cpu-bind=none \
    --kill-on-bad-exit=0 --wait=0 bash slurm/replica.sh "$@" &
replicas=$!

# USR1: the time is nearly over. TERM: preempted, in which case Slurm puts the job back itself, or cancelled.
# A signal to srun would make it kill the replicas; this one goes to them. Where Slurm is ending the job itself,
# scancel would try again until the job is killed, or has begun anew.
ask_to_stop() {
    scancel --quiet --signal=TERM "$job" &
    asking=$!
}
requeue= is_cancelled= asking=
trap 'requeue=yes; ask_to_stop' USR1
trap 'is_cancelled=yes; ask_to_stop' TERM INT
code=0
wait "$replicas" || code=$?
while kill -0 "$replicas" 2>/dev/null; do # a signal has ended the waiting
    code=0
    wait "$replicas" || code=$?
done
[[ -z $asking ]] || kill "$asking" 2>/dev/null || true

# 2: a wrong option, 28: a full disk, which a restart does not cure. 75, or 143 if there was nothing to save: asked to stop.
is_failure() {
    case $code in 0 | 2 | 28 | 75 | 130 | 143) return 1 ;; esac
    [[ -z $is_cancelled && $(patiently squeue --noheader --jobs="$job" --format=%T) == RUNNING ]]
}
# A busy controller does not answer every time.
patiently() {
    for pause_s in 2 5 10 30; do
        "$@" && return
        sleep "$pause_s"
    done
    "$@"
}
if [[ -n $requeue ]] && ((code != 0)); then
    patiently scontrol requeue "$job"
elif is_failure && ((${SLURM_RESTART_COUNT:-0} < MAX_RESTARTS)); then
    echo "a replica has failed (exit code $code): requeuing the job" >&2
    patiently scontrol requeue "$job"
fi
exit "$code"
