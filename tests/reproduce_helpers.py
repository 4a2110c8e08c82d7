"""Calls of `tribe reproduce`, for tests."""

from commands import tribe_command

EMBEDDED = ("--set", "dataset=live-mnist-c", "--set", "model=compact", "--device", "cpu")
SMALL = (*EMBEDDED, "--set", "dataset.corruptions=('impulse_noise',)")  # a domain of 1,000 to 10,000 images
MINE = """
from dataclasses import dataclass
from tribe.methods.source import BN

@dataclass(frozen=True)
class Mine(BN):
    '''Batch statistics again.'''
    broken: bool = False

    def init(self, net, streams=1, seed=0):
        print("not for stdout, which programs read")
        if self.broken:
            raise ValueError("mine is broken")
        return super().init(net, streams, seed)
"""


def call(*arguments):
    return tribe_command("reproduce", *arguments)
