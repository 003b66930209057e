"""What pfl does in each of its processes; see `pfl_run`."""

import os
from collections.abc import Callable

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F

import work


class Trained(nn.Module):
    """A network with the loss that pfl trains and the figures that it asks for."""

    def __init__(self, network: nn.Module, report: work.Report) -> None:
        super().__init__()
        self.network, self.report = network, report

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy of a batch."""
        self.network.train()
        self.report.count(clients=0, steps=1, samples=len(labels))
        return F.cross_entropy(self.network(images), labels)

    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Weighted]:
        """Return nothing: there is no evaluation but the one after the last round."""
        return {}


class Watch(TrainingProcessCallback):
    """Takes the time after each round."""

    def __init__(self, report: work.Report) -> None:
        self.report = report

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Note that a round has ended."""
        self.report.mark()
        return False, Metrics()


def user_data(
    workload: work.Workload, data: work.Data, report: work.Report
) -> Callable[[int], Dataset]:
    """Return the function from a client's number to its samples, shuffled and normalised."""
    generator = torch.Generator().manual_seed(work.SEED)

    def make(number: int) -> Dataset:
        report.count(clients=1, steps=0, samples=0)
        first = number * workload.samples
        rows = first + torch.randperm(workload.samples, generator=generator)
        images = work.normalise(data.train_inputs[rows])
        return Dataset((images, data.train_labels[rows]), user_id=str(number))

    return make


def train(given: work.Arguments) -> None:
    """Run one workload and print its report, from one process if there are several."""
    workload, report = given.workload, work.Report()
    # The same in all processes: pfl draws one cohort in each and expects them to be equal.
    np.random.seed(work.SEED)
    data = work.make_data(workload)
    network = work.make_model(workload)
    trained = Trained(network, report)
    # A server's step of 1 along the mean update is the plain average.
    central = torch.optim.SGD(trained.parameters(), lr=1.0)
    model = PyTorchModel(trained, torch.optim.SGD, central)
    sampler = get_user_sampler("minimize_reuse", list(range(workload.clients)))
    users = FederatedDataset(user_data(workload, data, report), sampler)
    backend = SimulatedBackend(users, users, postprocessors=[WeightByDatapoints()])
    local = NNTrainHyperParams(
        local_num_epochs=1,
        local_learning_rate=work.LEARNING_RATE,
        local_batch_size=workload.batch,
    )
    schedule = NNAlgorithmParams(
        central_num_iterations=workload.rounds,
        # Round 0 is evaluated whatever is said here, which costs nothing: see `Trained.metrics`.
        evaluation_frequency=workload.rounds + 1,
        train_cohort_size=workload.per_round,
        val_cohort_size=0,
    )
    report.began = work.since_start()
    FederatedAveraging().run(
        algorithm_params=schedule,
        backend=backend,
        model=model,
        model_train_params=local,
        callbacks=[Watch(report)],
        # It would print a table after each round.
        send_metrics_to_platform=False,
    )
    report.loss, report.accuracy = work.score(network, data)
    if given.workers > 1:
        counts = torch.tensor([report.clients, report.steps, report.samples])
        torch.distributed.all_reduce(counts)
        report.clients, report.steps, report.samples = counts.tolist()
    if int(os.environ.get("RANK", "0")) == 0:
        report.print()
