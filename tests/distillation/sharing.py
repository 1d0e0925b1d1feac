"""A rank of a training: ``run_ranks("tests.distillation.sharing", 2, "--output", ...)``."""

import sys

from specdist.config.arguments import parse_arguments
from specdist.distillation.config import DistillConfig
from specdist.distillation.run import distil
from specdist.job.activity import Activity
from specdist.job.signals import StopRequest
from tests.ranks import join, leave

topology = join(tp_size=2)
stop = StopRequest()
config = parse_arguments(DistillConfig, sys.argv[1:])
assert distil(config, topology, stop, Activity(), ()) is not None
stop.close()
leave()
