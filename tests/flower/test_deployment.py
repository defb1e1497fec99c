"""A real federation: TLS, authenticated nodes, a node and SuperLink killed, the training resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlaw.results import RoundRecord, Store
from tests.flower.loopback import Loopback, kill, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc/self/stat").exists() or not all(map(shutil.which, ("openssl", "ssh-keygen"))),
        reason="needs Linux, openssl and ssh-keygen",
    ),
]


def _records(path: Path) -> tuple[Any, list[RoundRecord]]:
    if not path.exists():
        return None, []
    with Store(path, read_only=True) as store:
        runs = store.runs()
        return (runs[0], store.records(runs[0].id)) if runs else (None, [])


@pytest.mark.timeout(900)
def test_a_federation_survives_what_happens_to_it(tmp_path: Path) -> None:
    with Loopback(tmp_path) as world:
        superlink = world.superlink()
        ids = []
        for name in ("site0", "site1", "site2"):
            world.key(name)
            ids.append(
                int(world.flwr("supernode", "register", f"{name}.pub", "loopback", "--name", name)["node-id"])
            )
        world.key("stranger")
        nodes = [world.node(name, part) for part, name in enumerate(("site0", "site1", "site2"))]
        stranger = world.node("stranger", 0)

        # Nobody joins whose key was not registered.
        assert stranger.wait(timeout=120) != 0
        assert all(node.poll() is None for node in nodes)

        # A SuperNode is killed in the middle of phase 2, and the run goes on.
        first = world.run()
        until((world.marks / "2.1.2").exists, 240, "phase 2 of round 1")
        kill(nodes[2])
        until(lambda: len(_records(world.store)[1]) >= 2, 300, "two rounds")
        assert not world.status(first).startswith("finished")

        # SuperLink is killed, with the ServerApp that it runs.
        kill(superlink)
        info, before = _records(world.store)
        assert info.status == "interrupted"
        assert len(before) >= 2
        assert before[0].answered == 2
        roster = dict(zip(sorted(ids), range(3), strict=True))
        dead = roster[ids[2]]
        assert [ids[2], 2] in [refusal[:2] for refusal in before[0].refusals]

        # It is started again, and the training goes on where the checkpoint stands.
        world.superlink()
        second = world.run(resume=True, roster=",".join(map(str, ids)))
        status = until(
            lambda: (found := world.status(second)).startswith("finished") and found, 400, "the resumed run"
        )
        assert status == "finished:completed"
        info, after = _records(world.store)
        assert info.status == "finished"
        assert [record.round for record in after] == [1, 2, 3, 4, 5]
        # The last row may be newer than the checkpoint, and is then made again; those before it stand as they were.
        for old, new in zip(before[:-1], after, strict=False):
            assert (old.round, old.seconds) == (new.round, new.seconds)
            np.testing.assert_array_equal(old.weights, new.weights)
        final = after[-1].weights
        assert final is not None
        assert final[dead] == 0
        assert final.sum() == pytest.approx(1)
