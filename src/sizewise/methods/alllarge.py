"""AllLarge: every device trains the full model, whatever its budget.

The unconstrained ideal of Liu, Wu, Wu, Wang, Lyu, Chen, Xie: "No One Left Behind: Inclusive
Federated Learning over Heterogeneous Devices", KDD 2022 (https://arxiv.org/abs/2202.08036), and the
"x1" rows of others: what the same data would give if memory were no question.

    server:    w <- sum n_k w_k / sum n_k   over all sampled devices

It **ignores budgets**, and says so when a run starts. Its plans have no budget, its peaks are still
metered.

Discloses: the trained weights of each device, to the server.
"""

from dataclasses import dataclass

from sizewise.families.base import Method


class AllLarge(Method):
    """FedAvg without limits."""

    @dataclass(frozen=True)
    class Options(Method.Options):
        """No options."""

        @property
        def ignores_budgets(self) -> bool:
            """Whether devices train more than their bytes hold."""
            return True
