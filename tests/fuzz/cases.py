"""A case: a reader, a damaged file, and how reading it must end."""

import shutil
import tempfile
from pathlib import Path

from fuzz.mutations import mutate
from fuzz.readers import READERS
from fuzz.worker import Outcome, Worker


class Fuzzer:
    """Reads damaged files in a child process; a context manager."""

    def __init__(self):
        self.root = Path(tempfile.mkdtemp(prefix="tribe-fuzz-"))
        self.worker = Worker()
        self._valid = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.worker.stop()
        shutil.rmtree(self.root)

    def valid(self, name: str) -> tuple[Path, bytes, Outcome]:
        """The path in the reader's folder and the contents of its valid file, and how reading that ends."""
        if name not in self._valid:
            folder = self.root / "valid" / name
            folder.mkdir(parents=True)
            path = READERS[name].make(folder)
            content = path.read_bytes()
            relative = path.relative_to(folder)
            self._valid[name] = relative, content, self._read(name, relative, content)
            assert self._valid[name][2].kind == "read", f"the valid file of {name}: {self._valid[name][2]}"
        return self._valid[name]

    def seeded(self, name: str, seed: int) -> bytes:
        """The damaged file of a seed."""
        return mutate(READERS[name].format, self.valid(name)[1], f"{name} {seed}")

    def read(self, name: str, content: bytes, *, sealed: bool | None = None) -> Outcome:
        """Read a damaged file. If it is sealed, it must be refused or have the contents of the valid one."""
        path, _, right = self.valid(name)
        outcome = self._read(name, path, content)
        if (READERS[name].sealed if sealed is None else sealed) and outcome.kind == "read" and outcome != right:
            return Outcome("other contents", "it was read although its contents are not those that were written")
        return outcome

    def _read(self, name: str, path: Path, content: bytes) -> Outcome:
        folder = self.root / f"fuzz-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.root / "valid" / name, folder)
        (folder / path).unlink(missing_ok=True)
        (folder / path).write_bytes(content)
        return self.worker.read(name, folder)

    def keep(self, name: str, content: bytes) -> Path:
        """Keep the file of a failure, to look at it."""
        file = tempfile.NamedTemporaryFile(prefix=f"fuzz-{name}-", delete=False)  # noqa: SIM115
        with file:
            file.write(content)
        return Path(file.name)

    def explain(self, name: str, content: bytes, outcome: Outcome) -> str:
        """What went wrong with a file, and how to read it again."""
        again = f"PYTHONPATH=tests python -m fuzz --reader {name} --file {self.keep(name, content)}"
        return f"{name}: {outcome.kind}\n{outcome.text}\nRead the same file again: {again}"
