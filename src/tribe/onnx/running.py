"""Run a model file with ONNX Runtime; the states of streams stay in the runtime's memory."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np

from tribe.onnx.states import ModelFileError, State

Array = np.ndarray[Any, Any]


class Held:
    """The state of a stream. It is replaced, not changed."""

    def __init__(self, values: Mapping[str, Any], folded: dict[str, Any] | None = None) -> None:
        self.values = dict(values)  # by name: of the runtime where steps change it, else an array
        self.folded = folded  # the weights of a tuned network with these statistics; None: not computed yet

    def array(self, name: str) -> Array:
        """Return one tensor."""
        value = self.values[name]
        array: Array = value if isinstance(value, np.ndarray) else value.numpy()
        return array

    def arrays(self) -> State:
        """Return a copy of all tensors."""
        copies = {}
        for name in self.values:
            array = self.array(name)
            # The runtime's int64 equals numpy's and is another type, which not every library takes.
            copies[name] = np.empty(array.shape, np.dtype(str(array.dtype)))
            copies[name][...] = array
        return copies


class ModelRunner:
    """A model in ONNX Runtime, perhaps tuned for this machine: see `tribe.onnx.tuning`."""

    def __init__(self, path: str | PathLike[str], threads: int | None, providers: list[str] | None) -> None:
        try:
            import onnxruntime
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "a session needs onnxruntime: pip install 'tribe-tta[onnx]'", name="onnxruntime"
            ) from error
        self.options, self.providers = onnxruntime.SessionOptions(), providers or ["CPUExecutionProvider"]
        self.options.log_severity_level = 3
        if threads is not None:
            self.options.intra_op_num_threads = threads
        try:
            self.model = self._opened(str(path))
        except Exception as error:  # ONNX Runtime has a class for each of its codes
            version = onnxruntime.__version__
            raise ModelFileError(f"{path} cannot be opened by ONNX Runtime {version}: {error}") from error
        self.metadata: dict[str, str] = self.model.get_modelmeta().custom_metadata_map
        self.outputs = [output.name for output in self.model.get_outputs()]
        self.folding: Any = None  # a model that folds statistics into weights

    def _opened(self, model: str | bytes) -> Any:
        import onnxruntime

        return onnxruntime.InferenceSession(model, self.options, providers=self.providers)

    def tuned(self, path: str | PathLike[str]) -> "ModelRunner":
        """Return the same for the processor of this machine."""
        from tribe.onnx.tuning import tune

        made = tune(path)
        faster = object.__new__(ModelRunner)
        faster.options, faster.providers, faster.metadata = self.options, self.providers, self.metadata
        faster.model, faster.outputs = self._opened(made.model), self.outputs
        faster.folding = None if made.folding is None else self._opened(made.folding)
        return faster

    def held(self, state: Mapping[str, Array], moving: list[str]) -> Held:
        """Return a state in the runtime's memory, of which steps change what is ``moving``."""
        return Held({name: self._value(t) if name in moving else t for name, t in state.items()})

    @staticmethod
    def _value(array: Array) -> Any:
        import onnxruntime

        return onnxruntime.OrtValue.ortvalue_from_numpy(np.array(array, order="C"))

    def step(self, held: Held, given: Mapping[str, Array]) -> tuple[dict[str, Array], Held]:
        """Predict images, and return the next state, too; ``given`` are the inputs beside the state."""
        feeds = {name: held.values[name] for name in held.values if f"next.{name}" in self.outputs}
        feeds |= {name: self._value(array) for name, array in given.items()}
        names = list(self.outputs)
        if self.folding is not None:
            held.folded = held.folded or self._fold(held)
            feeds |= held.folded
            names.append("observed")
        results = dict(zip(names, self.model.run_with_ort_values(names, feeds), strict=True))
        observed = "observed" not in results or bool(results.pop("observed").numpy())
        after = {name.removeprefix("next."): value for name, value in results.items() if name.startswith("next.")}
        predicted = {name: value.numpy() for name, value in results.items() if not name.startswith("next.")}
        return predicted, Held({**held.values, **after}, None if observed else held.folded)

    def _fold(self, held: Held) -> dict[str, Any]:
        """Return the weights of the network with these statistics."""
        feeds = {value.name: held.values[value.name] for value in self.folding.get_inputs()}
        names = [output.name for output in self.folding.get_outputs()]
        return dict(zip(names, self.folding.run_with_ort_values(names, feeds), strict=True))

    def agrees(self, other: "ModelRunner", held: Held, given: Mapping[str, Array]) -> bool:
        """Return whether another runner computes the same."""
        (logits, state), (others, after) = self.step(held, given), other.step(Held(held.values), given)
        pairs = [(logits[name], others[name]) for name in logits]
        pairs += [(state.array(name), after.array(name)) for name in state.values]
        pairs = [(a.astype(float), b.astype(float)) for a, b in pairs]  # booleans have no difference
        close = (np.abs(a - b).max(initial=0) <= 1e-3 * max(1.0, float(np.abs(a).max(initial=0))) for a, b in pairs)
        return all(close)
