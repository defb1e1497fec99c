"""The benchmark of simulators: everybody does the same work, and who cannot take part is said so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
if not BENCHMARKS.is_dir():
    pytest.skip("benchmarks are not part of this installation", allow_module_level=True)
SETTINGS = {
    "model": "mlp",
    "hidden": [4],
    "classes": 10,
    "batch": 8,
    "epochs": 1,
    "lr": 0.01,
    "device": "cpu",
}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_what_pip_says_last_is_why_a_peer_is_not_measured() -> None:
    from peers import environment

    script = (
        "import sys; print('ERROR: first\\nERROR: no matching distribution', file=sys.stderr); sys.exit(1)"
    )
    with pytest.raises(environment.NotInstalled, match=r"^no matching distribution$"):
        environment._call([sys.executable, "-c", script])


def test_every_environment_is_one_of_a_contestant() -> None:
    import simulation
    from peers import environment

    assert {c.environment for c in simulation.PEERS} == set(environment.ENVIRONMENTS)
    assert all((BENCHMARKS / "peers" / c.script).is_file() for c in (*simulation.OURS, *simulation.PEERS))
    keys = [c.key for c in (*simulation.OURS, *simulation.PEERS, simulation.FLOOR)]
    assert len(set(keys)) == len(keys)


def test_a_contestant_that_fails_says_why(tmp_path: Path) -> None:
    from peers.driver import Contestant, NotMeasured, Running

    script = tmp_path / "fails.py"
    script.write_text("raise RuntimeError('no luck')")
    with pytest.raises(NotMeasured, match=r"^does not run: RuntimeError: no luck$"):
        Running(Contestant("x", "X", str(script)), tmp_path, SETTINGS, [0])


@pytest.mark.slow
def test_contestants_come_to_one_result(tmp_path: Path) -> None:
    output = tmp_path / "measured.json"
    command = [sys.executable, str(BENCHMARKS / "simulation.py"), "--no-peers", "--cores", "one"]
    small = ["--clients", "5", "--samples", "70", "--hidden", "16", "8", "--repeats", "1"]
    subprocess.run([*command, *small, "--json", str(output)], check=True, capture_output=True, timeout=300)
    rows = json.loads(output.read_text())["tables"]["one"]
    assert rows["batched"]["difference"] == 0
    for key in ("vmap", "sequential", "plain"):
        assert rows[key]["difference"] < 1e-3
    # 784-16-8-10, three epochs of 70 examples and one more pass: products with W forward, twice backward, and
    # with W of the two later layers for the gradient of their inputs.
    forward, inputs = 784 * 16 + 16 * 8 + 8 * 10, 16 * 8 + 8 * 10
    assert rows["gemm"]["flops"] == 2 * 5 * 70 * (3 * (2 * forward + inputs) + forward)
