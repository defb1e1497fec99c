"""Several processes on one GPU at the same time, by NVIDIA's Multi-Process Service.

Without it a GPU takes turns: kernels of two processes never run together, and each waits milliseconds for the
other. Judging is made of many small waits, so processes that take turns gain nothing over one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CONTROL = "nvidia-cuda-mps-control"
_PIPE, _LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_PATIENCE = 20  # seconds for the daemon to start or to end


def can_share() -> bool:
    """Whether `shared_card` has something to offer here: a service that runs, or the program that starts one."""
    return _PIPE in os.environ or shutil.which(_CONTROL) is not None


@contextmanager
def shared_card() -> Iterator[bool]:
    """Processes that are started inside share the GPU; yields whether they do.

    A service that the environment names (CUDA_MPS_PIPE_DIRECTORY) is used as it is; otherwise one is started, in a
    folder of its own, and ended afterwards. Where there is none, or it will not start, nothing happens.
    """
    if _PIPE in os.environ:
        yield True
        return
    with tempfile.TemporaryDirectory(prefix="fedlaw-mps-", ignore_cleanup_errors=True) as folder:
        ours = {_PIPE: folder, _LOG: folder}
        if not _tell(["-d"], ours):
            yield False
            return
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        try:
            yield True
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
            _tell([], ours, "quit\n")


def _tell(arguments: list[str], extra: dict[str, str], words: str = "") -> bool:
    """Run the control program; whether it was there and did as it was told."""
    program = shutil.which(_CONTROL)
    if program is None:
        return False
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [program, *arguments],
            env={**os.environ, **extra},
            input=words,
            text=True,
            timeout=_PATIENCE,
            capture_output=True,
            check=False,
        )
        return done.returncode == 0
    return False
