"""The same app with Flower's own strategies and with fedlaw's, in one process: the table of docs/deployment.md.

python examples/flower/compare.py            # 8 seeds
python examples/flower/compare.py --seeds 2 --attacks sign
"""

from __future__ import annotations

import argparse
import logging
import sys
import tomllib
from pathlib import Path
from statistics import mean

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from digits_app.client_app import app  # noqa: E402
from digits_app.server_app import make_strategy, run  # noqa: E402

from fedlaw.flower import LocalGrid  # noqa: E402

STRATEGIES = {
    "fedavg": "Flower FedAvg",
    "krum": "Flower Krum (told 2)",
    "trimmed": "Flower FedTrimmedAvg (told 0.4)",
    "fedlaw": "fedlaw FedLAW (told 0.4)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--attacks", nargs="+", default=["none", "sign", "labels", "noise"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    given = tomllib.loads((HERE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    malicious = [int(part) for part in given["malicious"].split(",")]
    print(f"{given['rounds']} rounds, {args.seeds} seeds: mean (worst) test accuracy")
    print(f"{'':34}" + "".join(f"{attack:>16}" for attack in args.attacks))
    caught: dict[str, int] = {}
    for name, title in STRATEGIES.items():
        cells = []
        for attack in args.attacks:
            accuracies = []
            for seed in range(args.seeds):
                config = {**given, "strategy": name, "attack": attack, "seed": seed, "poll": 0.0}
                strategy = make_strategy(config)
                result = run(LocalGrid(app, int(given["nodes"]), config), config, strategy)
                accuracies.append(float(result.evaluate_metrics_serverapp[given["rounds"]]["accuracy"]))
                weights = list(getattr(strategy, "weights", {}).values())
                if weights:
                    caught[attack] = caught.get(attack, 0) + all(weights[part] == 0 for part in malicious)
            cells.append(f"{mean(accuracies):.3f} ({min(accuracies):.3f})")
        print(f"{title:34}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
    both = ", ".join(f"{attack} {caught[attack]}" for attack in args.attacks if attack != "none")
    print(f"FedLAW: both malicious nodes at weight zero, of {args.seeds} runs: {both}")


if __name__ == "__main__":
    main()
