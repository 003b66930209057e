"""FFA-LoRA: A stays as it is drawn, devices train B alone, so that the mean is exact.

Sun, Li, Li, Ding: "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024
(https://arxiv.org/abs/2403.12313).

    device k:  B_k <- local training of W + s B A_0, W and A_0 frozen
    server:    B <- sum_k n_k B_k / sum_k n_k

As all devices have the same A_0, mean(B_k) A_0 is the mean of what they learned. A_0 is drawn from
the run's seed on every machine and never travels: half the bytes of fedlora.

Discloses: the trained B and head of each device, to the server.
"""

from sizewise.families.lora.adapters import DOWN
from sizewise.families.lora.method import LowRank


class FFALoRA(LowRank):
    """FedAvg of the second factors, with the first ones frozen."""

    one_rank = True
    fixed = (DOWN,)
