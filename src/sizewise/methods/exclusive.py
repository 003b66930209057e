"""ExclusiveFL: only devices that can train the full model take part.

A baseline of Liu, Wu, Wu, Wang, Lyu, Chen, Xie: "No One Left Behind: Inclusive Federated Learning
over Heterogeneous Devices", KDD 2022 (https://arxiv.org/abs/2202.08036).

    server:    w <- sum n_k w_k / sum n_k   over the sampled devices whose bytes hold w

It is FedAvg: sizewise refuses devices that lack the bytes, and names them. Sampling does not look
at budgets, so with weak devices fewer than `fleet.per_round` updates arrive in a round.

Discloses: the trained weights of each device that takes part, to the server.
"""

from sizewise.families.base import Method


class Exclusive(Method):
    """FedAvg among the strong."""
