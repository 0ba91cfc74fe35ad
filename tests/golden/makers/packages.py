"""Packages that are not installed but taken apart: old ones that exclude what is installed, and ones of which one file counts."""

import importlib.util
import subprocess
import sys
import tarfile
import types
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parents[3] / "target" / "golden"


def unpacked(package: str, version: str) -> Path:
    """The files of a package of PyPI, unpacked below `target/golden`: its wheel, or its source where it has none."""
    folder = CACHE / f"{package}-{version}"
    if not folder.is_dir():
        archives = CACHE / "archives" / folder.name
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(archives), f"{package}=={version}"]
        # The wheel for this Python and system, whichever these are: only its Python files are read.
        wheel = [*pip, "--only-binary=:all:", "--platform=manylinux2014_x86_64", "--python-version=3.11"]
        if subprocess.run(wheel, stderr=subprocess.DEVNULL).returncode != 0:
            subprocess.run(pip, check=True)
        [archive] = archives.iterdir()
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as files:
                files.extractall(folder)
        else:
            with tarfile.open(archive) as files:
                files.extractall(folder, filter="data")
            [inner] = folder.iterdir()
            folder = inner
    elif not any(folder.glob("*.dist-info")):
        [folder] = folder.iterdir()
    return folder


def module(path: Path, stubs: dict | None = None) -> types.ModuleType:
    """One file as a module, without the package around it. `stubs`: what it imports from that package, by module name."""
    for name, contents in (stubs or {}).items():
        stub = types.ModuleType(name)
        stub.__dict__.update(contents)
        sys.modules[name] = stub
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded
