"""Rotary embeddings of draft layers: tables of cos and sin by absolute position, and the scalings of long contexts.

    angle_i(p) = p f_i,   f_i = theta^(-2i / E)       cos and sin are multiplied by m; without scaling f and m = 1 stay
    linear    f_i / s                                                                                   s: the factor
    llama3    f_i where a wavelength 2 pi / f_i is below L / high, f_i / s where it is above L / low, between the two
              (1 - w) f_i / s + w f_i,  w = (L f_i / (2 pi) - low) / (high - low)
    yarn      (1 - r_i) f_i + r_i f_i / s,  r_i rises from 0 to 1 between the dimensions that turn beta_fast and
              beta_slow times in L positions;  m = 0.1 ln s + 1 unless the config names another

Sources: linear and yarn, arXiv 2309.00071; llama3, Llama 3.1's published code; defaults as in transformers'
modeling_rope_utils. Shapes: E head dim, L original_max_position_embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from outrider.target.fused import signed_sin
from outrider.utils.measure import on_device

Rope = tuple[Tensor, Tensor]  # cos and signed sin, broadcast over heads
RopeType = Literal["linear", "llama3", "yarn"]
_HUGE = 1e30

_COMMON = {"rope_type", "type", "rope_theta", "factor", "partial_rotary_factor"}
_FIELDS: dict[str, tuple[str, ...]] = {  # besides those: needed ones end with "!"
    "linear": (),
    "llama3": ("original_max_position_embeddings!", "low_freq_factor!", "high_freq_factor!"),
    "yarn": (
        *("original_max_position_embeddings!", "beta_fast", "beta_slow", "attention_factor"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary angles are scaled, under the names of transformers' `rope_parameters`; None: not of this kind, or the
    default.

    Raises:
        ValueError: a number is missing or not above 0.
    """

    rope_type: RopeType
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        for name, value in self.fields().items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if name not in ("rope_type", "truncate") and not (number and 0 < value < _HUGE):
                raise ValueError(f"{name} is {value!r}; it must be a number above 0.")
        if self.truncate is not None and not isinstance(self.truncate, bool):
            raise ValueError(f"truncate is {self.truncate!r}; it must be true or false.")
        for name in _FIELDS[self.rope_type]:
            if name.endswith("!") and getattr(self, name[:-1]) is None:
                raise ValueError(f"rope_type {self.rope_type!r} needs the field {name[:-1]!r}.")
        if (self.high_freq_factor or math.inf) <= (self.low_freq_factor or 0):
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor}; it must be above low_freq_factor {self.low_freq_factor}."
            )

    @classmethod
    def of(cls, rope: Mapping[str, Any], longest: int | None) -> RopeScaling | None:
        """The scaling of a config's `rope_parameters` (or the older `rope_scaling`); None for unscaled positions.

        Args:
            longest: the config's max_position_embeddings, which stands in for an original length that it leaves out.

        Raises:
            ValueError: a kind, a field or a partial rotation that draft layers do not have, by its name.
        """
        given = {name: value for name, value in rope.items() if value is not None}
        if given.get("partial_rotary_factor", 1) != 1:
            raise ValueError(
                f"partial_rotary_factor is {given['partial_rotary_factor']!r}; it must be 1: draft layers rotate whole "
                "heads here."
            )
        kind = given.get("rope_type", given.get("type", "default"))
        if kind == "default":
            return None
        if kind not in get_args(RopeType):
            raise ValueError(f"rope_type is {kind!r}; it must be default or one of {', '.join(get_args(RopeType))}.")
        known = [name.removesuffix("!") for name in _FIELDS[kind]]
        if unknown := sorted(given.keys() - _COMMON - set(known)):
            raise ValueError(f"{', '.join(unknown)}: rope_type {kind!r} has no such fields here.")
        if "original_max_position_embeddings" in known and longest is not None:
            given.setdefault("original_max_position_embeddings", longest)
        if "factor" not in given:
            raise ValueError(f"rope_type {kind!r} needs the field 'factor'.")
        return cls(kind, given["factor"], **{name: given[name] for name in known if name in given})

    def fields(self) -> dict[str, Any]:
        """The fields of `rope_parameters` that it has, without rope_theta."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def scaled(self, inverse_F: Tensor, head_dim: int, theta: float) -> tuple[Tensor, float]:
        """Frequencies f_i, scaled, and what cos and sin are multiplied by."""
        slow_F, length = inverse_F / self.factor, self.original_max_position_embeddings
        if self.rope_type == "linear" or length is None:
            return slow_F, 1.0
        if self.rope_type == "llama3":
            assert self.low_freq_factor is not None and self.high_freq_factor is not None
            turns_F = length * inverse_F / (2 * math.pi)
            kept_F = (turns_F - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            return torch.lerp(slow_F, inverse_F, kept_F.clamp(0, 1)), 1.0

        def dimension(turns: float) -> float:
            """The dimension, of E / 2, that turns so many times in L positions."""
            return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = dimension(self.beta_fast or 32.0), dimension(self.beta_slow or 1.0)
        if self.truncate is not False:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        places_F = torch.arange(len(inverse_F), device=inverse_F.device, dtype=torch.float32)
        ramp_F = ((places_F - low) / (high - low or 0.001)).clamp(0, 1)
        return torch.lerp(inverse_F, slow_F, ramp_F), self._attention_factor()

    def _attention_factor(self) -> float:
        def scale(by: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * by * math.log(self.factor) + 1

        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return scale(self.mscale) / scale(self.mscale_all_dim)
        return scale(1.0)


class Rotary(Protocol):
    """What rotations follow from: the config of a drafter with attention."""

    @property
    def head_dim(self) -> int: ...

    @property
    def rope_theta(self) -> float: ...

    @property
    def rope_scaling(self) -> RopeScaling | None: ...


def frequencies(config: Rotary, device: torch.device | None = None) -> tuple[Tensor, float]:
    """f_i, scaled [E / 2], and what cos and sin are multiplied by."""
    steps = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    inverse_F = config.rope_theta ** (-steps / config.head_dim)
    if config.rope_scaling is None:
        return inverse_F, 1.0
    return config.rope_scaling.scaled(inverse_F, config.head_dim, config.rope_theta)


def rope_table(positions: Tensor, config: Rotary) -> Rope:
    """cos and signed sin for absolute positions: [..., 1, head_dim], the 1 standing for heads."""
    inverse_F, factor = frequencies(config, positions.device)
    angles = positions[..., None].float() * inverse_F
    angles = torch.cat((angles, angles), dim=-1)[..., None, :]
    cos, sin = angles.cos(), signed_sin(angles.sin())
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


def describe_rope(config: Rotary) -> tuple[str, str]:
    """Base and scaling for people, as (label, value)."""
    scaling = config.rope_scaling
    scaled = "" if scaling is None else f", {scaling.rope_type} by {scaling.factor:g}"
    return "rope_theta", f"{config.rope_theta:g}{scaled}"


class RopeTables:
    """`rope_table` of consecutive positions, kept from call to call and extended when a later position is asked for."""

    def __init__(self, config: Rotary, device: torch.device) -> None:
        self.config, self.device = config, device
        self.kept: Rope = rope_table(torch.arange(0, device=device), config)

    def __call__(self, positions: Sequence[int]) -> Rope:
        """cos and signed sin, [X, 1, head_dim]."""
        self.cover(max(positions, default=0) + 1)
        index_X = on_device(positions, self.device, torch.long)
        return self.kept[0][index_X], self.kept[1][index_X]

    def cover(self, end: int) -> None:
        """Keep the positions before `end`; where there are not enough, `kept` is a new table of twice as many."""
        if end > len(self.kept[0]):
            self.kept = rope_table(torch.arange(2 * end, device=self.device), self.config)
