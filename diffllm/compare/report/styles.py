"""Styles of rows and arms in figures: colour, dash pattern and marker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from markupsafe import Markup

from diffllm.compare.arms.arm import RunArm
from diffllm.compare.arms.comparability import ATTENTION_PREFIX, shown_value
from diffllm.compare.report.keys import overrides
from diffllm.compare.report.rows import FIRST_VARIANTS

HUES = (
    "#69707a", "#00875f", "#0068b0", "#d4480b", "#a63a92", "#b07d00", "#4a38b8", "#0e93b8",
    "#7b1b45", "#6e5138",
)  # fmt: skip
STYLED = (
    *FIRST_VARIANTS, "diff_v1_clamped", "diff_v1_lambda_const", "diff_v1_no_head_norm",
    "diff_v2_2x_context", "diff_v2_head_norm", "diff_v2_lambda_fixed", "diff_v2_lambda_scalar",
    "diff_v2_no_lambda", "diff_v2_no_sigmoid", "diff_v2_unshared_kv", "gated_headwise",
    "gated_init_one", "standard_1p5x_heads", "standard_2x_heads", "standard_half_context",
    "standard_off_by_one", "standard_quarter_context", "standard_sink",
)  # fmt: skip
"""Variants whose place in this list determines hue and dash: append new names at the end."""
SHADES = (0.85, 0.72, 0.6, 0.48)
"""Brightness of ablations by overrides, relative to their variant."""
DARKEST = 0.55
DASHES: tuple[tuple[float, ...], ...] = (
    (), (4, 1.6), (1, 1.3), (5, 1.4, 1, 1.4), (8, 2), (3, 1.2, 1, 1.2, 1, 1.2),
)  # fmt: skip
MARKERS = "os^Dv<>ph"


@dataclass(frozen=True)
class RowStyle:
    label: str
    variant: str
    colour: str
    dash: tuple[float, ...]
    marker: str

    @property
    def line(self) -> dict[str, Any]:
        linestyle = (0, self.dash) if self.dash else "-"
        return {"color": self.colour, "linestyle": linestyle}

    @property
    def swatch(self) -> Markup:
        dash = " ".join(f"{1.8 * part:.1f}" for part in self.dash)
        return Markup(
            '<svg class="swatch" viewBox="0 0 28 10" aria-hidden="true">'
            '<line x1="0" y1="5" x2="28" y2="5" stroke="{}" stroke-width="2.4"'
            ' stroke-dasharray="{}"/></svg>'
        ).format(self.colour, dash or "none")


def row_styles(rows: Sequence[RunArm]) -> list[RowStyle]:
    """Return the style of each row's curve; a variant looks the same in every figure."""
    labels = []
    identities = []
    for row in rows:
        changes = overrides(row.runs[0]) if row.runs else row.keys
        labels.append(row.label)
        identities.append(style_identity(row.variant, changes))
    return styles_of(labels, identities)


def style_identity(variant: str, changes: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the variant and the attention overrides of an arm, which determine its style.

    Args:
        changes: overrides of the arm, of which only those of `model.attention` count.
    """
    texts = []
    for key, value in changes.items():
        if key.startswith(ATTENTION_PREFIX):
            texts.append(f"{key}={shown_value(value)}")
    return variant, *sorted(texts)


def styles_of(labels: Sequence[str], identities: Sequence[tuple[str, ...]]) -> list[RowStyle]:
    """Return a style for each label.

    An ablation by overrides of `model.attention` has a shade of its variant's hue. Shade and dash
    depend on the overrides alone. Rows of one variant with equal overrides, such as rows of several
    learning rates, get shades and dashes in their order.

    Args:
        identities: results of `style_identity`.
    """
    styles: list[RowStyle] = []
    used: set[tuple[str, int]] = set()
    pairs = zip(labels, identities, strict=True)
    for i, (label, identity) in enumerate(pairs):
        variant, *changes = identity
        hue, dash = variant_style(variant)
        # Rows with equal overrides, such as those of several learning rates, become darker.
        earlier_rows = identities[:i].count(identity)
        equal_rows = identities.count(identity)
        light = 1 - DARKEST * earlier_rows / max(equal_rows - 1, 1)
        dash += earlier_rows
        if changes:
            # Python's own hash of a text differs between processes.
            number = crc32(" ".join(changes).encode())
            light *= SHADES[number % len(SHADES)]
            dash += 1 + number // len(SHADES) % (len(DASHES) - 1)
        colour = shade(hue, light)
        # The limit ends the search if all dashes are used: then rows share a style.
        while (colour, dash % len(DASHES)) in used and dash < 2 * len(DASHES):
            dash += 1
        dash %= len(DASHES)
        used.add((colour, dash))
        marker = MARKERS[i % len(MARKERS)]
        styles.append(RowStyle(label, variant, colour, DASHES[dash], marker))
    return styles


def shade(colour: str, light: float) -> str:
    """Multiply red, green and blue of a colour such as "#0068b0" by `light`."""
    channels = []
    for channel in bytes.fromhex(colour[1:]):
        channels.append(round(channel * light))
    return f"#{bytes(channels).hex()}"


def variant_style(variant: str) -> tuple[str, int]:
    """Return the hue of an attention variant and the index of its dash pattern."""
    # The style of a plugin's variant depends on its name alone.
    place = len(STYLED) + crc32(variant.encode())
    if variant in STYLED:
        place = STYLED.index(variant)
    if place < len(FIRST_VARIANTS):
        return HUES[place], 0
    others = HUES[len(FIRST_VARIANTS) :]
    return others[place % len(others)], 1 + place % (len(DASHES) - 1)
