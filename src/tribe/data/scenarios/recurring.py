"""The whole stream N times."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from tribe.data.scenarios.real_world import Composed
from tribe.data.scenarios.scenario import Visit, register
from tribe.fields import is_whole, require


@register("recurring")
@dataclass(frozen=True)
class Recurring(Composed):
    """PTTA repeated, by default with the same samples in the same order each time."""

    sigma: float | None = 0.1
    rounds: int = 20  # N
    _: KW_ONLY
    redraw: bool = False  # True: every round draws its own samples and order

    paper = "Hoang et al., Persistent Test-time Adaptation in Recurring Testing Scenarios, NeurIPS 2024"

    def __post_init__(self) -> None:
        require(is_whole(self.rounds, least=1), "rounds is how often the stream is played, at least 1", self.rounds)
        super().__post_init__()

    def visits(self, order: Sequence[int]) -> list[Visit]:
        """Return all domains, N times."""
        return super().visits(order) * self.rounds
