"""The nodes: a plain Flower client, as it would be for FedAvg. FedLAW asks nothing else of it."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits_app.task import forge, network, poison, share_of, train

app = ClientApp()


@app.train()
def fit(message: Message, context: Context) -> Message:
    """Train from the model that came; say what the loss is and how many examples there were."""
    config, node = context.run_config, context.node_config
    part, parts = int(node["partition-id"]), int(node["num-partitions"])
    data = share_of(part, parts, int(config["seed"]))
    malicious = str(part) in str(config["malicious"]).split(",")
    attack = str(config["attack"]) if malicious else "none"

    before = message.content["arrays"].to_torch_state_dict()
    model = network()
    model.load_state_dict(before)
    asked = message.content["config"]
    seed = 1000 * int(asked["server-round"]) + 10 * part + int(asked.get("phase", 1))
    loss = train(
        model,
        poison(data, attack),
        epochs=int(config["epochs"]),
        learning_rate=float(config["learning-rate"]),
        seed=seed,
    )
    after = forge(attack, before, model.state_dict(), seed)
    content = {
        "arrays": ArrayRecord(after),
        "metrics": MetricRecord({"train_loss": loss, "num-examples": len(data.labels)}),
    }
    return Message(RecordDict(content), reply_to=message)
