"""Puts conf/ into the wheel as tagc/conf, where an installed tagc looks for it; the rest: pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConf(build_py):
    """The usual build of the package, and conf/ beside it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree(Path(__file__).parent / "conf", Path(self.build_lib, "tagc", "conf"), dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithConf})
