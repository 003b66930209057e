"""The workloads as a plain PyTorch loop on one thread: what the training itself costs.

    python bare.py a|b|c [--rounds N]

It checks nothing, logs nothing and saves nothing.
"""

import torch
from torch import Tensor

import work


def main() -> None:
    """Run one workload and print its report."""
    given = work.arguments("A plain PyTorch loop")
    workload, report = given.workload, work.Report()
    data = work.make_data(workload)
    model = work.make_model(workload)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(work.SEED)
    report.began = work.since_start()
    for _ in range(workload.rounds):
        total: dict[str, Tensor] = {}
        seen = 0
        chosen = torch.randperm(workload.clients, generator=generator)[: workload.per_round]
        for client in chosen.tolist():
            rows = slice(client * workload.samples, (client + 1) * workload.samples)
            images, labels = data.train_inputs[rows], data.train_labels[rows]
            model.load_state_dict(weights)
            steps = work.train_client(model, images, labels, workload.batch, generator)
            for name, tensor in model.state_dict().items():
                share = tensor.detach() * len(labels)
                total[name] = total[name] + share if name in total else share
            seen += len(labels)
            report.count(clients=1, steps=steps, samples=len(labels))
        weights = {name: tensor / seen for name, tensor in total.items()}
        report.mark()
    model.load_state_dict(weights)
    report.loss, report.accuracy = work.score(model, data)
    report.print()


if __name__ == "__main__":
    main()
