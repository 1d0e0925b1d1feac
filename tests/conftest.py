"""One thread per process: the tests run real ranks beside each other on few cores.

Without a GPU the project's kernels run in Triton's interpreter. It must be asked for before anything imports
Triton, and transformers does.
"""

import os
import shutil

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"
