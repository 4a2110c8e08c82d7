"""Readers that fail in every way that the fuzzer must find."""

import os
import signal

import numpy as np

BROKEN = {  # the function below, and what the fuzzer calls it
    "crash": "crash",
    "memory": "memory",
    "too_much": "memory",
    "undocumented": "undocumented KeyError",
    "unnamed": "unnamed",
    "exit": "undocumented SystemExit",
}


class BrokenReader:
    """Reads as one of the functions here."""

    def __init__(self, name):
        self.read = globals()[name]


def crash(folder):
    os.kill(os.getpid(), signal.SIGSEGV)


def memory(folder):
    return str(np.ones(5 << 28, np.uint8)[-1])  # 1.25 GiB


def too_much(folder):
    try:
        np.ones(1 << 40, np.uint8)
    except MemoryError as error:
        raise ValueError(f"{folder} is damaged") from error


def undocumented(folder):
    return {}["key"]


def unnamed(folder):
    raise ValueError("damaged")


def exit(folder):
    raise SystemExit(1)
