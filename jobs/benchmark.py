"""Compare specdist with transformers, or vLLM, on the same models, prompts and lengths.

    python jobs/benchmark.py --synthetic 20m --acceptance 0.8 --output runs/benchmark.json
    python jobs/benchmark.py --target T --draft D --prompts FILE --peers vllm --output runs/vllm.json

The last line on stdout is a JSON document.
"""

import _package  # noqa: F401

from specdist.cli import benchmark

if __name__ == "__main__":
    benchmark.end()
