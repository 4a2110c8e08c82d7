"""The page of a trial: a server for one person on this machine, who looks at frames and labels them.

It listens on 127.0.0.1 alone. The address holds a token, so that other users of the machine and pages of other sites
cannot ask it. See docs/decisions/0050-trials.md.
"""

import hmac
import json
import secrets
import struct
import threading
import zlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from tribe.io import json_files
from tribe.trial.frames import Recording
from tribe.trial.labels import write_labels
from tribe.trial.trial import Trial, check_label

ASSETS = {
    "": ("trial.html", "text/html"),
    "trial.css": ("trial.css", "text/css"),
    "trial.js": ("trial.js", "text/javascript"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
SIDES = {"frames": 960, "thumbs": 256}  # pixels of the longer side of a picture, at most
PER_PAGE = 24  # frames that differ, at once
MOST_BODY = 4096  # bytes
SECONDS = 20  # until a connection that does nothing is closed


class Refusal(Exception):
    """A request that is not answered, and why."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class LabelSession:
    """A trial that is being labelled: every label is in the file before the answer."""

    def __init__(self, trial: Trial, recording: Recording, path: Path) -> None:
        self.trial, self.recording, self.path = trial, recording, path
        self._lock = threading.Lock()

    def summary(self) -> dict[str, Any]:
        """Return what the page shows first, and the state of the labels."""
        trial = self.trial
        found = trial.json()
        windows = [{"end": w.end, "source": w.source, "adapted": w.adapted} for w in trial.windows]
        shown = ("frames", "differing", "estimates", "cost", "alarms", "remarks", "method", "recording")
        return {
            **{name: found[name] for name in shown},
            "name": Path(found["recording"]["place"]).name,
            "classes": list(trial.classes),
            "windows": windows,
            "file": self.path.name,
            "state": self.state(),
        }

    def state(self) -> dict[str, Any]:
        """Return the verdict, how many labels there are, and the frame to label next."""
        trial = self.trial
        upcoming = trial.draw[trial.counted : trial.counted + 2].tolist()
        return {
            "verdict": trial.verdict.json(),
            "labels": len(trial.labels),
            "counted": trial.counted,
            "next": self._card(upcoming[0]) if upcoming else None,
            "after": upcoming[1] if len(upcoming) > 1 else None,
        }

    def telling(self, start: int) -> dict[str, Any]:
        """Return some of the frames that differ, the most telling first."""
        frames = self.trial.telling[start : start + PER_PAGE].tolist()
        left = len(self.trial.telling) - start - len(frames)
        return {"cards": [self._card(frame) for frame in frames], "left": left}

    def label(self, frame: int, label: int) -> dict[str, Any]:
        """Label a frame on which the two differ."""
        with self._lock:
            check_label(frame, label, self.trial.frames, self.trial.classes)
            if frame not in self.trial.differing:
                raise ValueError(f"on frame {frame} both predict the same: a label decides nothing")
            self._change({**self.trial.labels, frame: label})
            return self.state()

    def undo(self) -> dict[str, Any]:
        """Take back the last label, in the order of the draw."""
        with self._lock:
            if count := self.trial.counted:
                last = int(self.trial.draw[count - 1])
                self._change({frame: label for frame, label in self.trial.labels.items() if frame != last})
            return self.state()

    def picture(self, frame: int, side: int) -> bytes:
        """Return a frame as it was recorded, made smaller if it is large: a PNG."""
        if not 0 <= frame < self.trial.frames:
            raise Refusal(404, f"there is no frame {frame}")
        return encode_png(_shrunk(self.recording.frame(frame), side))

    def _change(self, labels: dict[int, int]) -> None:
        changed = self.trial.labelled(labels)
        write_labels(self.path, changed.labels, changed, self.recording)
        self.trial = changed

    def _card(self, frame: int) -> dict[str, Any]:
        trial, columns = self.trial, self.trial.columns
        place = int((trial.differing < frame).sum())  # the row of the candidates
        return {
            "frame": frame,
            "name": self.recording.name(frame),
            "source": int(columns.source[frame]),
            "adapted": int(columns.adapted[frame]),
            "source_confidence": float(columns.source_confidence[frame]),
            "adapted_confidence": float(columns.adapted_confidence[frame]),
            "candidates": columns.candidates[place].tolist(),
            "label": trial.labels.get(frame),
        }


class LabelServer:
    """A server of the page, on a free port of 127.0.0.1; a context manager, or `serve_forever`."""

    def __init__(self, session: LabelSession, port: int = 0) -> None:
        self.session, self.token = session, secrets.token_urlsafe(16)
        self._http = ThreadingHTTPServer(("127.0.0.1", port), _handler(session, self.token))
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.1,), daemon=True)

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        return f"http://127.0.0.1:{self._http.server_port}/{self.token}/"

    def serve_forever(self) -> None:
        """Answer requests until KeyboardInterrupt."""
        with self:
            self._thread.join()

    def __enter__(self) -> "LabelServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()


def _handler(session: LabelSession, token: str) -> type[BaseHTTPRequestHandler]:
    """Return the class that answers requests to a session."""

    class PageHandler(BaseHTTPRequestHandler):
        """One request."""

        timeout = SECONDS

        def do_GET(self) -> None:
            """Answer with the page, its numbers or a picture."""
            self._answer(self._get)

        def do_POST(self) -> None:
            """Label a frame, or take a label back."""
            self._answer(self._post)

        def _answer(self, work: Callable[[str], tuple[bytes, str]]) -> None:
            try:
                content, kind = work(self._place())
                status = 200
            except Refusal as error:
                status, content, kind = error.status, json.dumps({"error": str(error)}).encode(), "application/json"
            except (ValueError, OSError) as error:
                status, content, kind = 400, json.dumps({"error": str(error)}).encode(), "application/json"
            self.send_response(status)
            text = kind.startswith("text/")
            for name, value in {**HEADERS, "Content-Type": f"{kind}; charset=utf-8" if text else kind}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _place(self) -> str:
            """Return what is asked for, after the token; refuse other hosts and wrong tokens."""
            port = int(self.connection.getsockname()[1])
            hosts = self.headers.get_all("Host", [])
            if len(hosts) != 1 or hosts[0] not in (f"127.0.0.1:{port}", f"localhost:{port}"):
                raise Refusal(421, "this server is asked as 127.0.0.1 alone")
            origin = self.headers.get("Origin")
            if origin is not None and origin != f"http://{hosts[0]}":
                raise Refusal(403, "a page of another site asks")
            first, _, rest = self.path.removeprefix("/").partition("/")
            if not hmac.compare_digest(first.encode(), token.encode()):
                raise Refusal(403, "the address lacks the token that `tribe try` has printed")
            return rest

        def _get(self, place: str) -> tuple[bytes, str]:
            if place in ASSETS:
                name, kind = ASSETS[place]
                return files("tribe.trial").joinpath(name).read_bytes(), kind
            if place == "trial.json":
                return _json(session.summary())
            kind, _, rest = place.partition("/")
            number = rest.removesuffix(".png")
            if number.isdecimal() and len(number) < 16:
                if kind == "telling":
                    return _json(session.telling(int(number)))
                if kind in SIDES:
                    return session.picture(int(number), SIDES[kind]), "image/png"
            raise Refusal(404, "there is no such page")

        def _post(self, place: str) -> tuple[bytes, str]:
            length = self.headers.get("Content-Length", "")
            if self.headers.get("Content-Type") != "application/json" or not length.isdecimal():
                raise Refusal(415, "expected JSON")
            if int(length) > MOST_BODY:
                raise Refusal(413, f"expected at most {MOST_BODY} bytes")
            body = self.rfile.read(int(length))
            if place == "undo":
                return _json(session.undo())
            if place == "label":
                given = json_files.parse(body, {"frame": int, "label": int}, "the label")
                return _json(session.label(given["frame"], given["label"]))
            raise Refusal(404, "there is no such page")

        def version_string(self) -> str:
            """Name no versions."""
            return "tribe"

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    return PageHandler


def encode_png(pixels: Tensor) -> bytes:
    """Return bytes (C, H, W), grey or RGB, as a PNG; without Pillow, which an array or a video does not need."""
    channels, height, width = pixels.shape
    rows = pixels.permute(1, 2, 0).reshape(height, width * channels)
    raw = torch.cat((torch.zeros(height, 1, dtype=torch.uint8), rows), 1).contiguous().numpy().tobytes()

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(raw, 3)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _shrunk(frame: Tensor, side: int) -> Tensor:
    """Return a frame as bytes, with at most so many pixels on its longer side."""
    x = frame if frame.dtype == torch.uint8 else frame.float().nan_to_num(0).clamp(0, 1).mul(255).round().byte()
    longer = max(x.shape[1:])
    if longer <= side:
        return x
    size = [max(1, round(length * side / longer)) for length in x.shape[1:]]
    small = interpolate(x[None].float(), size, mode="bilinear", antialias=True)[0]
    return small.round().clamp(0, 255).byte()


def _json(value: Any) -> tuple[bytes, str]:
    return json.dumps(value, allow_nan=False).encode(), "application/json"
