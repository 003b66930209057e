"""The recipe: everything that papers mix up with the algorithm.

"HeteroFL" in five papers is five recipes of one algorithm. A method file holds the algorithm; the
optimiser, schedule, norm policy, weighting and so on live here and combine with any method.
"""

import math
from dataclasses import dataclass
from typing import Literal

from sizewise.common.structure import Bytes
from sizewise.errors import ConfigError
from sizewise.steps.precision import Precision

Lever = Literal[
    "none",
    "auto",
    "microbatch",
    "checkpoint",
    "step_in_backward",
    "bf16_state",
    "bf16_activations",
]


@dataclass(frozen=True)
class Recipe:
    """How devices train and how the server applies what they send.

    Attributes:
        optimizer: The devices' optimiser; a fresh one for each device in each round. `amsgrad` is
            Adam with the largest second moment so far.
        lr: The devices' learning rate, in the first round.
        momentum: Of `sgd`.
        weight_decay: Of every optimiser.
        epochs: Passes over a device's data in one round (for each stage of its plan).
        max_steps: Stop a stage after this many batches, if given.
        batch: Samples in a step.
        drop_last: Leave out a last batch that is smaller than `batch`.
        schedule: How `lr` changes from round to round.
        lr_min: Where a cosine schedule ends.
        milestones: Where a `steps` schedule multiplies the rate by `decay`: rounds, or fractions of
            the run when below 1.
        decay: Factor of the `steps` (at each milestone) and `exponential` (each round) schedules.
        clip: Largest global norm of a step's gradient.
        sample_clip: Largest norm of the gradient of one sample: gradients are clipped sample by
            sample, and noise is added on the device; see docs/privacy.md.
        sample_noise: Deviation of that noise on the sum over a batch, over `sample_clip`.
        sample_delta: The probability that goes with the epsilon of samples.
        sample_seed: Draw that noise from this number, to repeat a simulation; whoever knows it can
            take the noise off. Default: from the operating system.
        proximal: FedProx's mu: pulls what a device trains towards what it received.
        levers: What may make a step smaller where a device lacks bytes: `auto` is all of them, or a
            list of some; see docs/levers.md.
        precision: In what the forward pass of a step runs: `bf16` and `fp16` are 16 bits wherever
            torch's autocast says so, `tf32` is for CUDA devices. Models stay in float32, and are
            evaluated in it.
        norm: What becomes of batch norms; see docs/protocols.md.
        weighting: Whether an update counts by its samples or each device counts the same.
        augment: How training images are varied; docs/config.md lists the names.
        augment_once: Augment every image once for the whole run (FeDepth's public code does).
        eval_batch: Batch size of evaluation; matters when norms use batch statistics.
        eval_memory: Evaluate within this many bytes, part by part, the rest in files.
        eval_every: Evaluate after every so many rounds, and always after the last.
        upload: How devices send what they trained: as it is, or in fewer bytes; see
            docs/fleet.md.
        upload_share: Share of the entries that `upload = "topk"` sends, at most 0.5.
        merge: How the server merges what devices sent, entry by entry over the devices that hold
            it: their mean, or a rule that stands some liars among them; see docs/robustness.md. All
            but the mean count each device the same, whatever `weighting` says.
        merge_attackers: How many devices of a round may lie, for `merge`.
        merge_thin: What becomes of entries that too few devices hold for `merge` to stand so many:
            they `keep` their values, or `merge` all the same; or `refuse` to start such a run.
        merge_bound: How far `merge = "norm-bound"` lets a device move its piece, as a Euclidean
            norm; default: as far, by entry, as the median device of the round.
        server: The server's optimiser, which takes the merged update for a gradient.
        server_lr: The server's step size (eta).
        server_momentum: Momentum of `fedavgm`; beta 1 of the adaptive server optimisers.
        server_beta2: Second-moment decay of `fedadam`, `fedadamw` and `fedyogi`.
        server_tau: Added to the root of the second moment of the adaptive server optimisers.
        server_weight_decay: Share of a weight, times `server_lr`, that `fedadamw` takes away.
    """

    optimizer: Literal["sgd", "adam", "adamw", "amsgrad"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    epochs: int = 1
    max_steps: int | None = None
    batch: int = 32
    drop_last: bool = False
    schedule: Literal["constant", "cosine", "steps", "exponential"] = "constant"
    lr_min: float = 0.0
    milestones: tuple[float, ...] = (0.5, 0.75)
    decay: float = 0.1
    clip: float | None = None
    sample_clip: float | None = None
    sample_noise: float | None = None
    sample_delta: float = 1e-5
    sample_seed: int | None = None
    proximal: float = 0.0
    levers: tuple[Lever, ...] = ("none",)
    precision: Precision = "float32"
    norm: Literal["batch", "sbn", "tracked", "per_width_stats", "per_submodel"] = "batch"
    weighting: Literal["samples", "equal"] = "samples"
    augment: str = "none"
    augment_once: bool = False
    eval_batch: int = 500
    eval_memory: Bytes | None = None
    eval_every: int = 1
    upload: Literal["full", "bf16", "int8", "topk"] = "full"
    upload_share: float = 0.1
    merge: Literal["mean", "median", "trimmed-mean", "geometric-median", "krum", "norm-bound"] = (
        "mean"
    )
    merge_attackers: int = 1
    merge_thin: Literal["keep", "merge", "refuse"] = "keep"
    merge_bound: float | None = None
    server: Literal["fedavg", "fedavgm", "fedadam", "fedadamw", "fedyogi", "fedadagrad"] = "fedavg"
    server_lr: float = 1.0
    server_momentum: float = 0.9
    server_beta2: float = 0.99
    server_tau: float = 1e-3
    server_weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.eval_memory is not None and self.norm == "sbn":
            raise ConfigError(
                "recipe.norm = 'sbn' recalibrates the whole model on the server, which cannot be "
                "held to recipe.eval_memory; use 'batch' or 'tracked'"
            )
        alone = {"none", "auto"} & set(self.levers)
        if not self.levers or (alone and len(self.levers) > 1):
            raise ConfigError(
                f"recipe.levers is 'none', 'auto' or a list of levers, not {list(self.levers)}"
            )
        for name in ("epochs", "batch", "eval_batch", "eval_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"recipe.{name} must be at least 1, not {getattr(self, name)}")
        for name in ("lr", "decay", "server_lr", "server_tau"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"recipe.{name} must be a positive number, not {value}")
        for name in ("momentum", "weight_decay", "proximal", "lr_min", "server_weight_decay"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"recipe.{name} must not be negative, not {value}")
        if self.merge_attackers < 1:
            raise ConfigError(
                f"recipe.merge_attackers must be at least 1, not {self.merge_attackers}; where no "
                f"device lies, recipe.merge = 'mean' is best"
            )
        if self.merge_bound is not None and self.merge != "norm-bound":
            raise ConfigError(
                f"recipe.merge_bound acts with recipe.merge = 'norm-bound' only, not with "
                f"{self.merge!r}; leave it out"
            )
        if (self.sample_clip is None) != (self.sample_noise is None):
            raise ConfigError(
                "recipe.sample_clip and recipe.sample_noise go together; give both, or neither"
            )
        if self.sample_clip is not None and self.precision == "fp16":
            raise ConfigError(
                "recipe.precision = 'fp16' scales gradients, which recipe.sample_clip clips; use "
                "'bf16'"
            )
        if not 0 < self.sample_delta < 1:
            raise ConfigError(
                f"recipe.sample_delta must be between 0 and 1, not {self.sample_delta}"
            )
        if self.sample_noise is not None and self.sample_noise < 1e-6:
            raise ConfigError(f"recipe.sample_noise must be at least 1e-6, not {self.sample_noise}")
        for name in ("clip", "max_steps", "merge_bound", "sample_clip"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(
                    f"recipe.{name} must be positive, not {value}; leave it out instead"
                )
        if not 0 < self.upload_share <= 0.5:
            raise ConfigError(
                f"recipe.upload_share must be above 0 and at most 0.5, not {self.upload_share}; "
                f"beyond that, places and values weigh more than the whole update"
            )
        for name in ("momentum", "server_momentum", "server_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"recipe.{name} must be in [0, 1), not {getattr(self, name)}")
        if self.server_weight_decay and self.server != "fedadamw":
            raise ConfigError(
                f"recipe.server_weight_decay acts with recipe.server = 'fedadamw' only, not with "
                f"{self.server!r}; leave it out"
            )

    def lr_at(self, round_index: int, rounds: int) -> float:
        """Return the devices' learning rate in a round, counted from 0, of a run."""
        if self.schedule == "cosine":
            swing = (1 + math.cos(math.pi * round_index / rounds)) / 2
            return self.lr_min + (self.lr - self.lr_min) * swing
        if self.schedule == "exponential":
            return self.lr * self.decay**round_index
        if self.schedule == "steps":
            # Rounded, because 0.55 * 100 is a little more than 55.
            marks = (round(m * rounds, 6) if m < 1 else m for m in self.milestones)
            return self.lr * self.decay ** sum(round_index >= mark for mark in marks)
        return self.lr
