"""What the wheel holds beside the packages: the top-level folders and the suites, below ``samebytes/``.

All else is in pyproject.toml. A checkout, and an editable installation of it, use the folders where they are.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
SHIPPED = {
    "manifests": "manifests",
    "splits": "splits",
    "golden": "golden",
    "requirements": "requirements",
    "tests/families": "suites",
    "tests/regressions": "suites/regressions",
}
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc")


class BuildWhole(build_py):
    """Copies the folders after the packages were built."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "samebytes"
        shutil.rmtree(target, ignore_errors=True)  # nothing of an earlier build
        for source, name in SHIPPED.items():
            shutil.copytree(HERE / source, target / name, ignore=IGNORED, dirs_exist_ok=True)
        for folder, text in {"": "The data and the suites of samebytes.", "suites": "The suites."}.items():
            (target / folder / "__init__.py").write_text(f'"""{text}"""\n')
        (target / "suites/regressions/__init__.py").write_text('"""Cases of faults that were found."""\n')


setup(cmdclass={"build_py": BuildWhole})
