"""A torch profiler around the steps of a running engine, written as one Chrome trace.

Owns the profile that runs, of which there is at most one.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class StepProfiler:
    """Starts and stops between two steps. Open the trace in Perfetto or `chrome://tracing`."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        self._path = Path()
        self._num_steps_left = 0

    @property
    def is_running(self) -> bool:
        """Whether steps are being recorded."""
        return self._profile is not None

    def start(self, folder: Path, num_steps: int) -> Path:
        """Begins to record.

        Args:
            folder: of the trace; made if it is missing.
            num_steps: the profile ends after so many steps; 0 waits for `stop`.

        Returns:
            The file that `stop` will write.

        Raises:
            OSError: the folder cannot be written to.
        """
        assert self._profile is None, "a profile runs already"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"steps-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09d}.json.gz"
        self._path = folder / name
        # Fails now and not after the steps.
        self._path.touch(exist_ok=False)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()
        self._num_steps_left = num_steps
        return self._path

    def note_step(self) -> bool:
        """Counts one step of a running profile; returns whether it was the last one."""
        if self._profile is None or self._num_steps_left == 0:
            return False
        self._num_steps_left -= 1
        return self._num_steps_left == 0

    def stop(self) -> Path:
        """Ends the profile and writes the trace; takes seconds where it is long.

        Raises:
            OSError: the trace cannot be written.
        """
        assert self._profile is not None, "no profile runs"
        ended, self._profile = self._profile, None
        ended.stop()
        # Under another name first, so that whoever watches the folder sees whole traces only.
        partial = self._path.with_name(f"partial-{self._path.name}")
        ended.export_chrome_trace(str(partial))
        os.replace(partial, self._path)
        return self._path
