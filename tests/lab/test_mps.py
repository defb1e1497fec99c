"""Starting and ending NVIDIA's Multi-Process Service, with a program of our own in its place."""

import os
import stat

import pytest

from fedlaw.experiments.engines.mps import can_share, shared_card


@pytest.fixture
def control(tmp_path, monkeypatch):
    """A control program that writes down what it is told, and where; `ends` is its exit status."""

    def make(ends: int = 0):
        program = tmp_path / "nvidia-cuda-mps-control"
        program.write_text(
            f'#!/bin/sh\necho "$CUDA_MPS_PIPE_DIRECTORY $* $(cat)" >> {tmp_path}/told\nexit {ends}\n'
        )
        program.chmod(program.stat().st_mode | stat.S_IEXEC)
        return tmp_path / "told"

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.delenv("CUDA_MPS_LOG_DIRECTORY", raising=False)
    return make


def test_a_service_is_started_for_the_processes_inside_and_ended(control):
    told = control()
    assert can_share()
    folder = None

    def interrupted():
        nonlocal folder
        with shared_card() as shared:
            assert shared
            folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
            assert os.path.isdir(folder)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert "CUDA_MPS_LOG_DIRECTORY" not in os.environ
    assert told.read_text().splitlines() == [f"{folder} -d ", f"{folder}  quit"]
    assert not os.path.exists(folder)


def test_a_service_that_will_not_start_is_done_without(control):
    control(ends=1)
    with shared_card() as shared:
        assert not shared
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_a_service_that_runs_is_left_alone(control, monkeypatch):
    told = control()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
    with shared_card() as shared:
        assert shared
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/somewhere"
    assert not told.exists()


def test_without_the_program_nothing_happens(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    assert not can_share()
    with shared_card() as shared:
        assert not shared
