"""The console command ``specdist``: a module for each command, which a script in jobs/ calls, too."""

from specdist.cli.commands import main

__all__ = ["main"]
