"""Check a wheel in fresh environments: ``python tests/wheels.py dist/*.whl python3.11 python3.12`` (`make dist-test`).

In an environment with the wheel alone, the library imports, its doctests pass, and the command says which extra it
needs. With the extras that the documents name, `tribe run` plays a short stream in an empty folder.

torch from PyPI brings gigabytes of CUDA packages on Linux. Where pip finds no other torch, the wheel is checked without
it: pip accepts its metadata, and every module compiles without a warning. TORCH=any installs them all the same.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINNED = (ROOT / "constraints.txt").read_text().split("torch==")[1].split()[0]
EXTRAS = "cli,images,plots"  # as in docs/commands.md
SHORT = ("--methods", "source,tribe", "--set", "scenario.imbalance=1000000", "--set", "dataset.corruptions=motion_blur")

ALONE = """
import doctest, importlib, pkgutil, sys
import tribe
from tribe.testing import images, small_network

assert "site-packages" in tribe.__file__, tribe.__file__
assert tribe.adapt(small_network())(images(1, 6)[0]).shape == (6, 4)
EXTRAS = ("typer", "rich", "ray", "h11", "starlette", "msgspec", "uvicorn", "prometheus_client", "grpc", "google")
names = [module.name for module in pkgutil.walk_packages(tribe.__path__, "tribe.")]
tried = failed = 0
missing = []
for name in ("tribe", *names):
    if name.endswith("__main__"):
        continue
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name.partition(".")[0] in EXTRAS, error
        missing.append(name)
        continue
    if name == "tribe.experiments.statistics":  # its example needs scipy, of the extra "cli"
        continue
    result = doctest.testmod(module)
    tried, failed = tried + result.attempted, failed + result.failed
assert tried > 100 and not failed, (tried, failed)
print(f"{tribe.__version__}: {tried} examples of doctests; {len(missing)} of {len(names)} modules need an extra")
"""


class Failed(Exception):
    """A command ended with an error."""


def run(*command, cwd=None, **environment):
    """The output of a command that ends well; it sees no other installation of the library."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHONPATH", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env={**kept, **environment}, text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def built(folder):
    """The wheel and the source archive of this repository, built into a folder."""
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    (wheel,), (archive,) = Path(folder).glob("*.whl"), Path(folder).glob("*.tar.gz")
    return wheel, archive


def environment(python, folder):
    """A fresh environment of a Python; the path of its interpreter."""
    run(python, "-m", "venv", folder)
    return Path(folder) / "bin/python"


def install(python, *what):
    """Install packages, with the torch that this repository is tested with."""
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "-c", ROOT / "constraints.txt", *what)


def brings_cuda(python):
    """Whether pip would install a torch with CUDA: on Linux, unless it finds the build for CPUs."""
    versions = run(python, "-m", "pip", "index", "--disable-pip-version-check", "versions", "torch")
    return sys.platform == "linux" and f"{PINNED}+cpu" not in versions


def check(wheel, python, folder):
    """Install a wheel for a Python and use it; returns what was found, in words."""
    folder = Path(folder)
    own = environment(python, folder / "environment")
    if os.environ.get("TORCH") != "any" and brings_cuda(own):
        return f"{check_without_torch(wheel, own, folder)}; torch would bring CUDA's packages: not installed, not run"
    install(own, wheel)
    found = run(own, "-c", ALONE, cwd=folder).strip()
    command = own.with_name("tribe")
    bare = subprocess.run([command, "run"], cwd=folder, text=True, capture_output=True, check=False)
    assert bare.returncode, "tribe run without the extra cli"
    assert "pip install 'tribe-tta[cli]'" in bare.stderr, bare.stderr
    install(own, f"{wheel}[{EXTRAS}]")
    empty = folder / "empty"
    empty.mkdir()
    shown = run(command, "run", *SHORT, cwd=empty)
    assert "tribe" in shown, shown
    assert list(empty.glob("runs/*.svg")), sorted(empty.rglob("*"))
    return f"{found}; tribe run played a stream"


def check_without_torch(wheel, python, folder):
    """What can be said of a wheel without its dependencies."""
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", wheel)
    place = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    run(python, "-W", "error", "-m", "compileall", "-q", "-f", Path(place) / "tribe", cwd=folder)
    return "all modules compile"


def find(name):
    """The Python of a name, such as python3.12: on the path, or one of pyenv's."""
    known = [shutil.which(name), *sorted(Path.home().glob(f".pyenv/versions/*/bin/{name}"))]
    for python in filter(None, known):
        if subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    return None


def main(wheel, *names):
    """Check a wheel with each Python that is found; the exit status is 1 if one of them fails."""
    bad = False
    for name in names:
        python = find(name)
        if python is None:
            print(f"{name}: not found, not checked", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(f"{name}: {check(Path(wheel).resolve(), python, folder)}", flush=True)
            except (Failed, AssertionError) as error:
                bad = True
                print(f"{name}: FAILED\n{error}", flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main(*sys.argv[1:])
