"""Options on copies of files on disks of the machine that needs them."""

from __future__ import annotations

from dataclasses import dataclass

from specdist.config.arguments import option
from specdist.config.sizes import bytes_of
from specdist.utils.errors import UserError


@dataclass(kw_only=True)
class StorageOptions:
    """Where copies lie."""

    _argument_group_name = "Storage"

    push_to_hub: str | None = option(
        None,
        help="owner/name of a data set on the Hugging Face hub, which gets the finished run: its card and "
        "its rows; created as a private one if it does not exist",
    )
    claims: str | None = option(
        None,
        help="folder on a file system that all replicas share, in which they meet if --output is a URL of a "
        "store without conditional writes (default: in --output itself)",
    )
    spool: str | None = option(
        None,
        help="folder on a disk of this machine for what a URL in --prompts or --output needs locally: "
        "fetched prompts, rows of unfinished shards, logs (default: specdist-UID in the folder of temporary "
        "files)",
    )
    stage_weights: str | None = option(
        None, help="folder on a disk of the node to which weight files are copied once for all replicas there"
    )
    stage_limit: str | None = option(
        None, help="most that --stage_weights holds, such as 500GB (default: what the disk has room for)"
    )

    @property
    def stage_limit_bytes(self) -> int | None:
        """``--stage_limit`` in bytes; None where the disk decides."""
        return None if self.stage_limit is None else bytes_of("stage_limit", self.stage_limit)

    def check_stage_limit(self) -> None:
        """Raises :class:`UserError` for what is not a size, or has no effect."""
        if self.stage_limit_bytes is not None and self.stage_weights is None:
            raise UserError(
                f"--stage_limit {self.stage_limit} has no effect without --stage_weights: name a folder on a "
                "disk of the node, or leave it out"
            )
