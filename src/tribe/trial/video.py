"""Frames of a video file through PyAV, the extra `video`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tribe.data.images import PIXELS
from tribe.trial.frames import FrameFit, ReadFrame, Recording, file_digest

CONTAINERS = (  # files of which each holds its frames; a playlist would name other files
    *("mov", "mp4", "matroska", "webm", "avi", "mpegts", "mpeg", "mpegvideo", "flv", "gif", "ogg", "asf", "h264"),
    *("hevc", "mjpeg", "m4v", "ivf", "mxf", "nut", "av1"),
)
OPTIONS = {"protocol_whitelist": "file", "format_whitelist": ",".join(CONTAINERS)}
TIMELESS = -(2**62)  # the time of a frame that has none
PLAUSIBLE = 0.98  # of the frames that a duration promises: durations are rounded


def require_av() -> ModuleType:
    """Return PyAV, or raise an error that says how to install it."""
    try:
        import av
    except ImportError as error:
        raise ImportError("a video needs PyAV: pip install 'tribe-tta[video]' (or pip install av)") from error
    module: ModuleType = av
    return module


class Video(Recording):
    """The frames of a video, every n-th. It may end in the middle: what is there is played, and a remark says so."""

    def __init__(self, place: Path, every: int, fit: FrameFit) -> None:
        self.av, self.every = require_av(), every
        super().__init__(place, fit, None)
        with self._opened() as (_, stream, promised):
            self.length = None if promised is None else -(-promised[0] // every)
            self.base = float(stream.time_base or 0)

    def read(self) -> Iterator[ReadFrame]:
        """Decode the video from its beginning."""
        self.times = []
        count, damaged = 0, 0
        with self._opened() as (container, stream, promised):
            for frame in self._decoded(container, stream):
                if frame is None:
                    damaged += 1
                    continue
                if count % self.every == 0:
                    self.times.append(TIMELESS if frame.pts is None else frame.pts)
                    yield ReadFrame(self._pixels(frame))
                count += 1
        if damaged:
            self._remark(f"{self.place}: {damaged} damaged parts of the video were left out")
        if promised is not None and count < promised[0] * (1 if promised[1] else PLAUSIBLE):
            about = "" if promised[1] else "about "
            last = self.name(len(self.times) - 1) if self.times else "0 s"
            self._remark(
                f"{self.place} ends in the middle: {count:,} of {about}{promised[0]:,} frames are there, up to {last}; "
                "these were played"
            )

    def frame(self, index: int) -> Tensor:
        """Decode one frame that was played: from the key frame before it, or from the beginning."""
        wanted = self.times[index]
        with self._opened() as (container, stream, _):
            if wanted == TIMELESS:
                for i, frame in enumerate(one for one in self._decoded(container, stream) if one is not None):
                    if i == index * self.every:
                        return self._pixels(frame)
            else:
                with contextlib.suppress(self.av.FFmpegError):  # else it is read from its beginning
                    container.seek(wanted, stream=stream, backward=True)
                for frame in self._decoded(container, stream):
                    if frame is not None and frame.pts is not None and frame.pts >= wanted:
                        return self._pixels(frame)
        raise ValueError(f"frame {index} of {self.place} cannot be read again")

    def name(self, index: int) -> str:
        """Return its time."""
        if index >= len(self.times) or self.times[index] == TIMELESS or not self.base:
            return ""
        minutes, seconds = divmod(round(self.times[index] * self.base, 3), 60)
        return f"{int(minutes)}:{seconds:06.3f}"

    def digest(self) -> str:
        """Hash the beginning, the end and the size of the file."""
        return file_digest(self.place, self.every)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any, tuple[int, bool] | None]]:
        """Open the file: the container, its video stream, and how many frames it promises, exactly or not."""
        try:
            container = self.av.open(str(self.place), mode="r", options=OPTIONS)
        except self.av.FFmpegError as error:
            reason = (error.strerror or str(error)).lower()
            raise ValueError(
                f"{self.place} cannot be read as a video: {reason}. An mp4 file that was cut short has no index and "
                "cannot be played: record to mkv, or repair it. A recording may also be a folder of pictures"
            ) from error
        with container:
            if not container.streams.video:
                raise ValueError(f"{self.place} holds no video")
            stream = container.streams.video[0]
            if stream.width * stream.height > PIXELS:
                raise ValueError(f"{self.place}: {stream.width}x{stream.height} pixels; expected {PIXELS:,} at most")
            stream.thread_type = "AUTO"
            promised = None
            if stream.frames:
                promised = stream.frames, True
            elif container.duration and stream.average_rate:
                promised = round(container.duration / 1e6 * float(stream.average_rate)), False
            yield container, stream, promised

    def _decoded(self, container: Any, stream: Any) -> Iterator[Any]:
        """Yield frames, and None for a part that cannot be decoded."""
        packets = iter(container.demux(stream))
        while True:
            try:
                packet = next(packets, None)
            except self.av.FFmpegError:
                yield None
                return
            if packet is None:
                return
            try:
                frames = packet.decode()
            except self.av.FFmpegError:
                yield None
                continue
            yield from frames

    @staticmethod
    def _pixels(frame: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(frame.to_ndarray(format="rgb24").transpose(2, 0, 1)))
