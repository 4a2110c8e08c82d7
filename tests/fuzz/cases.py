"""A case: a reader, a damaged file, and how reading it must end."""

import shutil
import tempfile
from pathlib import Path

from fuzz.mutations import in_order, mutate
from fuzz.readers import READERS
from fuzz.worker import Outcome, Worker


class Fuzzer:
    """Reads damaged files in a child process; a context manager."""

    def __init__(self):
        self.root = Path(tempfile.mkdtemp(prefix="tribe-fuzz-"))
        self.worker = Worker()
        self._valid, self._right = {}, {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.worker.stop()
        shutil.rmtree(self.root)

    def valid(self, name: str) -> tuple[Path, bytes]:
        """The path of the reader's valid file in its folder, and its contents."""
        if name not in self._valid:
            folder = self.root / "valid" / name
            folder.mkdir(parents=True)
            path = READERS[name].make(folder)
            content = path.read_bytes()
            if READERS[name].format == "safetensors":
                content = in_order(content)
                path.write_bytes(content)
            self._valid[name] = path.relative_to(folder), content
        return self._valid[name]

    def right(self, name: str) -> Outcome:
        """How reading the valid file ends."""
        if name not in self._right:
            self._right[name] = self._read(name, *self.valid(name))
            assert self._right[name].kind == "read", f"the valid file of {name}: {self._right[name]}"
        return self._right[name]

    def seeded(self, name: str, seed: int) -> bytes:
        """The damaged file of a seed."""
        return mutate(READERS[name].format, self.valid(name)[1], f"{name} {seed}")

    def read(self, name: str, content: bytes, *, sealed: bool | None = None) -> Outcome:
        """Read a damaged file. If it is sealed, it must be refused or have the contents of the valid one."""
        path, _ = self.valid(name)
        outcome = self._read(name, path, content)
        sealed = READERS[name].sealed if sealed is None else sealed
        if sealed and outcome.kind == "read" and outcome != self.right(name):
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
