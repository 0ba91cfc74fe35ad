"""Packages that are not installed but taken apart: old ones that exclude what is installed, and ones of which one file counts."""

import subprocess
import sys
import tarfile
import types
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parents[3] / "target" / "golden"


def unpacked(package: str, version: str, more: tuple[str, ...] = ()) -> Path:
    """The files of a package of PyPI, unpacked below `target/golden`: its wheel, or its source where it has none.
    Of a wheel these are its Python files and chat templates, and those with an ending of `more`."""
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
                files.extractall(folder, [name for name in files.namelist() if name.endswith((".py", ".jinja", "METADATA", *more))])
        else:
            with tarfile.open(archive) as files:
                files.extractall(folder, filter="data")
            [inner] = folder.iterdir()
            folder = inner
    elif not any(folder.glob("*.dist-info")):
        [folder] = folder.iterdir()
    return folder


def bare(name: str, folder: Path):
    """Makes `name` a package whose modules are the files of `folder`, without running its `__init__.py`: that would import kernels, or what
    newer versions of other packages no longer have. What is imported below it is the package's own code."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package
