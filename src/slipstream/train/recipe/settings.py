"""The tables of a recipe, one model a table: every setting with its unit, meaning and limits.

All tables are frozen and strict: an unknown field, a value of another type or one out of bounds is
refused. The texts below are also the comments of the recipe that a run folder keeps.
"""

from __future__ import annotations

from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from slipstream.plan.allowed import OWN_COLLECTIVES, unused
from slipstream.wires import DENSE_WIRES, DenseCollective, DenseWire, wires_of


class Settings(BaseModel):
    """Base of all tables: no unknown fields, no conversions, no infinities, no changes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _is_text(cls, value: object, info: ValidationInfo) -> object:
        # Bytes of a command line that are not UTF-8 arrive as characters that no file can hold.
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{info.field_name} is not text in UTF-8: {value!r}") from None
        return value


class DataSettings(Settings):
    """Which images are trained on."""

    dataset: Literal["fashion", "digits"] = Field(
        description="fashion (Fashion-MNIST, 60,000 + 10,000 images) or digits (scikit-learn's)"
    )
    folder: str = Field(
        default="", description="folder of the data files; empty = found, else fetched"
    )


class AugmentSettings(Settings):
    """How a training image is changed at random; evaluation sees images as they are."""

    crop_padding: int = Field(
        default=0, ge=0, le=64, description="pixels of padding for random crops"
    )
    horizontal_flip: bool = Field(default=False, description="mirror every second image, at random")


class ModelSettings(Settings):
    """Which network is trained."""

    name: str = Field(
        default="resnet_small",
        min_length=1,
        description="resnet_small or any model of torchvision.models",
    )
    width: int = Field(
        default=16,
        ge=1,
        le=1024,
        description="channels of resnet_small's first stage; others ignore it",
    )
    channels_last: bool = Field(
        default=True, description="memory layout of weights and activations"
    )


class TrainSettings(Settings):
    """The loop."""

    epochs: int = Field(default=5, ge=1, description="passes over the training set")
    global_batch_size: int = Field(
        default=256, ge=1, description="images per update, over all ranks and accumulation steps"
    )
    accumulation_steps: int = Field(default=1, ge=1, description="backward passes per update")
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="of weights, data order and augmentation"
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=1, description="share of the target spread evenly"
    )
    clip_grad_norm: float = Field(
        default=0.0, ge=0, description="largest gradient norm; 0 = no clipping"
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop",
        description="on infinite or NaN gradients: stop the run, or skip the update; 100 skipped in"
        " a row, or all of an epoch, stop it all the same",
    )
    threads_per_rank: int = Field(
        default=0, ge=0, description="CPU threads; 0 = cores / ranks of the node"
    )
    evaluate_every_epochs: int = Field(
        default=1, ge=1, description="the last epoch is always evaluated"
    )


class OptimizerSettings(Settings):
    """SGD with momentum."""

    learning_rate: float = Field(
        default=0.1, gt=0, description="peak rate, reached after the warm-up"
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="0 = plain SGD")
    nesterov: bool = Field(default=True, description="Nesterov's momentum; needs momentum above 0")
    weight_decay: float = Field(default=5e-4, ge=0, description="L2 penalty on weights")

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> OptimizerSettings:
        if self.nesterov and self.momentum == 0:
            raise ValueError(
                "optimizer.nesterov needs optimizer.momentum above 0:"
                " set optimizer.momentum=0.9 or optimizer.nesterov=false"
            )
        return self


class ScheduleSettings(Settings):
    """Learning rate over time: linear warm-up, then a decay."""

    kind: Literal["cosine", "step", "polynomial"] = Field(
        default="cosine", description="form of the decay"
    )
    warmup_epochs: float = Field(
        default=1.0,
        ge=0,
        description="epochs of linear warm-up, at most half of train.epochs; 0 = none",
    )
    final_fraction: float = Field(
        default=0.0, ge=0, le=1, description="last rate / peak rate (cosine, polynomial)"
    )
    step_epochs: int = Field(default=2, ge=1, description="epochs between two drops (step)")
    step_factor: float = Field(
        default=0.1, gt=0, le=1, description="rate after / before a drop (step)"
    )
    power: float = Field(default=2.0, gt=0, description="exponent of the decay (polynomial)")


_MEASURING = ("auto", "optimal", "mgwfbp", "four_minutes", "pipelined")
_Planner = Literal[
    "auto",
    "optimal",
    "mgwfbp",
    "four_minutes",
    "pipelined",
    "ddp",
    "wfbp",
    "single",
    "fixed",
]
_Collective = Literal["all", DenseCollective]


class SyncSettings(Settings):
    """How gradients are averaged over ranks."""

    planner: _Planner = Field(
        default="auto",
        description="who cuts gradients into buckets; the first five measure steps and cluster"
        " while the run goes on (auto = optimal), and begin as ddp",
    )
    collectives: tuple[_Collective, ...] = Field(
        default=("native",),
        strict=False,
        description="what may carry buckets, the fastest for each; all = those that work here;"
        " for auto, optimal and mgwfbp",
    )
    allow: tuple[DenseWire, ...] = Field(
        default=("float32",),
        strict=False,
        description="what may travel; bfloat16 and float16 are half the bytes, and rounded",
    )
    plan_file: str = Field(
        default="", description="a plan.json or plans.json to replay; empty = the planner decides"
    )
    cluster_file: str = Field(
        default="",
        description="a cluster.json that `slipstream probe` made; empty = probed in the run",
    )
    first_bytes: int = Field(default=2**20, ge=1, description="limit of the first bucket (fixed)")
    cap_bytes: int = Field(
        default=25 * 2**20, ge=1, description="limit of every other bucket (fixed)"
    )
    last_bytes: int = Field(
        default=25 * 2**20, ge=1, description="limit of the last bucket (fixed)"
    )
    wait: Literal["backward", "update"] = Field(
        default="backward",
        description="when a step waits for gradients: backward or update (hides more)",
    )
    timeout_seconds: float = Field(
        default=600.0, gt=0, description="a rank that is silent for longer ends the run"
    )

    @property
    def measures(self) -> bool:
        """Whether the planner works from measurements."""
        return not self.plan_file and self.planner in _MEASURING

    @property
    def chooses(self) -> bool:
        """Whether the planner takes any collective that is allowed."""
        return self.measures and self.planner not in OWN_COLLECTIVES

    @property
    def may_be_sparse(self) -> bool:
        """Whether the planner sends a share of the elements where that is permitted."""
        return not self.plan_file and self.planner not in OWN_COLLECTIVES

    @property
    def may_round(self) -> bool:
        """Whether the planner takes any wire that is allowed."""
        return self.measures and self.planner != "pipelined"

    @property
    def named_collectives(self) -> tuple[str, ...]:
        """What may carry buckets, on clusters of any shape."""
        if self.planner in OWN_COLLECTIVES:
            return OWN_COLLECTIVES[self.planner]
        return tuple(DENSE_WIRES) if "all" in self.collectives else self.collectives

    def never_used(self) -> list[str]:
        """Sentences about what is allowed and goes with nothing else that is."""
        if not self.may_round or (self.chooses and "all" in self.collectives):
            return []
        return [f"sync: {words}" for words in unused(self.named_collectives, self.allow)]

    @field_validator("collectives", "allow")
    @classmethod
    def _names_each_once(cls, names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not names:
            first = cls.model_fields[str(info.field_name)].default[0]
            raise ValueError(f"sync.{info.field_name} is empty: name one or more, such as {first}")
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"sync.{info.field_name} holds {name} {names.count(name)} times: leave out all"
                    " but one"
                )
        return names

    @model_validator(mode="after")
    def _can_send(self) -> SyncSettings:
        sent = {wire: None for name in self.named_collectives for wire in wires_of(name)}
        if self.may_round and not set(sent) & set(self.allow):
            raise ValueError(
                f"sync.allow is {' and '.join(self.allow)}, and"
                f" {', '.join(self.named_collectives)} can send {' or '.join(sent)} only: allow"
                f" {next(iter(sent))}, or take what sends {self.allow[0]}, such as direct"
            )
        return self

    @model_validator(mode="after")
    def _one_plan(self) -> SyncSettings:
        if self.plan_file and self.planner != "auto":
            raise ValueError(
                f"sync.plan_file and sync.planner={self.planner!r} exclude each other:"
                " set sync.plan_file='' or leave out sync.planner"
            )
        return self


class ClusterSettings(Settings):
    """The ranks that are started on this machine; a job of torchrun or srun brings its own."""

    nodes: int = Field(default=1, ge=1, le=4096, description="nodes (logical ones, on one machine)")
    ranks_per_node: int = Field(default=2, ge=1, le=4096, description="ranks of each node")


class CheckpointSettings(Settings):
    """When the state of a run is saved, and how much of it is kept."""

    every_epochs: int = Field(default=1, ge=0, description="0 = not by epochs")
    every_steps: int = Field(default=0, ge=0, description="0 = not by steps")
    keep_last: int = Field(default=2, ge=1, description="newest checkpoints that stay")
    keep_best: bool = Field(
        default=True, description="keep the one with the best test accuracy, too"
    )
    grace_seconds: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="from SIGTERM or Ctrl-C to the end of the last save",
    )


class RunSettings(Settings):
    """Where a run leaves its files, and how often it speaks."""

    folder: str = Field(default="", description="run folder; empty = runs/<name>-<time>")
    log_every_steps: int = Field(default=10, ge=1, description="steps between two lines of metrics")
