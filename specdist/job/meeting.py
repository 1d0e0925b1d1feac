"""Where the replicas of a run in a bucket meet: what the manifest says of it, and that all of them do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdist.config.generate import GenerateConfig
from specdist.data.run.layout import CLAIMS, RUN_TAG
from specdist.data.run.run_folder import RunFolder
from specdist.data.store.access import claims_folder
from specdist.data.store.files import unique_tag
from specdist.data.store.storage import is_url, storage_path
from specdist.utils.errors import UserError


def store_info(config: GenerateConfig) -> dict[str, Any]:
    """Of a run in a bucket, for the manifest's ``info``."""
    if not is_url(config.output):
        return {}
    output = storage_path(config.output, option="--output ", spool=config.spool)
    claims = claims_folder(output, config.claims)
    return {RUN_TAG: unique_tag()} | ({} if claims is None else {CLAIMS: str(claims)})


def check_claims(folder: RunFolder, claims: Path | None) -> None:
    """Raises :class:`UserError` if this replica claims shards in another folder than the run's others do."""
    theirs = folder.manifest.info.get(CLAIMS)
    if theirs == (None if claims is None else str(claims)):
        return
    remedy = "leave --claims out" if theirs is None else f"give --claims {Path(theirs).parent}"
    mine = "in --output itself" if claims is None else f"in --claims {claims.parent}"
    others = "in --output itself" if theirs is None else f"in --claims {Path(theirs).parent}"
    raise UserError(
        f"--output {folder.path}: its replicas claim shards {others}, and this one would {mine}, so that two "
        f"of them could do the same: {remedy}"
    )
