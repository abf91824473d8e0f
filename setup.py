"""What pyproject.toml cannot say: the wheel has the YAML of `staticmem/devices` as JSON too, which is read faster."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildPackage(build_py):
    """Writes the JSON beside the YAML, where git ignores it, then copies the package: a checkout that is run in place
    has the JSON too."""

    def run(self) -> None:
        sys.path.insert(0, str(ROOT))
        from staticmem.devices.documents import write_json

        write_json(ROOT / "staticmem" / "devices")
        super().run()


setup(cmdclass={"build_py": BuildPackage})
