"""All mutants: what the modules called ``..._faults`` beside this one list."""

from importlib import import_module
from pathlib import Path

from tests.mutants.mutant import Mutant


def _of_file(path: Path) -> tuple[Mutant, ...]:
    """Its tuple of the file's name: ``ROUND_FAULTS`` of ``round_faults.py``."""
    found: tuple[Mutant, ...] = getattr(import_module(f"tests.mutants.{path.stem}"), path.stem.upper())
    return found


MUTANTS: tuple[Mutant, ...] = tuple(
    mutant for path in sorted(Path(__file__).parent.glob("*_faults.py")) for mutant in _of_file(path)
)
