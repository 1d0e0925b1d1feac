"""What a run would take, before any GPU is used: does it fit, how fast, and which way to run it.

    python jobs/plan.py --target meta-llama/Llama-3.3-70B-Instruct --draft meta-llama/Llama-3.2-1B-Instruct \\
        --gpu h100-sxm --gpus_per_node 8 --acceptance 0.8 --output_config plan.yaml

The last line on stdout is a JSON document.
"""

import _package  # noqa: F401

from specdist.cli import plan

if __name__ == "__main__":
    plan.end()
