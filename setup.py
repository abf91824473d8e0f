"""What pyproject.toml cannot say: the wheel has the YAML of `staticmem/devices` as JSON too, which is read faster, and
the models that `models:NAME` means."""

import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildPackage(build_py):
    """Writes the JSON and the models into the package, where git ignores them, then copies the package: a checkout that
    is run in place has them too."""

    def run(self) -> None:
        sys.path.insert(0, str(ROOT))
        from staticmem.devices.documents import write_json

        write_json(ROOT / "staticmem" / "devices")
        examples = ROOT / "staticmem" / "examples"
        examples.mkdir(exist_ok=True)
        for model in (ROOT / "models").glob("*.pt2"):
            shutil.copyfile(model, examples / model.name)
        super().run()


setup(cmdclass={"build_py": BuildPackage})
