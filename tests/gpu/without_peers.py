"""The main job where a rank finds a kernel of its layers wrong, so that no rank joins sums with norms; or
without the peers' memory: all sums over ranks are NCCL's then, in recorded passes, too, so that every graph
of the target holds calls of a communicator, whose end waits for them.

Started by a launcher, as jobs/generate.py is; ``FAILS_ON``: the rank.
"""

from __future__ import annotations

import os

from specdist.cli import generate
from specdist.kernels import layers
from specdist.models.loading import loading

if __name__ == "__main__":
    if "FAILS_ON" not in os.environ:
        loading.choose_sums = lambda *_, **__: []
    elif os.environ["FAILS_ON"] == os.environ.get("RANK"):
        layers.rms_norm = None
    generate.end()
