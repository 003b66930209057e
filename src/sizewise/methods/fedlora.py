"""FedLoRA: every device trains adapters of one rank, the server averages their factors one by one.

Zhang, Vahidian, Kuo, Li, Zhang, Wang, Chen: "Towards Building the Federated GPT: Federated
Instruction Tuning" (FedIT), ICASSP 2024 (https://arxiv.org/abs/2305.05644).

    device k:  A_k, B_k <- local training of W + s B A, W frozen
    server:    A <- sum_k n_k A_k / sum_k n_k,   B <- sum_k n_k B_k / sum_k n_k

The mean of factors is not the factor of a mean: (B_1 + B_2)(A_1 + A_2) / 4 has cross terms that no
device asked for. The rank is the largest that the weakest device holds; with `depths`, devices have
adapters in as many of the last blocks as their bytes hold, and each block's are averaged over the
devices that have them.

Discloses: the trained adapters and head of each device, to the server.
"""

from sizewise.families.lora.method import LowRank


class FedLoRA(LowRank):
    """FedAvg of adapters."""

    one_rank = True
