"""The tree is the architecture: imports go one way, and what needs no torch imports no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from specdist.config.generate import GenerateConfig
from specdist.policies.registry import POLICIES
from tests.lines import imported_names
from tests.ranks import REPOSITORY

PACKAGE = REPOSITORY / "specdist"
# A module may import its own room and those of the lines above its own, never its neighbours. A room is a
# package, a package within a large one, or a module that stands in one by itself.
LAYERS = [
    {"utils"},
    {"kernels"},
    {"sampling"},
    {"policies"},
    {"config"},
    {"rollout"},
    {"data.columns", "data.file_names"},
    {"data.store"},
    {"data.formats"},
    {"data.stats"},
    {"data.run"},
    {"data.leases"},
    {"models.cache"},
    {"models.batch"},
    {"models.draft_models", "models.attention"},
    {"models.files", "models.recurrent"},
    {"models.quantized"},
    {"models.families"},
    {"models.cpu"},
    {"models.passes"},
    {"models.sharding"},
    {"models.loading"},
    {"models.start_check", "models.sizes", "models.heads"},
    {"models.drafters"},
    {"engine.request", "engine.times"},
    {"engine.schedule"},
    {"engine.messages"},
    {"engine.target"},
    {"engine.draft"},
    {"engine.rounds"},
    {"engine.engine"},
    {"engine.assembly"},
    {"job.ranks", "job.rollouts", "job.texts"},
    {"job.models", "job.totals"},
    {"job.rows"},
    {"job.run"},
    {"job.costs"},
    {"job.replica"},
    {"job.recording"},
    {"job.preview"},
    {"job.generate"},
    {"llm", "training"},
    {"results"},
    {"replicas"},
    {"lab"},
    {"cli"},
]
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}
TORCH_FREE = [
    "cli", "config", "data", "engine.request", "engine.schedule.plan", "engine.schedule.scheduler",
    "engine.schedule.stopping", "job.rollouts", "job.run.opening", "job.totals", "lab.plan.hardware",
    "lab.plan.simulate", "models.cache.pages", "models.heads.examples",
    "models.heads.info", "policies", "results.commands", "results.evaluate.config", "results.evaluate.run",
    "results.report", "results.runs", "rollout", "sampling.keys",
    "sampling.processing.row_table", "training.drafts.config", "training.heads.config",
    "training.heads.data", "utils",
]  # fmt: skip
MAX_LINES, MAX_CLASS_LINES = 400, 250


def module_name(path: Path) -> str:
    """``specdist.data.store.files``; a package's ``__init__.py`` is the package."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def imported_modules(path: Path) -> list[str]:
    """Every module of this repository that a file imports, also inside functions."""
    found = []
    for module, name in imported_names(path.read_text()):
        # What is imported may be a module of the package, or a name that the package exports.
        full = f"{module}.{name}"
        found.append(full if full in FILES else module)
    return [name for name in found if name.split(".")[0] in ("specdist", "jobs", "tests")]


def room_of(module: str) -> str:
    """The longest name of a room that the module's begins with; the package if there is none."""
    parts = module.split(".")[1:3]
    inner = ".".join(parts)
    return inner if inner in LEVELS else parts[0]


def test_every_room_has_its_place() -> None:
    """A new one is put into the order first."""
    # Packages whose rooms stand in the order hold no code themselves.
    divided = {name.split(".")[0] for name in LEVELS if "." in name}
    assert {room_of(module) for module in FILES if "." in module} == {*LEVELS, *divided}
    assert all(room_of(module) in LEVELS for module in FILES if module.count(".") > 1)
    assert all(ast.get_docstring(ast.parse(FILES[f"specdist.{name}"].read_text())) for name in divided)


def test_every_folder_says_what_it_is_for() -> None:
    """specdist/README.md prints the first sentence of each."""
    folders = [path for path in FILES.values() if path.name == "__init__.py"]
    wordless = [str(path) for path in folders if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not wordless, wordless


def test_imports_go_one_way() -> None:
    """From the entry points down to the ground; nothing in the package knows the jobs or the tests."""
    modules = [module for module in FILES if "." in module]
    assert len(modules) > 100
    wrong = [
        f"{module} must not import {imported}"
        for module in modules
        for imported in imported_modules(FILES[module])
        if not is_below(imported, module)
    ]
    assert not wrong, "\n".join(wrong)


def is_below(imported: str, module: str) -> bool:
    """In the same room, or in one of a line above."""
    if not imported.startswith("specdist."):
        return False
    own, other = room_of(module), room_of(imported)
    return own == other or LEVELS[other] < LEVELS[own]


def test_no_modules_import_each_other() -> None:
    """Also within a package: a cycle works only for some orders of imports."""
    try:
        TopologicalSorter({module: set(imported_modules(path)) for module, path in FILES.items()}).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' <- '.join(error.args[1])}")


def test_jobs_import_the_package_alone() -> None:
    """A job assembles; what two jobs need is in the package."""
    jobs = sorted((REPOSITORY / "jobs").glob("[a-z]*.py"))
    assert jobs
    for path in jobs:
        assert all(name.split(".")[0] in ("specdist", "_package") for name in imported_modules(path)), path


def test_what_needs_no_torch_imports_no_torch() -> None:
    """Seconds of import for a manifest, and a scheduler that could be tested only with tensors."""
    modules = [
        module
        for module in FILES
        if any(module == f"specdist.{free}" or module.startswith(f"specdist.{free}.") for free in TORCH_FREE)
    ]
    assert len(modules) > len(TORCH_FREE)
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'{name} imports torch'\n"
    )
    run(script, *modules)


def run(script: str, *words: str) -> str:
    """A script in a process of its own, which has imported nothing; its stderr."""
    ended = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def test_importing_the_package_costs_nothing() -> None:
    """``specdist.load_run`` is imported when it is asked for."""
    script = (
        "import sys, specdist\n"
        "heavy = {'torch', 'pyarrow', 'numpy', 'datasets', 'specdist.results.runs'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert callable(specdist.load_run) and 'specdist.results.runs' in sys.modules\n"
        "assert not {'torch', 'datasets'} & set(sys.modules)\n"
        "assert {'Run', 'load_run', 'SpeculativeLLM', 'SamplingOptions'} <= set(specdist.__all__)\n"
        "assert not hasattr(specdist, 'nothing')\n"
    )
    run(script)


def test_a_run_imports_no_more_than_it_needs() -> None:
    """Every library is a part of the seconds before the first token: DeepSpeed is for shards alone. Help is
    there at once."""
    script = (
        "import contextlib, gc, io, sys\n"
        "from specdist.cli import COMMANDS, heavy_imports\n"
        "for command in COMMANDS.values():\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        command(['--help'])\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "with heavy_imports():\n"
        "    import specdist.job.generate\n"
        "    assert not gc.isenabled()\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 100_000\n"
        "heavy = {'deepspeed', 'datasets', 'matplotlib', 'pandas', 'scipy', 'sklearn',\n"
        "         'llguidance', 'peft', 's3fs', 'torch._inductor.compile_fx'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    [line] = run(script).splitlines()
    assert line.endswith("importing torch and transformers")


def test_packages_hold_exports_only() -> None:
    """A docstring, imports, and ``__all__`` with just the names that are imported."""
    packages = [path for name, path in FILES.items() if path.name == "__init__.py" and name != "specdist"]
    assert len(packages) > 15
    wrong = [module_name(path) for path in packages if not holds_exports_only(path)]
    assert not wrong, wrong


def holds_exports_only(path: Path) -> bool:
    body = ast.parse(path.read_text()).body
    if body and isinstance(body[0], ast.Expr):
        body = body[1:]
    if not body:
        return True
    imported = [alias.asname or alias.name for node in body if isinstance(node, ast.ImportFrom)
                for alias in node.names]  # fmt: skip
    others = [node for node in body if not isinstance(node, ast.ImportFrom)]
    return (
        len(others) == 1
        and isinstance(others[0], ast.Assign)
        and ast.unparse(others[0].targets[0]) == "__all__"
        and sorted(ast.literal_eval(others[0].value)) == sorted(imported)
    )


def test_files_can_be_read_in_one_sitting() -> None:
    """At 400 lines a file is two."""
    lengths = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert len(lengths) > 200
    too_long = {name: length for name, length in lengths.items() if length > MAX_LINES}
    assert not too_long, too_long


def test_classes_can_be_read_in_one_sitting() -> None:
    """At 250 lines a class is two."""
    lengths = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for path in FILES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    assert len(lengths) > 200
    too_long = {name: length for name, length in lengths.items() if length > MAX_CLASS_LINES}
    assert not too_long, too_long


def test_a_policy_is_a_class_of_its_room_and_a_line_of_the_registry() -> None:
    """Every class in ``policies/lengths`` with a name, which --policy offers."""
    paths = (PACKAGE / "policies/lengths").glob("*.py")
    classes = [
        node for path in paths for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)
    ]
    named = {
        node.name for node in classes if any(ast.unparse(part).startswith("name = ") for part in node.body)
    }
    assert {policy.__name__ for policy in POLICIES.values()} == named
    assert set(get_args(get_type_hints(GenerateConfig)["policy"])) == {*POLICIES, "auto", "none"}
