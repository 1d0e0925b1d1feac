#!/usr/bin/env bash
# One replica on one node of a Slurm cluster:
#
#   sbatch slurm/run.sh CONFIG [--option value ...]
#   sbatch --gpus-per-node=3 slurm/run.sh jobs/configs/my.yaml --tp_size 2
#
# CONFIG and the options are those of jobs/generate.py; options given to sbatch win over the lines below.
# Submit it from the repository's folder. Install there first (bash jobs/install.sh), or set SPECDIST_PYTHON.

#SBATCH --job-name=specdist
#SBATCH --nodes=1
# accelerate starts the ranks, so Slurm starts one task.
#SBATCH --ntasks-per-node=1
# tp_size and one for the draft, as jobs/configs/llama-70b.yaml needs; every GPU gets a rank.
#SBATCH --gpus-per-node=5
#SBATCH --cpus-per-task=40
#SBATCH --time=24:00:00
# A job that is preempted or loses its node starts again, and goes on where it was: finished rows are kept.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.log
set -euo pipefail

if (($# < 1)); then
    echo "usage: sbatch slurm/run.sh CONFIG [--option value ...]" >&2
    exit 2
fi
config="$1"
shift

# Slurm runs a copy of this file from its spool folder, so the repository is where the job was submitted.
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}"
python="${SPECDIST_PYTHON:-.venv/bin/python}"
if ! command -v "$python" >/dev/null; then
    echo "error: there is no $python in $PWD: run jobs/install.sh there first, or set SPECDIST_PYTHON" >&2
    exit 1
fi

# Port 0 lets the launcher find a free one: other jobs may run on this node.
exec "$python" -m accelerate.commands.launch --config_file jobs/accelerate/gpu8.yaml \
    --num_processes "${SLURM_GPUS_ON_NODE:?start this script with sbatch}" \
    jobs/generate.py --config "$config" "$@"
