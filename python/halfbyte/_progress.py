"""Progress of long work: a bar of tqdm where it is installed, else a line on stderr."""

import sys
import time

_QUIET_SECONDS = 1.0


class Bar:
    """Called with (phase, done_bytes, total_bytes). Short work shows nothing."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._phase = ""
        self._bar = None
        self._percent = -1

    def __call__(self, phase: str, done: int, total: int) -> None:
        if time.monotonic() - self._start < _QUIET_SECONDS:
            return
        if phase != self._phase:
            self.close()
            self._phase = phase
            self._bar = self._open(phase, total)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            return
        percent = 100 * done // max(total, 1)
        if percent != self._percent:
            self._percent = percent
            print(f"\r{phase}: {percent} %", end="", file=sys.stderr, flush=True)

    def _open(self, phase: str, total: int) -> object:
        try:
            from tqdm.auto import tqdm
        except ImportError:
            return None
        return tqdm(desc=phase, total=total, unit="B", unit_scale=True, leave=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        elif self._percent >= 0:
            print(file=sys.stderr)
        self._percent = -1
        self._phase = ""
