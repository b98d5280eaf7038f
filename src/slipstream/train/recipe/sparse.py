"""The table of a recipe that permits to send a share of large gradients' elements."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from slipstream.plan.sparsity import SMALL_NUMEL, Sparsity
from slipstream.train.recipe.settings import Settings
from slipstream.wires import DenseWire, SelectorName, SparseCollective


class SparseSettings(Settings):
    """Sparse gradients: the largest elements travel, the rest is kept and added to the next ones.

    A loss of precision that is paid back later; with auto used where it is measured to pay.
    """

    density: float = Field(
        default=0.0, ge=0, le=1, description="share of elements that travel; 0 = all, always"
    )
    values: DenseWire = Field(default="float32", description="as what they travel")
    collective: SparseCollective = Field(
        default="hitopk",
        description="hitopk, naive_topk, or a2a_topk for many nodes",
    )
    selector: SelectorName = Field(
        default="exact",
        description="exact; or mstopk, sampled: nearly the largest; or reference: torch.topk",
    )
    dense: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="patterns of parameters that are sent in full, such as *.embedding.*",
    )
    small_numel: int = Field(
        default=SMALL_NUMEL,
        ge=0,
        description="gradients with fewer elements are sent in full",
    )
    warmup_densities: tuple[float, ...] = Field(
        default=(),
        strict=False,
        description="densities of the first epochs, one each, such as [0.25, 0.0625]",
    )
    until_epoch: int = Field(
        default=0,
        ge=0,
        description="after so many epochs all elements travel, and what was kept; 0 = never",
    )

    correct_momentum: bool = Field(
        default=False,
        description="the optimizer's momentum is applied before selection instead (DGC)",
    )
    clip_norm: float = Field(
        default=0.0,
        ge=0,
        description="with correct_momentum: limit of a parameter's gradient norm; 0 = none",
    )

    @field_validator("warmup_densities")
    @classmethod
    def _are_shares(cls, densities: tuple[float, ...]) -> tuple[float, ...]:
        for density in densities:
            if not 0 < density <= 1:
                raise ValueError(
                    f"sparse.warmup_densities holds {density}: a density is above 0 and at most 1"
                )
        return densities

    @model_validator(mode="after")
    def _has_a_density(self) -> SparseSettings:
        for name in ("warmup_densities", "until_epoch", "correct_momentum"):
            if self.density == 0 and getattr(self, name):
                raise ValueError(f"sparse.{name} needs sparse.density: set sparse.density=0.01")
        if self.clip_norm and not self.correct_momentum:
            raise ValueError(
                "sparse.clip_norm clips before momentum correction: set"
                " sparse.correct_momentum=true, or clip averages with train.clip_grad_norm"
            )
        return self

    def in_epoch(self, epoch: int) -> Sparsity | None:
        """What is permitted in an epoch, counted from 0; None where all elements travel."""
        if self.density == 0 or (self.until_epoch and epoch >= self.until_epoch):
            return None
        density = self.density
        if epoch < len(self.warmup_densities):
            density = self.warmup_densities[epoch]
        return Sparsity(
            density=density,
            values=self.values,
            collective=self.collective,
            selector=self.selector,
            dense=self.dense,
            small_numel=self.small_numel,
        )
