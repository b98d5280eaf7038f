"""The table of a recipe that permits to send a share of large gradients' elements."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from slipstream.plan.sparsity import SMALL_NUMEL, Sparsity
from slipstream.train.recipe.settings import Settings
from slipstream.wires import DenseWire, SparseCollective


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
        if self.density == 0 and (self.warmup_densities or self.until_epoch):
            raise ValueError(
                "sparse.warmup_densities and sparse.until_epoch need sparse.density: set"
                " sparse.density=0.01"
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
            dense=self.dense,
            small_numel=self.small_numel,
        )
