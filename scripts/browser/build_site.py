"""Builds the page that runs staticmem in a browser: a folder for any web server, or for `python -m http.server`.

    python scripts/browser/build_site.py OUT
    python -m http.server --directory OUT      # then open http://localhost:8000

OUT gets the files of `docs/browser`, the recordings of known models, a wheel of this checkout, and Pyodide's runtime
from its package on npm, whose digest is checked. `--wheel FILE` takes a wheel that is there, `--pyodide FILE` the
package of npm, so that nothing is fetched.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "browser"
# registry.npmjs.org/pyodide/314.0.7: its `dist.integrity`. The version is that of its Python, 3.14
PYODIDE = "https://registry.npmjs.org/pyodide/-/pyodide-314.0.7.tgz"
INTEGRITY = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "pyodide-lock.json", "python_stdlib.zip")


def build_wheel(folder: Path) -> Path:
    """A wheel of this checkout."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    return next(folder.glob("staticmem-*.whl"))


def fetch_pyodide(given: Path | None) -> bytes:
    """Pyodide's package, whose digest is the one that is written here."""
    if given is not None:
        data = given.read_bytes()
    else:
        with urllib.request.urlopen(PYODIDE, timeout=120) as answer:
            data = answer.read(64 << 20)
    if base64.b64encode(hashlib.sha512(data).digest()).decode() != INTEGRITY:
        raise SystemExit(f"{given or PYODIDE} is not the package whose digest is known")
    return data


def unpack_runtime(data: bytes, folder: Path) -> None:
    """The five files of the runtime that a page needs."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for name in RUNTIME:
            member = archive.extractfile(f"package/{name}")
            if member is None:
                raise SystemExit(f"Pyodide's package has no {name}")
            (folder / name).write_bytes(member.read())


def facts(wheel: str) -> dict[str, object]:
    """What the page offers: models, cards, optimizers; and the wheel that it loads."""
    from staticmem.devices.gpus import cards
    from staticmem.scenario.optimizers import OPTIMIZERS
    from staticmem.version import __version__

    models = json.loads((PAGE / "models" / "models.json").read_text("utf-8"))
    gpus = [
        {"slug": slug, "name": card.name, "class": card.price_class or "other", "usable_bytes": card.usable}
        for slug, card in cards().items()
        if card.vendor == "NVIDIA"
    ]
    return {"version": __version__, "wheel": wheel, "models": models, "gpus": gpus, "optimizers": list(OPTIMIZERS)}


def build(out: Path, wheel: Path | None, pyodide: Path | None) -> None:
    """Writes the folder."""
    out.mkdir(parents=True, exist_ok=True)
    unpack_runtime(fetch_pyodide(pyodide), out / "pyodide")
    with tempfile.TemporaryDirectory() as scratch:
        built = wheel or build_wheel(Path(scratch))
        shutil.copy(built, out / built.name)
    for name in ("index.html", "app.js", "worker.js", "style.css"):
        shutil.copy(PAGE / name, out / name)
    shutil.copy(ROOT / "staticmem" / "report" / "html" / "assets" / "base.css", out / "base.css")
    shutil.copytree(PAGE / "models", out / "models", dirs_exist_ok=True)
    (out / "build.json").write_text(json.dumps(facts(built.name)) + "\n", "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--wheel", type=Path, metavar="FILE")
    parser.add_argument("--pyodide", type=Path, metavar="FILE")
    options = parser.parse_args()
    build(options.out, options.wheel, options.pyodide)
    print(f"Wrote {options.out}. Next: python -m http.server --directory {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
