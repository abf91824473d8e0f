"""What pyproject.toml cannot say: the wheel has the YAML of `staticmem/devices` as JSON too, which is read faster."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildPackage(build_py):
    """Copies the package, then writes the JSON into the copy; in an editable installation, which git ignores, into the
    package itself."""

    def run(self) -> None:
        super().run()
        sys.path.insert(0, str(ROOT))
        from staticmem.devices.documents import write_json

        write_json((ROOT if self.editable_mode else Path(self.build_lib)) / "staticmem" / "devices")


setup(cmdclass={"build_py": BuildPackage})
