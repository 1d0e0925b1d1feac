"""A rank of a training: ``run_ranks("tests.training.drafts.sharing", 2, "--output", ...)``."""

import sys

from specdist.config.arguments import parse_arguments
from specdist.job.ranks.activity import Activity
from specdist.job.ranks.signals import StopRequest
from specdist.training.drafts.config import DistillConfig
from specdist.training.drafts.run import distil
from tests.ranks import join, leave

topology = join(tp_size=2)
stop = StopRequest()
config = parse_arguments(DistillConfig, sys.argv[1:])
assert distil(config, topology, stop, Activity(), ()) is not None
stop.close()
leave()
